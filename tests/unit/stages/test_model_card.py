"""The README of an artefact: what it says, and that it says what is so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bertopt.core import Rewrite
from bertopt.results import Case, Invariance, Latency, Limits, Parity, Quality, Ratio, Stage, Worst
from bertopt.stages import Manifest, model_card
from tests.support.specs import spec

CASE = Case(batch=1, sequence=8, padding="none", where="x", max_abs=0.0, rel_l2=0.0, cosine_min=1.0, cosine_mean=1.0, label_flips=0, compared=1)


def manifest(form: str, **fields: Any) -> Manifest:
    of = spec(fields.pop("task", "feature-extraction"), **fields)
    passes = (Rewrite(name="use_sdpa", options={}), Rewrite(name="export_onnx", options={}))
    environment = {"cpu": "a CPU", "isa": [], "packages": {"torch": "2.13", "openvino": None}}
    return Manifest(form=form, precision="int8", spec=of, passes=passes, environment=environment)


def row(form: str) -> Stage:
    worst = Worst(metric="cosine_mean", value=0.9712, limit=0.96, where="x")
    latency = Latency(kind="mix", batch=None, sequence=None, n=12, p50_ms=3.0, p90_ms=4.0, p99_ms=None, texts_per_s=333.0,
                      vs_reference=Ratio(ratio=2.5, low=2.4, high=2.6))  # fmt: skip
    return Stage(
        index=3, name="int8", status="ok", form=form, precision="int8", latency=[latency], waived=["known, see ticket 12"],
        parity=Parity(passed=True, worst=worst, cases=[CASE], limits=Limits()),
        invariance=Invariance(max_abs=1e-6, cosine_min=1.0, texts=3, where="x"),
        quality=Quality(metric="accuracy", value=0.87, reference=0.871, change=-0.001, n=300),
    )  # fmt: skip


def test_a_card_says_what_was_checked() -> None:
    text = model_card.write(row("onnx"), manifest("onnx", pooling="mean"), Path(), "org/name")
    for words in (
        "# org/name, optimised by bertopt", "`use_sdpa` → `export_onnx`", "cosine_mean 0.9712, limit 0.96", "differs by at most 1e-06",
        "accuracy: 0.8700 (checkpoint 0.8710, 300 texts)", "known, see ticket 12", "FASTER 2.50x [2.40, 2.60]", "a CPU, torch 2.13",
        'bertopt.load("DIR")(["a text"])', 'SentenceTransformer("DIR", backend="onnx")',
    ):  # fmt: skip
        assert words in text, words


def test_a_first_look_gives_no_speed() -> None:
    text = model_card.write(row("onnx"), manifest("onnx", pooling="mean"), Path(), "org/name", quick=True)
    assert "FASTER" not in text and "timed briefly" in text


def test_openvino_elsewhere_needs_its_precision_stated() -> None:
    for form, fields in (("openvino", {"pooling": "mean"}), ("openvino", {"task": "fill-mask"}), ("onnx", {"pooling": "mean"})):
        text = model_card.write(row(form), manifest(form, **fields), Path(), "org/name")
        assert ("INFERENCE_PRECISION_HINT" in text) == (form == "openvino")


@pytest.mark.parametrize(
    ("form", "fields", "words", "absent"),
    [
        ("openvino", {"pooling": "mean", "layout": "packed", "row_length": 32}, "only bertopt opens this artefact", "SentenceTransformer"),
        ("openvino", {"task": "text-classification"}, 'OVModelForSequenceClassification.from_pretrained("DIR", subfolder="openvino")', "SentenceTransformer"),
        ("onnx", {"task": "question-answering"}, 'bertopt.load("DIR")([("question", "context")])', "SentenceTransformer"),
        ("onnx", {"task": "text-classification", "labels": ("LABEL_0",)}, 'bertopt.load("DIR")([("a query", "a passage")])', '["a text"]'),
        ("onnx", {"task": "text-classification", "labels": ("a", "b")}, "hf download ORG/NAME --local-dir DIR && rm -r DIR/.cache", "a query"),
        ("eager", {"pooling": "mean"}, "Only bertopt opens this artefact as it was measured", "SentenceTransformer"),
        ("engine", {"task": "fill-mask"}, "Only bertopt opens this artefact", "from_pretrained"),
    ],
)
def test_a_card_names_only_what_opens_it(form: str, fields: dict[str, Any], words: str, absent: str) -> None:
    text = model_card.write(row(form), manifest(form, **fields), Path(), "org/name")
    assert words in text and absent not in text


@pytest.mark.parametrize(("fields", "mask"), [({"mask_token": "<mask>"}, "<mask>"), ({"mask_token": {"content": "[gap]"}}, "[gap]"), ({}, "[MASK]")])
def test_a_card_masks_a_word_where_the_model_fills_masks(fields: dict[str, Any], mask: str, tmp_path: Path) -> None:
    """The answer to a text without a mask is empty."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    assert f'bertopt.load("DIR")(["a {mask} text"])' in model_card.write(row("onnx"), manifest("onnx", task="fill-mask"), tmp_path, "org/name")
