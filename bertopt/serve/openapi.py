"""`/openapi.json`, from the payloads that the routes check."""

from __future__ import annotations

from typing import Any

from bertopt._version import __version__
from bertopt.serve import payloads
from bertopt.serve.call import Call
from bertopt.serve.payloads import Payload

_POSTS: dict[str, type[Payload]] = {
    "/embed": payloads.Embed, "/predict": payloads.Predict, "/rerank": payloads.Rerank, "/similarity": payloads.Similarity,
    "/tokenize": payloads.Tokenize, "/v1/embeddings": payloads.OpenAiEmbeddings, "/v2/models/{name}/infer": payloads.KServeInfer,
}  # fmt: skip
_GETS = {
    "/info": "The model, the bounds, and what was proven", "/health": "200 while requests are accepted", "/metrics": "Prometheus's text format",
    "/v1/models": "OpenAI's list of models", "/v2/models/{name}": "KServe's metadata",
}  # fmt: skip
_ERRORS = {"401": "No key, or a wrong one", "413": "The body is too large", "422": "The payload names the wrong field", "424": "Not a task of this model",
           "429": "The queue is full; see Retry-After", "504": "Not answered in time"}  # fmt: skip


async def document(call: Call) -> Any:
    """Return the OpenAPI document."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {path: {"get": _operation(path, text)} for path, text in _GETS.items()}
    for path, payload in _POSTS.items():
        schema = payload.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[payload.__name__] = schema
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{payload.__name__}"}}}
        paths[path] = {"post": _operation(path, (payload.__doc__ or "").strip()) | {"requestBody": {"required": True, "content": content}}}
    return {"openapi": "3.1.0", "info": {"title": "bertopt", "version": __version__}, "paths": paths, "components": {"schemas": schemas}}


def _operation(path: str, text: str) -> dict[str, Any]:
    names = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}] if "{name}" in path else []
    responses = {"200": {"description": "The answer"}} | {status: {"description": text} for status, text in _ERRORS.items()}
    return {"summary": text, "parameters": names, "responses": responses}
