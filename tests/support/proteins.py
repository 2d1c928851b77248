"""Tiny ESM checkpoints with the files of ESM's own tokenizer, whose texts are sequences of amino acids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.support.tiny_models import write_tiny

#: As published with ESM-2.
VOCABULARY = ("<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>")
_TOKENIZER = {
    "clean_up_tokenization_spaces": True, "cls_token": "<cls>", "eos_token": "<eos>", "mask_token": "<mask>", "pad_token": "<pad>", "unk_token": "<unk>",
    "model_max_length": 1000000000000000019884624838656, "tokenizer_class": "EsmTokenizer",
}  # fmt: skip


def write_tokenizer(out: Path, vocabulary: Sequence[str] = VOCABULARY, **fields: Any) -> Path:
    """Write ESM's tokenizer to a checkpoint's directory, in place of any other; `fields` are further ones of its configuration."""
    (out / "tokenizer.json").unlink(missing_ok=True)
    (out / "vocab.txt").write_text("\n".join(vocabulary))
    (out / "tokenizer_config.json").write_text(json.dumps(_TOKENIZER | fields))
    return out


def write_protein(
    out: Path, task: str = "text-classification", pooling: str | None = None, seed: int = 0, extra: Mapping[str, Any] = MappingProxyType({})
) -> Path:
    """Write a tiny checkpoint like ESM-2, tokenizer included."""
    size = {"vocab_size": len(VOCABULARY), "pad_token_id": 1, "mask_token_id": 32, **extra}
    return write_tokenizer(write_tiny(out, "esm", task, pooling, seed, size))
