"""KServe's Open Inference Protocol, version 2: texts in one BYTES tensor, JSON in and out."""

from __future__ import annotations

import json
import math
from typing import Any

from bertopt._version import __version__
from bertopt.runtime.tokenization import Text
from bertopt.serve.call import Call
from bertopt.serve.errors import RequestError
from bertopt.serve.payloads import KServeInfer


async def server(call: Call) -> Any:
    return {"name": "bertopt", "version": __version__, "extensions": []}


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


async def infer(call: Call, asked: KServeInfer) -> Any:
    """Return raw outputs [N, D] as FP32 where the model has one vector a text, else each text's answer as JSON in BYTES.

    A second tensor, of the same length, makes pairs.
    """
    columns = []
    for number, tensor in enumerate(asked.inputs[:3]):
        field = f"inputs[{number}]"
        if tensor.datatype != "BYTES" or any(not isinstance(text, str) for text in tensor.data):
            raise RequestError(400, f"{field}: expected datatype BYTES with texts; got {tensor.datatype}", field)
        if math.prod(tensor.shape) != len(tensor.data):
            raise RequestError(400, f"{field}.shape: {tensor.shape} does not hold {len(tensor.data)} texts", f"{field}.shape")
        columns.append(tensor.data)
    if len(columns) > 2 or len({len(column) for column in columns}) != 1:
        raise RequestError(400, "inputs: expected one tensor of texts, or two of the same length for pairs", "inputs")
    texts: list[Text] = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
    outputs = await call.outputs(texts, None, "inputs[0].data")
    model = call.model
    if model.spec.granularity == "text":
        vectors = model.vectors(outputs)
        output = {"name": model.spec.outputs[0], "datatype": "FP32", "shape": list(vectors.shape), "data": vectors.ravel().tolist()}
    else:
        rows = [json.dumps(answer) for answer in model.answers(texts, outputs)]
        output = {"name": "answers", "datatype": "BYTES", "shape": [len(rows)], "data": rows}
    named = {"id": asked.id} if asked.id is not None else {}
    return {"model_name": model.name, "model_version": "1", **named, "outputs": [output]}
