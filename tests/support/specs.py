"""Small `Spec`s to test with."""

from __future__ import annotations

from typing import Any

from bertopt.core import Spec


def spec(task: Any = "text-classification", **fields: Any) -> Spec:
    outputs = {"question-answering": ("start_logits", "end_logits"), "feature-extraction": ("sentence_embedding",)}
    given = {
        "family": "bert", "task": task, "inputs": ("input_ids", "attention_mask", "token_type_ids"),
        "outputs": outputs.get(task, ("logits",)), "layers": 2, "heads": 2, "hidden": 4, "vocabulary": 40,
        "token_types": 2, "pad_id": 3, "max_length": 32, "text_length": 32, "labels": ("bad", "good", "mixed"),
        "parameters": 1,
    }  # fmt: skip
    return Spec.model_validate(given | fields)
