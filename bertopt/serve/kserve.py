"""KServe's Open Inference Protocol, version 2: texts in one BYTES tensor, JSON or bytes in and out."""

from __future__ import annotations

import json
import math
from itertools import chain
from typing import Any

import numpy as np

from bertopt._version import __version__
from bertopt.serve import kserve_binary
from bertopt.serve.call import Call, Raw
from bertopt.serve.errors import RequestError
from bertopt.serve.model import ServedModel
from bertopt.serve.payloads import KServeInfer, KServeTensor, PredictParameters
from bertopt.serve.task_parameters import answer_options, from_mapping
from bertopt.serve.tei import prompted
from bertopt.spec import Text

#: The only version of each model, as metadata and answers name it.
VERSION = "1"
_PAIR = "text_pair"


async def server(call: Call) -> Any:
    return {"name": "bertopt", "version": __version__, "extensions": ["binary_tensor_data"]}


async def metadata(call: Call) -> Any:
    """Return the tensors that the model takes and gives."""
    model = _model(call)
    output = (
        {"name": model.spec.outputs[0], "datatype": "FP32", "shape": [-1, model.spec.output_size]}
        if model.spec.granularity == "text"
        else {"name": "answers", "datatype": "BYTES", "shape": [-1]}
    )
    names = ("text", _PAIR) if model.spec.ranks or model.spec.task == "question-answering" else ("text",)
    return {"name": model.name, "versions": [VERSION], "platform": f"bertopt_{model.manifest.form}",
            "inputs": [{"name": name, "datatype": "BYTES", "shape": [-1]} for name in names], "outputs": [output]}  # fmt: skip


async def ready(call: Call) -> Any:
    """Raises RequestError (503) for a server that ends: clients read the status alone."""
    model = _model(call)
    call.state.check_ready()
    return {"name": model.name, "ready": True}


async def infer(call: Call, body: bytes) -> Any:
    """Return raw outputs [N, D] as FP32 where the model has one vector a text, else each text's answer as JSON in BYTES.

    A second tensor, of the same length, makes pairs. Tensors are JSON or, with the binary extension, bytes.
    """
    model = _model(call)
    whole = model.spec.granularity == "text"
    output: dict[str, Any] = {"name": model.spec.outputs[0], "datatype": "FP32"} if whole else {"name": "answers", "datatype": "BYTES"}
    head, tail = kserve_binary.split(body, call.request.headers.get(kserve_binary.HEADER))
    asked = call.parse(KServeInfer, head)
    for number, wanted in enumerate(asked.outputs or ()):
        if wanted.name != output["name"]:
            raise RequestError(400, f"outputs[{number}].name: expected '{output['name']}'; got {ascii(wanted.name)[:40]}", f"outputs[{number}].name")
    columns = _columns(asked, tail)
    texts: list[Text] = list(columns[0]) if len(columns) == 1 else list(zip(*columns, strict=True))
    if whole and "candidate_labels" in (asked.parameters or {}):
        raise RequestError(422, "parameters.candidate_labels: this route gives raw outputs; ask /predict for a zero-shot classification", "parameters")
    parameters = PredictParameters() if whole else from_mapping(asked.parameters or {})
    how = answer_options(parameters, model.spec)
    outputs = await call.outputs(prompted(model, texts, _prompt_name(asked)), None, "inputs[0].data", how.stride)
    named = {"model_name": model.name, "model_version": VERSION, **({"id": asked.id} if asked.id is not None else {})}
    answers = () if whole else await model.answers(texts, outputs, call.until, how, parameters.ignore_labels)
    values = model.vectors(outputs) if whole else [json.dumps(answer) for answer in answers]
    output["shape"] = list(np.shape(values))
    if not _wants_binary(asked, output["name"]):
        return {**named, "outputs": [{**output, "data": np.ravel(values) if whole else values}]}
    data = kserve_binary.written(values)
    content = json.dumps({**named, "outputs": [{**output, "parameters": {"binary_data_size": len(data)}}]}).encode()
    return Raw(content + data, "application/octet-stream", {kserve_binary.HEADER: str(len(content))})


def _model(call: Call) -> ServedModel:
    """Return the model of a call. Raises RequestError (404) for a version that it does not have."""
    version = call.request.path_params.get("version", VERSION)
    if version != VERSION:
        raise RequestError(404, f"'{call.model.name}' has version {VERSION}; got {ascii(version)[:40]}: leave it out")
    return call.model


def _prompt_name(asked: KServeInfer) -> str | None:
    name = (asked.parameters or {}).get("prompt_name")
    if name is not None and not isinstance(name, str):
        raise RequestError(422, f"parameters.prompt_name: expected a prompt's name; got {ascii(name)[:40]}", "parameters.prompt_name")
    return name


def _columns(asked: KServeInfer, tail: bytes) -> list[list[str]]:
    """Return the one or two tensors of texts; `tail` holds those that came as bytes, in their order."""
    columns: list[list[str]] = []
    place = 0
    for number, tensor in enumerate(asked.inputs[:3]):
        field, data = f"inputs[{number}]", tensor.data
        if tensor.datatype != "BYTES":
            raise RequestError(400, f"{field}: expected datatype BYTES with texts; got {ascii(tensor.datatype)[:40]}", field)
        if data is None:
            size = _binary_size(tensor, len(tail) - place, field)
            data = kserve_binary.texts(tail[place : place + size], field)
            place += size
        columns.append(_flat(data, tensor.shape, field))
    if len(columns) > 2 or len({len(column) for column in columns}) != 1:
        raise RequestError(400, "inputs: expected one tensor of texts, or two of the same length for pairs", "inputs")
    if place != len(tail):
        raise RequestError(400, f"inputs: {len(tail) - place} bytes follow the last tensor, which no binary_data_size counts", "inputs")
    # By name where these are the names of `bertopt deploy triton`, else by order.
    return columns[::-1] if [tensor.name for tensor in asked.inputs] == [_PAIR, "text"] else columns


def _binary_size(tensor: KServeTensor, most: int, field: str) -> int:
    size = (tensor.parameters or {}).get("binary_data_size")
    if not isinstance(size, int) or not 0 <= size <= most:
        raise RequestError(400, f"{field}: expected data, or a binary_data_size of at most {most}; got {ascii(size)[:40]}", field)
    return size


def _flat(data: list[Any], shape: list[int], field: str) -> list[str]:
    """Return the texts of a tensor, nested as its `shape` is or flat. Raises RequestError (400) for another content or number."""
    for _ in shape[1:8]:
        data = list(chain.from_iterable(data)) if all(isinstance(row, list) for row in data) else data
    if wrong := [item for item in data if not isinstance(item, str)][:1]:
        raise RequestError(400, f"{field}.data: expected texts; got {ascii(wrong[0])[:40]}", f"{field}.data")
    # Bounded before they are multiplied or shown: products of large numbers take time.
    if len(shape) > 8 or any(not 0 <= n <= len(data) for n in shape) or math.prod(shape) != len(data):
        raise RequestError(400, f"{field}.shape: expected one that holds {len(data)} texts; got {str(shape[:8])[:60]}", f"{field}.shape")
    return data


def _wants_binary(asked: KServeInfer, name: str) -> bool:
    everything = (asked.parameters or {}).get("binary_data_output", False)
    return any(bool((one.parameters or {}).get("binary_data", everything)) for one in asked.outputs or () if one.name == name) or (
        not asked.outputs and bool(everything)
    )
