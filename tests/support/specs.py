"""Small `Spec`s to test with."""

from __future__ import annotations

from typing import Any

from bertopt.core import ShapeLimits, Spec


def spec(task: Any = "text-classification", **fields: Any) -> Spec:
    outputs = {"question-answering": ("start_logits", "end_logits"), "feature-extraction": ("sentence_embedding",)}
    given = {
        "family": "bert", "task": task, "inputs": ("input_ids", "attention_mask", "token_type_ids"),
        "outputs": outputs.get(task, ("logits",)), "layers": 2, "heads": 2, "hidden": 4, "vocabulary": 40,
        "token_types": 2, "pad_id": 3, "max_length": 32, "text_length": 32, "labels": ("bad", "good", "mixed"),
        "parameters": 1,
    }  # fmt: skip
    return Spec.model_validate(given | fields)


#: One for each way in which texts are labelled.
TEXT = spec()
SEVERAL = TEXT.model_copy(update={"multi_label": True})
VALUE = TEXT.model_copy(update={"regression": True, "labels": ("score",)})
VALUES = TEXT.model_copy(update={"regression": True, "labels": ("rating", "price")})
RERANKER = TEXT.model_copy(update={"labels": ("LABEL_0",)})
EMBEDDING = TEXT.model_copy(update={"task": "feature-extraction", "pooling": "mean", "labels": ()})
TAGS = TEXT.model_copy(update={"task": "token-classification", "labels": ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")})
QUESTIONS = TEXT.model_copy(update={"task": "question-answering", "labels": ()})

#: Models with enough ids and positions for the coverage sweeps: a tiny one, and one of MiniLM's size.
SWEPT = spec(vocabulary=20_000, hidden=32, pad_id=0, max_length=512, text_length=512, labels=("bad", "good"))
MINILM = SWEPT.model_copy(update={"layers": 6, "hidden": 384, "vocabulary": 30_522})
WHOLE = ShapeLimits(longest=512)

#: A classifier without token types.
TWO_LABELS = Spec(
    family="bert", task="text-classification", inputs=("input_ids", "attention_mask"), outputs=("logits",), layers=2,
    heads=2, hidden=32, vocabulary=85, token_types=0, pad_id=0, max_length=64, text_length=64,
    labels=("bad", "good"), parameters=1,
)  # fmt: skip
