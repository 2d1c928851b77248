"""Re-ranking in the shape of Cohere's and Jina's services, `/v1/rerank` and `/v2/rerank`."""

from __future__ import annotations

from typing import Any

from bertopt.serve import tei
from bertopt.serve.call import Call
from bertopt.serve.payloads import Documents


async def rerank(call: Call, asked: Documents) -> Any:
    """Return the documents' numbers with their relevance to the query, best first, `top_n` at most."""
    call.choose_named(asked.model)
    texts = [one if isinstance(one, str) else one.text for one in asked.documents]
    ranked, tokens = await tei.ranked(call, asked.query, texts, raw=False, truncate=None, where="documents")
    results = [
        {"index": i, "relevance_score": score, **({"document": {"text": texts[i]}} if asked.return_documents else {})}
        for i, score in ranked[: asked.top_n]
    ]
    return {"model": call.model.name, "results": results, "usage": {"total_tokens": tokens}}
