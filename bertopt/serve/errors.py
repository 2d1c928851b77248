"""Errors of requests, in the shape of the API that was called. They name the field, never a path or a stack."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

#: text-embeddings-inference's error types by status.
_TEI_TYPES = {413: "Validation", 422: "Validation", 424: "Backend", 429: "Overloaded", 500: "Backend", 503: "Unhealthy"}
_OPENAI_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 500: "server_error",
                 503: "server_error", 504: "server_error"}  # fmt: skip


#: What clients made for another service send in place of texts, by payload: kinds of value, and what to send.
_MIX_UPS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "OpenAiEmbeddings": ((int, list), "send texts: token ids are another tokenizer's (LangChain: check_embedding_ctx_length=False)"),
    "Predict": (dict, "send a question with its context as {\"question\": a, \"context\": b}, any pair as [a, b]"),
}


class RequestError(Exception):
    """A request that gets `status` and `message`; `field` is what to change in it."""

    def __init__(self, status: int, message: str, field: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.field = status, message, field
        self.headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}


class ClientGone(Exception):
    """The client closed its connection before it was answered."""


def body(path: str, error: RequestError) -> dict[str, Any]:
    """Return the JSON of an error as the API of `path` words it."""
    if path.startswith("/v1/"):
        kind = _OPENAI_TYPES.get(error.status, "invalid_request_error")
        return {"error": {"message": error.message, "type": kind, "param": error.field, "code": None}}
    if path.startswith("/v2"):
        return {"error": error.message}
    return {"error": error.message, "error_type": _TEI_TYPES.get(error.status, "Validation")}


def from_validation(error: ValidationError) -> RequestError:
    """Return the first mistake of a payload, as near to it as the kinds of value come that its field may have."""
    mistakes = error.errors(include_url=False, include_context=False)
    first = max((one for one in mistakes if one["loc"][:1] == mistakes[0]["loc"][:1]), key=lambda one: len(one["loc"]))
    if first["type"] == "json_invalid":
        why = first["msg"].removeprefix("Invalid JSON: ")
        # Half of a character outside the basic plane, as JSON's escapes can write it.
        why += ": a lone surrogate is no Unicode" if "hex escape" in why or "surrogate" in why else ""
        return RequestError(400, f"the body must be JSON in UTF-8: {why}")
    # The names of union members are no fields of the client's.
    parts = [str(part) for part in first["loc"] if isinstance(part, int) or part.isidentifier()]
    field = ".".join(part for part in parts if part not in ("str", "int", "float", "bool", "list", "tuple"))
    got = "" if first["type"] == "missing" else f"; got {_shown(first['input'])}"
    kinds, instead = _MIX_UPS.get(error.title, ((), ""))
    advice = f": {instead}" if first["type"] == "string_type" and isinstance(first["input"], kinds) else ""
    return RequestError(422, f"{field or 'body'}: {first['msg'][:1].lower()}{first['msg'][1:]}{got}{advice}", field or None)


def _shown(value: object) -> str:
    text = ascii(value[:60] if isinstance(value, str | list) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."
