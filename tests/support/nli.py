"""Tiny classifiers of natural language inference."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.tiny_models import write_tiny

NLI = ("contradiction", "neutral", "entailment")


def write_nli(out: Path, names: tuple[str, ...] = NLI, family: str = "bert") -> Path:
    write_tiny(out, family, extra={"num_labels": len(names), "id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}})
    fields = json.loads((out / "tokenizer_config.json").read_text())
    fields["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]  # which the tiny tokenizer's class leaves out
    (out / "tokenizer_config.json").write_text(json.dumps(fields))
    return out
