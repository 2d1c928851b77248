"""RoFormer: BERT with positions that turn neighbouring channels, of values too where its configuration says so; and its tokenizer."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bertopt.core import Context, Eager
from bertopt.errors import IntegrityError, Unsupported, UsageError
from bertopt.modeling import checkpoint
from bertopt.passes import (
    KeepClsOnly,
    MergeQkv,
    PackSequences,
    UseBetterTransformer,
    UseSdpa,
)
from tests.support.forms import answers, assert_answers_of_the_checkpoint, forms, with_config
from tests.support.tiny_models import HEADS, VOCABULARY, write_tiny

SINES = "encoder.embed_positions.weight"

Made = Callable[..., Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    def make(task: str = "text-classification", pooling: str | None = None, **extra: Any) -> Path:
        return write_tiny(tmp_path_factory.mktemp("roformer") / "model", "roformer", task, pooling, extra=extra)

    return make


@pytest.fixture(scope="module")
def usual(made: Made) -> Path:
    return made()


def copied(source: Path, out: Path, **fields: Any) -> Path:
    return with_config(Path(shutil.copytree(source, out)), **fields)


def inputs_of(model: Eager, sequence: int = 12) -> dict[str, torch.Tensor]:
    return dict(zip(model.spec.inputs, model.network.example(3, sequence), strict=True))


@pytest.mark.parametrize(("task", "extra"), [*((task, {}) for task in HEADS), ("feature-extraction", {"rotary_value": True, "embedding_size": 32})], ids=str)
def test_answers_are_those_of_transformers_in_every_form(made: Made, tmp_path: Path, task: str, extra: dict[str, Any]) -> None:
    directory = made(task, **extra)
    model = checkpoint.load(directory)
    assert (model.spec.task, model.spec.layers, model.spec.token_types, model.spec.max_length) == (task, 2, 2, 64)
    with checkpoint.quiet():
        plain = getattr(transformers, f"RoFormer{HEADS[task]}").from_pretrained(directory, attn_implementation="eager").eval()
    inputs = inputs_of(model)
    inputs["token_type_ids"][:, 5:] = 1
    mask = inputs["attention_mask"].bool()
    assert 0 < int(mask.sum()) < mask.numel()
    with torch.inference_mode():
        got, theirs = model.network(*inputs.values())[0], plain(**inputs)
    wanted = {"feature-extraction": "last_hidden_state", "question-answering": "start_logits"}.get(task, "logits")
    rows: Any = slice(None) if task == "text-classification" else mask
    assert torch.allclose(got[rows], theirs[wanted][rows], atol=1e-5)
    assert_answers_of_the_checkpoint(forms(directory, tmp_path, sdpa=False), directory)


@pytest.mark.parametrize("turned", [False, True])
def test_left_padding_changes_no_mean_but_where_values_are_turned(made: Made, turned: bool) -> None:
    """Turned values make a text depend on the columns in which it stands."""
    model = checkpoint.load(made("feature-extraction", "mean", rotary_value=turned))
    assert model.spec.left_padding_invariant != turned and model.spec.positions == ("column" if turned else "none")
    right = inputs_of(model)
    left = {name: torch.stack([row.roll(int((1 - keep).sum())) for row, keep in zip(tensor, right["attention_mask"], strict=True)]) for name, tensor in right.items()}
    with torch.inference_mode():
        assert torch.allclose(model.network(*left.values())[0], model.network(*right.values())[0], atol=1e-5) != turned


def test_sines_that_a_checkpoint_lacks_are_made_and_others_are_read(made: Made, tmp_path: Path) -> None:
    source = made("feature-extraction")
    tensors = load_file(source / "model.safetensors")
    assert SINES in tensors
    without, others = copied(source, tmp_path / "without"), copied(source, tmp_path / "others")
    save_file({name: tensor for name, tensor in tensors.items() if name != SINES}, without / "model.safetensors", {"format": "pt"})
    save_file({**tensors, SINES: tensors[SINES].flip(0)}, others / "model.safetensors", {"format": "pt"})
    one, other, third = (checkpoint.load(directory) for directory in (source, without, others))
    assert torch.equal(one.network.base.encoder.embed_positions.weight, other.network.base.encoder.embed_positions.weight)
    with torch.inference_mode():
        first, second, last = (model.network(*inputs_of(model).values())[0] for model in (one, other, third))
    assert torch.equal(first, second) and not torch.allclose(first, last, atol=1e-2)


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"norm_type": "rms_norm"}, "norm_type must be 'layer_norm', .*; got 'rms_norm'"), ({"use_bias": False}, "use_bias must be True"), ({"attention_scale": False}, "attention_scale must be True")],
)
def test_what_its_second_version_computes_is_named(usual: Path, tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=f"^config.json: {words}"):
        checkpoint.load(copied(usual, tmp_path / "model", **fields))
    assert checkpoint.load(copied(usual, tmp_path / "first", norm_type="layer_norm", use_bias=True)).spec.family == "roformer"


def test_a_decoder_is_refused_and_layers_too_many_are_named(usual: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is_decoder"):
        checkpoint.load(copied(usual, tmp_path / "decoder", is_decoder=True))
    with pytest.raises(IntegrityError, match=r"tensor 'encoder\.layer\.1\.\S+' is in the checkpoint but not"):
        checkpoint.load(copied(usual, tmp_path / "fewer", num_hidden_layers=1))


@pytest.mark.parametrize("step", [UseSdpa(), UseBetterTransformer(), KeepClsOnly(), MergeQkv(), PackSequences()], ids=lambda step: step.name())
def test_what_does_not_know_its_layers_says_so(usual: Path, tmp_path: Path, step: Any) -> None:
    with pytest.raises(Unsupported, match=r"(?i)roformer"):
        step(checkpoint.load(usual), Context(tmp_path))


@pytest.mark.parametrize("with_program", [False, True])
@pytest.mark.parametrize("named", ["RoFormerTokenizer", "RoFormerTokenizerFast", None])
def test_a_tokenizer_that_is_a_program_is_refused(usual: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str | None, with_program: bool) -> None:
    """Its tokenizer.json states another splitting, and was read in its place if the program was not there to be asked."""
    monkeypatch.setitem(sys.modules, "rjieba", SimpleNamespace(tokenize=lambda text, hmm: [(text, 0, len(text))]) if with_program else None)
    directory = copied(usual, tmp_path / "model")
    (directory / "vocab.txt").write_text("\n".join(VOCABULARY), "utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": named, "model_max_length": 64} if named else {"model_max_length": 64}))
    with pytest.raises(Unsupported, match=r"Python program \(rjieba\), .*: tokenizer_class BertTokenizer with vocab.txt, or"):
        checkpoint.load(directory)


def test_another_tokenizer_is_used_as_it_is_named(usual: Path, tmp_path: Path) -> None:
    directory = copied(usual, tmp_path / "model")
    (directory / "vocab.txt").write_text("\n".join(VOCABULARY), "utf-8")
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", "model_max_length": 64}))
    model, out = checkpoint.load(directory), tmp_path / "out"
    out.mkdir()
    checkpoint.write_snapshot(model, out)
    for one, other in zip(answers(model, out), answers(checkpoint.load(usual), usual), strict=True):
        assert np.allclose(one, other, atol=1e-6)
