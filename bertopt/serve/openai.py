"""OpenAI's `/v1/embeddings` and `/v1/models`."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from bertopt.serve.call import Call
from bertopt.serve.errors import RequestError
from bertopt.serve.payloads import OpenAiEmbeddings, refuse_options
from bertopt.serve.tei import normalised, prompted


async def embeddings(call: Call, asked: OpenAiEmbeddings) -> Any:
    """Return embeddings as lists of numbers, or as little-endian float32 in base64."""
    call.choose_named(asked.model)
    model = call.model
    if model.spec.sparse:
        raise RequestError(400, f"'{model.name}' gives sparse embeddings, which this route has no form for; use /embed_sparse", "model")
    if not model.embeds:
        raise RequestError(400, f"'{model.name}' gives no embedding for a text: it is made for {model.spec.task}", "model")
    refuse_options(asked, model.spec.embedding_size, model.side)
    texts = [asked.input] if isinstance(asked.input, str) else asked.input
    outputs = await call.outputs(prompted(model, texts, asked.prompt_name), None, "input")
    vectors = normalised(model, model.vectors(outputs), asked.dimensions).astype("<f4", copy=False)

    def written(vector: Any) -> Any:
        return base64.b64encode(np.ascontiguousarray(vector).tobytes()).decode() if asked.encoding_format == "base64" else vector

    data = [{"object": "embedding", "index": i, "embedding": written(vector)} for i, vector in enumerate(vectors)]
    usage = {"prompt_tokens": outputs.tokens, "total_tokens": outputs.tokens}
    return {"object": "list", "data": data, "model": model.name, "usage": usage}


async def models(call: Call) -> Any:
    return {"object": "list", "data": [_described(name) for name in call.state.models]}


async def model(call: Call) -> Any:
    return _described(call.model.name)


def _described(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "bertopt"}
