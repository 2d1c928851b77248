"""ESM: rotary or counted positions, and embeddings scaled by a row's share of mask tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bertopt.core import Context, Eager
from bertopt.errors import IntegrityError, Unsupported, UsageError
from bertopt.modeling import checkpoint
from bertopt.passes import CastHalf, KeepClsOnly, MergeQkv, PackSequences, UseSdpa
from tests.support.forms import assert_answers_of_the_checkpoint, forms
from tests.support.rewritten import packed_error, padded_error, run
from tests.support.tiny_models import HEADS, write_tiny

TASKS = [task for task in HEADS if task != "question-answering"]
#: As ESM-2, ESM-1b, ESM-1v, and a Nucleotide Transformer's.
KINDS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "absolute": {"position_embedding_type": "absolute", "emb_layer_norm_before": True, "max_position_embeddings": 65},
    "no norm": {"position_embedding_type": "absolute", "max_position_embeddings": 65},
    "no dropout": {"token_dropout": False},
}
TEXTS = ["the cat sat on the mat", "", "a [MASK] dog", "it was very good , she ran " * 5, "[MASK] " * 7 + "cat"]
MASK = 4

Made = Callable[..., Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    def make(task: str = "text-classification", pooling: str | None = None, **extra: Any) -> Path:
        return write_tiny(tmp_path_factory.mktemp("esm") / "model", "esm", task, pooling, extra=extra)

    return make


def theirs(directory: Path, task: str) -> Any:
    with checkpoint.quiet():
        return getattr(transformers, f"Esm{HEADS[task]}").from_pretrained(directory, attn_implementation="eager").eval()


def rows() -> dict[str, torch.Tensor]:
    """Rows without mask tokens and with one to many, padded on either side and with holes; the ids of padding are padding."""
    rng = np.random.default_rng(3)
    mask = np.ones((7, 17), np.int64)
    mask[1, 9:], mask[2, :8], mask[3, 4:6], mask[3, 11], mask[4, 1:] = 0, 0, 0, 0, 0
    ids = rng.integers(5, 80, mask.shape)
    ids[0, 3], ids[1, 2:5], ids[2, 9:], ids[3, 7] = MASK, MASK, MASK, MASK
    ids[6, 1:] = MASK
    ids[2, 16] = 9
    ids[mask == 0] = 0
    return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_transformers(made: Made, kind: str, task: str) -> None:
    directory = made(task, **KINDS[kind])
    model = checkpoint.load(directory)
    assert (model.spec.family, model.spec.task, model.spec.layers, model.spec.max_length) == ("esm", task, 2, 64)
    assert model.spec.positions == ("counted" if "position_embedding_type" in KINDS[kind] else "none")
    assert model.spec.dropped_id == (None if kind == "no dropout" else MASK)
    inputs = rows()
    with torch.inference_mode():
        (got,), answer = model.network(*inputs.values()), theirs(directory, task)(**inputs)
    wanted = answer.last_hidden_state if task == "feature-extraction" else answer.logits
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("kind", ["rotary", "absolute"])
def test_rows_without_tokens_and_of_mask_tokens_alone_are_finite(made: Made, kind: str) -> None:
    directory = made("token-classification", **KINDS[kind])
    model, inputs = checkpoint.load(directory), rows()
    inputs["input_ids"][1], inputs["attention_mask"][1], inputs["input_ids"][6] = 0, 0, MASK
    with torch.inference_mode():
        (got,), wanted = model.network(*inputs.values()), theirs(directory, "token-classification")(**inputs).logits
    assert torch.isfinite(got).all()
    assert wanted[[1, 6]].isnan().all(), "transformers gives numbers here: give the same"
    assert torch.equal(got[[0, 2, 3, 4, 5]], wanted[[0, 2, 3, 4, 5]])


def test_mask_tokens_that_are_padding_change_nothing(made: Made) -> None:
    model, inputs = checkpoint.load(made("token-classification")), rows()
    with torch.inference_mode():
        (wanted,) = model.network(*inputs.values())
        inputs["input_ids"][inputs["attention_mask"] == 0] = MASK
        (got,) = model.network(*inputs.values())
    valid = inputs["attention_mask"].bool()
    assert torch.equal(got[valid], wanted[valid])


@pytest.mark.parametrize(("kind", "task"), [("rotary", "token-classification"), ("absolute", "text-classification")])
def test_every_form_answers_as_the_checkpoint(made: Made, tmp_path: Path, kind: str, task: str) -> None:
    directory = made(task, **KINDS[kind])
    assert_answers_of_the_checkpoint(forms(directory, tmp_path), directory, TEXTS)


LINES: list[list[Any]] = [
    [MergeQkv()], [PackSequences(row_length=16)], [KeepClsOnly()], [UseSdpa(), KeepClsOnly(), MergeQkv()],
    [KeepClsOnly(), MergeQkv(), PackSequences(row_length=16)], [UseSdpa(), KeepClsOnly(), MergeQkv(), PackSequences(row_length=16)],
]  # fmt: skip


@pytest.mark.parametrize("line", LINES, ids=lambda line: "-".join(step.name() for step in line))
@pytest.mark.parametrize("kind", KINDS)
def test_rewritten_networks_answer_as_the_checkpoint(made: Made, tmp_path: Path, kind: str, line: list[Any]) -> None:
    directory = made(**KINDS[kind])
    reference, model = checkpoint.load(directory), checkpoint.load(directory)
    for step in line:
        model = step(model, Context(tmp_path)).model
    if model.spec.layout == "packed":
        assert packed_error(reference, model) <= 1e-5
        assert_answers_of_the_checkpoint([model], directory, TEXTS)
    else:
        assert padded_error(reference, model) <= 1e-5
        inputs = {name: tensor.numpy() for name, tensor in rows().items()}
        assert np.allclose(run(model, inputs)[0], run(reference, inputs)[0], atol=1e-5)


@pytest.mark.parametrize("task", ["token-classification", "fill-mask"])
def test_packed_rows_scale_each_text_alone(made: Made, tmp_path: Path, task: str) -> None:
    directory = made(task)
    model = PackSequences(row_length=64)(checkpoint.load(directory), Context(tmp_path)).model
    assert_answers_of_the_checkpoint([model], directory, TEXTS)


def test_rows_are_not_packed_without_a_mask_between_tokens(made: Made, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"esm scales a text by its mask tokens, .*; use attention: masked"):
        PackSequences(attention="varlen")(checkpoint.load(made()), Context(tmp_path))


@pytest.mark.parametrize("kind", ["rotary", "absolute"])
def test_left_padding_changes_no_mean(made: Made, kind: str) -> None:
    model = checkpoint.load(made("feature-extraction", "mean", **KINDS[kind]))
    assert model.spec.left_padding_invariant
    right = dict(zip(model.spec.inputs, model.network.example(3, 9), strict=True))
    right["input_ids"][:, 2] = MASK
    right["input_ids"][right["attention_mask"] == 0] = 0
    left = {name: torch.stack([row.roll(int((1 - keep).sum())) for row, keep in zip(tensor, right["attention_mask"], strict=True)]) for name, tensor in right.items()}
    with torch.inference_mode():
        assert torch.allclose(model.network(*left.values())[0], model.network(*right.values())[0], atol=1e-5)


FREQUENCIES = "esm.rotary_embeddings.inv_freq"


def rewritten(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    tensors = load_file(directory / "model.safetensors")
    own = next(name for name in tensors if name.endswith("inv_freq"))
    tensors[FREQUENCIES] = tensors.pop(own)
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def as_published(tensors: dict[str, torch.Tensor]) -> None:
    """As the files of ESM-2: frequencies in each layer, ids of positions, and a table of positions that nothing reads."""
    frequencies = tensors.pop(FREQUENCIES)
    for layer in range(2):
        tensors[f"esm.encoder.layer.{layer}.attention.self.rotary_embeddings.inv_freq"] = frequencies.clone()
    tensors["esm.embeddings.position_ids"] = torch.arange(64)[None]
    tensors["esm.embeddings.position_embeddings.weight"] = torch.randn(64, 32)


def without_computed(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if "contact_head" in name or name == FREQUENCIES]:
        del tensors[name]


def rounded(tensors: dict[str, torch.Tensor]) -> None:
    """Frequencies as training in half precision leaves them."""
    tensors[FREQUENCIES] = tensors[FREQUENCIES].half().float() * 1.01


@pytest.mark.parametrize("change", [as_published, without_computed, rounded])
def test_files_as_they_are_published(made: Made, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    directory = rewritten(made("token-classification"), change)
    model, inputs = checkpoint.load(directory), rows()
    with torch.inference_mode():
        (got,), wanted = model.network(*inputs.values()), theirs(directory, "token-classification")(**inputs).logits
        assert torch.equal(got, wanted)
    assert not any("contact_head" in name for name, _ in model.network.named_parameters())


def test_frequencies_stay_in_float32(made: Made, tmp_path: Path) -> None:
    model = CastHalf(dtype="bfloat16")(checkpoint.load(made()), Context(tmp_path)).model
    assert isinstance(model, Eager)
    assert {name: tensor.dtype for name, tensor in model.network.named_buffers() if name.endswith("inv_freq")} == {
        "encoder.esm.rotary_embeddings.inv_freq": torch.float32
    }


def test_frequencies_must_be_finite(made: Made) -> None:
    def broken(tensors: dict[str, torch.Tensor]) -> None:
        tensors[FREQUENCIES][1] = torch.nan

    with pytest.raises(IntegrityError, match=r"inv_freq' must be finite; got 1 NaN"):
        checkpoint.load(rewritten(made(), broken))


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"is_folding_model": True}, UsageError, "ESMFold gives structures, and bertopt runs encoders only; give an ESM-2 checkpoint"),
        ({"position_embedding_type": "relative_key"}, Unsupported, "position_embedding_type must be absolute or rotary; got 'relative_key'"),
        ({"position_embedding_type": None}, Unsupported, "position_embedding_type must be absolute or rotary; got None"),
        ({"hidden_act": "silu"}, Unsupported, "hidden_act must be 'gelu', as transformers' esm computes; got 'silu'"),
        ({"add_bias_fnn": False}, Unsupported, "add_bias_fnn must be True, as transformers' esm computes"),
        ({"mask_token_id": None}, IntegrityError, "mask_token_id must be stated for esm"),
        ({"mask_token_id": 10_000}, IntegrityError, "mask_token_id must be a whole number below vocab_size; got 10000"),
        ({"pad_token_id": None}, IntegrityError, "pad_token_id must be stated for esm"),
        ({"rope_theta": 0}, IntegrityError, "rope_theta must be a finite number above 0; got 0"),
    ],
)  # fmt: skip
def test_other_networks_are_refused(made: Made, fields: dict[str, Any], error: type[Exception], match: str) -> None:
    directory = made()
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(error, match=match):
        checkpoint.load(directory)


def test_the_longest_text_is_as_stated(made: Made) -> None:
    assert checkpoint.load(made(max_position_embeddings=40, position_embedding_type="absolute")).spec.max_length == 39
    assert checkpoint.load(made(max_position_embeddings=40)).spec.max_length == 40
