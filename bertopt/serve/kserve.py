"""KServe's Open Inference Protocol, version 2: texts in one BYTES tensor, JSON or bytes in and out."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from bertopt._version import __version__
from bertopt.runtime.tokenization import Text
from bertopt.serve import kserve_binary
from bertopt.serve.call import Call, Raw
from bertopt.serve.errors import RequestError
from bertopt.serve.payloads import KServeInfer


async def server(call: Call) -> Any:
    return {"name": "bertopt", "version": __version__, "extensions": ["binary_tensor_data"]}


async def metadata(call: Call) -> Any:
    """Return the tensors that the model takes and gives."""
    model = call.model
    width = len(model.spec.labels) or model.spec.hidden
    output = (
        {"name": model.spec.outputs[0], "datatype": "FP32", "shape": [-1, width]}
        if model.spec.granularity == "text"
        else {"name": "answers", "datatype": "BYTES", "shape": [-1]}
    )
    return {"name": model.name, "versions": ["1"], "platform": f"bertopt_{model.manifest.form}",
            "inputs": [{"name": "text", "datatype": "BYTES", "shape": [-1]}], "outputs": [output]}  # fmt: skip


async def ready(call: Call) -> Any:
    return {"name": call.model.name, "ready": call.state.accepts}


async def infer(call: Call, body: bytes) -> Any:
    """Return raw outputs [N, D] as FP32 where the model has one vector a text, else each text's answer as JSON in BYTES.

    A second tensor, of the same length, makes pairs. Tensors are JSON or, with the binary extension, bytes.
    """
    head, tail = kserve_binary.split(body, call.request.headers.get(kserve_binary.HEADER))
    asked = call.parse(KServeInfer, head)
    columns = _columns(asked, tail)
    texts: list[Text] = list(columns[0]) if len(columns) == 1 else list(zip(*columns, strict=True))
    outputs = await call.outputs(texts, None, "inputs[0].data")
    model = call.model
    named = {"model_name": model.name, "model_version": "1", **({"id": asked.id} if asked.id is not None else {})}
    whole = model.spec.granularity == "text"
    values = model.vectors(outputs) if whole else [json.dumps(answer) for answer in await model.answers(texts, outputs, call.until)]
    output: dict[str, Any] = {"name": model.spec.outputs[0], "datatype": "FP32"} if whole else {"name": "answers", "datatype": "BYTES"}
    output["shape"] = list(np.shape(values))
    if not _wants_binary(asked, output["name"]):
        return {**named, "outputs": [{**output, "data": np.ravel(values).tolist()}]}
    data = kserve_binary.written(values)
    content = json.dumps({**named, "outputs": [{**output, "parameters": {"binary_data_size": len(data)}}]}).encode()
    return Raw(content + data, "application/octet-stream", {kserve_binary.HEADER: str(len(content))})


def _columns(asked: KServeInfer, tail: bytes) -> list[list[str]]:
    """Return the one or two tensors of texts; `tail` holds those that came as bytes, in their order."""
    columns, place = [], 0
    for number, tensor in enumerate(asked.inputs[:3]):
        field, data = f"inputs[{number}]", tensor.data
        if data is None:
            size = (tensor.parameters or {}).get("binary_data_size")
            if not isinstance(size, int) or not 0 <= size <= len(tail) - place:
                raise RequestError(400, f"{field}: expected data, or a binary_data_size of at most {len(tail) - place}; got {ascii(size)[:40]}", field)
            data = kserve_binary.texts(tail[place : place + size], field)
            place += size
        if tensor.datatype != "BYTES" or any(not isinstance(text, str) for text in data):
            raise RequestError(400, f"{field}: expected datatype BYTES with texts; got {tensor.datatype}", field)
        # Bounded before they are multiplied or shown: products of large numbers take time.
        if len(tensor.shape) > 8 or any(not 0 <= n <= len(data) for n in tensor.shape) or math.prod(tensor.shape) != len(data):
            raise RequestError(400, f"{field}.shape: expected one that holds {len(data)} texts; got {str(tensor.shape[:8])[:60]}", f"{field}.shape")
        columns.append(data)
    if len(columns) > 2 or len({len(column) for column in columns}) != 1:
        raise RequestError(400, "inputs: expected one tensor of texts, or two of the same length for pairs", "inputs")
    return columns


def _wants_binary(asked: KServeInfer, name: str) -> bool:
    everything = (asked.parameters or {}).get("binary_data_output", False)
    return any(bool((one.parameters or {}).get("binary_data", everything)) for one in asked.outputs or () if one.name == name) or (
        not asked.outputs and bool(everything)
    )
