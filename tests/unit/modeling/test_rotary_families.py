"""Families without a table of positions, whose checkpoints transformers renames and splits as it reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from bertopt.core import Context, Eager
from bertopt.errors import Unsupported, UsageError
from bertopt.modeling import checkpoint
from bertopt.passes import ConvertOpenvino, ExportOnnx, PackSequences, UseSdpa
from bertopt.runtime.predictor import Predictor
from bertopt.sessions import open_session
from tests.support.tiny_models import CLASSES, HEADS, ROTARY_FAMILIES, write_tiny

CASES = [(family, task) for family in ROTARY_FAMILIES for task in HEADS if task != "question-answering"]
TEXTS = ["the cat sat on the mat", "", "a dog", "it was very good , she ran " * 5]

Made = Callable[..., Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    def make(family: str, task: str = "text-classification", pooling: str | None = None, **extra: Any) -> Path:
        return write_tiny(tmp_path_factory.mktemp(family) / "model", family, task, pooling, extra=extra)

    return make


def answers(model: Any, directory: Path) -> list[np.ndarray]:
    """The raw output of each text, of one call for all."""
    predictor = Predictor(open_session(model, threads=1), model.spec, directory)
    return [np.asarray(row[model.spec.outputs[0]]) for row in predictor.raw(TEXTS)]


def padded(model: Eager) -> dict[str, torch.Tensor]:
    return dict(zip(model.spec.inputs, model.network.example(3, 9), strict=True))


@pytest.mark.parametrize(("family", "task"), CASES)
def test_answers_are_those_of_transformers(made: Made, family: str, task: str) -> None:
    directory = made(family, task)
    model = checkpoint.load(directory)
    assert (model.spec.family, model.spec.task, model.spec.layers, model.spec.max_length) == (family, task, 2, 64)
    assert model.spec.positions == "none"
    with checkpoint.quiet():
        plain = getattr(transformers, CLASSES[family] + HEADS[task]).from_pretrained(directory, attn_implementation="eager").eval()
    inputs = padded(model)
    mask = inputs["attention_mask"].bool()
    assert 0 < int(mask.sum()) < 27
    with torch.inference_mode():
        (got,), theirs = model.network(*inputs.values()), plain(**inputs)
    wanted = theirs.last_hidden_state if task == "feature-extraction" else theirs.logits
    rows = slice(None) if task == "text-classification" else mask
    assert torch.allclose(got[rows], wanted[rows], atol=1e-5)


@pytest.mark.parametrize(("family", "task"), CASES)
def test_every_form_answers_as_the_checkpoint(made: Made, tmp_path: Path, family: str, task: str) -> None:
    directory = made(family, task)
    plain = checkpoint.load(directory)
    wanted = answers(plain, directory)
    for name in ("onnx", "openvino"):
        (tmp_path / name).mkdir()
    faster = UseSdpa()(checkpoint.load(directory), Context(tmp_path)).model
    onnx = ExportOnnx(opset=20)(faster, Context(tmp_path / "onnx", shapes=((2, 8), (3, 16)))).model
    forms: list[Any] = [faster, onnx, ConvertOpenvino()(onnx, Context(tmp_path / "openvino")).model]
    if family != "eurobert":
        forms.append(PackSequences()(checkpoint.load(directory), Context(tmp_path)).model)
    for model in forms:
        for got, expected in zip(answers(model, directory), wanted, strict=True):
            assert np.allclose(got, expected, atol=2e-5 * max(1.0, float(np.abs(expected).max())))


@pytest.mark.parametrize("family", ROTARY_FAMILIES)
def test_left_padding_changes_no_mean(made: Made, family: str) -> None:
    model = checkpoint.load(made(family, "feature-extraction", "mean"))
    assert model.spec.left_padding_invariant and model.spec.pooling == "mean"
    right = padded(model)
    left = {name: torch.stack([row.roll(int((1 - keep).sum())) for row, keep in zip(tensor, right["attention_mask"], strict=True)]) for name, tensor in right.items()}
    with torch.inference_mode():
        assert torch.allclose(model.network(*left.values())[0], model.network(*right.values())[0], atol=1e-5)


@pytest.mark.parametrize("pooling", ["late", "mean", "bos"])
def test_eurobert_classifiers_are_finite_for_a_row_without_tokens(made: Made, pooling: str) -> None:
    model = checkpoint.load(made("eurobert", classifier_pooling=pooling))
    assert model.spec.left_padding_invariant == (pooling != "bos")
    inputs = padded(model)
    with torch.inference_mode():
        (wanted,) = model.network(*inputs.values())
        inputs["attention_mask"][1] = 0
        (got,) = model.network(*inputs.values())
    assert torch.isfinite(got).all() and torch.allclose(got[[0, 2]], wanted[[0, 2]], atol=1e-6)


def test_rows_of_eurobert_are_not_packed(made: Made, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"eurobert takes no mask between tokens .*, or its head reads all tokens; families that can be packed: bert"):
        PackSequences()(checkpoint.load(made("eurobert")), Context(tmp_path))


def test_questions_need_a_head(made: Made) -> None:
    with pytest.raises(UsageError, match="transformers has no model of nomic_bert for question-answering"):
        checkpoint.load(made("nomic_bert", "feature-extraction"), "question-answering")


def test_an_older_transformers_is_named(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = made("gte")
    monkeypatch.delitem(transformers.CONFIG_MAPPING._mapping, "gte")
    with pytest.raises(Unsupported, match=r"transformers .* does not have gte, which later versions have: pip install -U transformers"):
        checkpoint.load(directory)


def test_remote_code_of_the_same_family_is_not_run(made: Made) -> None:
    directory = made("nomic_bert")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling.NomicBertModel"}}))
    with pytest.warns(UserWarning, match="dropped auto_map"):
        assert checkpoint.load(directory).spec.family == "nomic_bert"
