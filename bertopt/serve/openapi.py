"""`/openapi.json`, from the payloads that the routes check."""

from __future__ import annotations

import re
from typing import Any

from bertopt._version import __version__
from bertopt.serve import payloads, tei
from bertopt.serve.call import Call
from bertopt.serve.payloads import Payload

_POSTS: dict[str, type[Payload]] = {
    **{prefix + path: payload for prefix in ("", "/models/{name}") for path, (_, payload) in tei.ROUTES.items()},
    "/v1/embeddings": payloads.OpenAiEmbeddings, "/v1/rerank": payloads.Documents, "/v2/rerank": payloads.Documents, "/v2/models/{name}/infer": payloads.KServeInfer,
    "/v2/models/{name}/versions/{version}/infer": payloads.KServeInfer,
}  # fmt: skip
#: What `/` takes, by what the model is made for.
_ROOT = (payloads.Embed, payloads.EmbedSparse, payloads.Rerank, payloads.Predict)
_INFO, _READY = "The model, the bounds, and what was proven", "200 while requests are accepted"
_METADATA = "KServe's metadata of a model"
_GETS = {
    "/info": _INFO, "/models/{name}/info": _INFO, "/health": _READY, "/metrics": "Prometheus's text format", "/openapi.json": "This document",
    "/v1/models": "OpenAI's list of models", "/v1/models/{name}": "OpenAI's description of a model",
    "/v2": "KServe's metadata of the server", "/v2/health/live": "200 while the process answers",
    "/v2/health/ready": _READY, "/v2/models/{name}": _METADATA, "/v2/models/{name}/ready": _READY,
    "/v2/models/{name}/versions/{version}": _METADATA, "/v2/models/{name}/versions/{version}/ready": _READY,
}  # fmt: skip
_ANY = {"401": "No key, or a wrong one", "404": "No model or version of that name"}
_POST = {
    "400": "The body is no JSON, or no tensor of texts", "408": "The body did not arrive in time", "413": "The body is too large",
    "415": "The body is compressed", "422": "The payload names the wrong field", "424": "Not a task of this model",
    "429": "The queue is full; see Retry-After", "500": "The model failed; the log says why", "503": "The server ended before it had answered",
    "504": "Not answered in time",
}  # fmt: skip


async def document(call: Call) -> Any:
    """Return the OpenAPI document."""
    schemas: dict[str, Any] = {}
    ends = {"503": "The server is ending"}
    paths: dict[str, Any] = {path: {"get": _operation(path, text, ends if text == _READY else {})} for path, text in _GETS.items()}
    for path, payload in _POSTS.items():
        schema = payload.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[payload.__name__] = schema
        paths[path] = {"post": _operation(path, (payload.__doc__ or "").strip(), _POST) | _body(_reference(payload))}
    summary = "What Hugging Face's clients send that know no route: a payload of /embed, /embed_sparse, /rerank or /predict"
    paths["/"] = {"post": _operation("/", summary, _POST) | _body({"anyOf": [_reference(payload) for payload in _ROOT]})}
    return {"openapi": "3.1.0", "info": {"title": "bertopt", "version": __version__}, "paths": paths, "components": {"schemas": schemas}}


def _reference(payload: type[Payload]) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{payload.__name__}"}


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _operation(path: str, text: str, errors: dict[str, str]) -> dict[str, Any]:
    names = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in re.findall(r"{(\w+)}", path)]
    responses = {"200": {"description": "The answer"}} | {status: {"description": text} for status, text in sorted({**_ANY, **errors}.items())}
    return {"summary": text, "parameters": names, "responses": responses}
