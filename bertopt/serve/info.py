"""`/info`: the model, the server's bounds, and what was proven of the artefact."""

from __future__ import annotations

from typing import Any

from bertopt._version import __version__
from bertopt.serve.call import Call
from bertopt.serve.model import ServedModel


async def info(call: Call) -> Any:
    """Return text-embeddings-inference's fields, and under `bertopt` the gates with their limits and the machine."""
    model, limits = call.model, call.model.predictor.runner.limits
    return {
        "model_id": model.name,
        "model_sha": model.manifest.checkpoint_commit,
        "model_dtype": model.manifest.precision,
        "model_type": _kind(model),
        "max_concurrent_requests": model.settings.concurrent_requests,
        "max_input_length": model.predictor.tokenizer.limit,
        "max_batch_tokens": limits.tokens,
        "max_batch_requests": limits.rows,
        "max_client_batch_size": model.settings.request_texts,
        "auto_truncate": model.settings.truncate,
        "tokenization_workers": 1,
        "version": __version__,
        "sha": None,
        "docker_label": None,
        "bertopt": {
            "models": list(call.state.models),
            "task": model.spec.task,
            "prompts": model.predictor.prompts,
            "form": model.manifest.form,
            "checkpoint_sha256": model.manifest.checkpoint_sha256,
            "artefact_sha256": model.manifest.content_sha256,
            "exported_with": model.manifest.bertopt_version,
            "passes": [entry.name for entry in model.manifest.passes],
            "gates": model.manifest.gates,
            "proven_on": model.manifest.environment,
            "runtime": model.predictor.session.facts().runtime,
            "load_s": round(model.load_s, 3),
            "warm_up_s": None if model.warm_up_s is None else round(model.warm_up_s, 3),
        },
    }


def _kind(model: ServedModel) -> dict[str, Any]:
    spec = model.spec
    if spec.task == "feature-extraction":
        return {"embedding": {"pooling": "splade" if spec.sparse else spec.pooling}}
    labels = {"id2label": {str(i): label for i, label in enumerate(spec.labels)}, "label2id": {label: i for i, label in enumerate(spec.labels)}}
    return {"reranker" if spec.ranks else "classifier": labels}
