"""UltraBERT: layers with windows, rotary bases by kind of layer, shared keys, norms without a mean; and its checkpoints' own config.json."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bertopt.core import Context, Eager, RuntimeFacts
from bertopt.errors import IntegrityError, Unsupported
from bertopt.modeling import checkpoint
from bertopt.passes import CastHalf, KeepClsOnly, MergeQkv, PackSequences
from tests.support.forms import assert_answers_of_the_checkpoint, forms, with_config
from tests.support.tiny_models import HEADS, write_tiny

#: What transformers has made of a checkpoint's own fields.
MADE = ("layer_types", "rope_parameters", "sliding_window")

Made = Callable[..., Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    def make(task: str = "text-classification", pooling: str | None = None, **extra: Any) -> Path:
        return write_tiny(tmp_path_factory.mktemp("ultrabert") / "model", "ultrabert", task, pooling, extra=extra)

    return make


@pytest.fixture(scope="module")
def usual(made: Made) -> Path:
    return made()


def copied(source: Path, out: Path, without: tuple[str, ...] = (), **fields: Any) -> Path:
    return with_config(Path(shutil.copytree(source, out)), **dict.fromkeys(without, ...), **fields)


def inputs_of(model: Eager, sequence: int = 30) -> dict[str, torch.Tensor]:
    return dict(zip(model.spec.inputs, model.network.example(3, sequence), strict=True))


@pytest.mark.parametrize("task", HEADS)
def test_answers_are_those_of_transformers_in_every_form(made: Made, tmp_path: Path, task: str) -> None:
    directory = made(task, attention_bias=True, mlp_bias=True)
    model = checkpoint.load(directory)
    assert (model.spec.task, model.spec.layers, model.spec.heads, model.spec.max_length, model.spec.positions) == (task, 2, 4, 64, "none")
    with checkpoint.quiet():
        plain = getattr(transformers, f"Ultrabert{HEADS[task]}").from_pretrained(directory, attn_implementation="eager").eval()
    inputs = inputs_of(model)
    mask = inputs["attention_mask"].bool()
    assert 0 < int(mask.sum()) < mask.numel()
    with torch.inference_mode():
        got, theirs = model.network(*inputs.values())[0], plain(**inputs)
    wanted = {"feature-extraction": "last_hidden_state", "question-answering": "start_logits"}.get(task, "logits")
    rows: Any = slice(None) if task == "text-classification" else mask
    assert torch.allclose(got[rows], theirs[wanted][rows], atol=1e-5)
    assert_answers_of_the_checkpoint(forms(directory, tmp_path), directory)


def test_a_window_is_inclusive_and_padding_is_outside(made: Made) -> None:
    """Layers of one kind, a window of 4: a token sees the four on each side and itself, and of these no padding."""
    model = checkpoint.load(made("feature-extraction", layer_types=["sliding_attention"] * 2, num_hidden_layers=2))
    model.network.base.layers = model.network.base.layers[:1]
    inputs = inputs_of(model, 12)
    inputs["attention_mask"][:] = 1
    ids = inputs["input_ids"]
    with torch.inference_mode():
        (wanted,) = model.network(*inputs.values())
        for place, seen in ((4, True), (5, False)):
            (got,) = model.network(ids.scatter(1, torch.full((3, 1), place), 7), inputs["attention_mask"])
            assert bool((got[:, 0] != wanted[:, 0]).any()) == seen
        hidden = inputs["attention_mask"].clone()
        hidden[:, 4] = 0
        (masked,) = model.network(ids, hidden)
        (other,) = model.network(ids.scatter(1, torch.full((3, 1), 4), 7), hidden)
    assert not torch.equal(masked[:, 0], wanted[:, 0]) and torch.equal(masked[:, 0], other[:, 0])


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_classifiers_are_finite_for_a_row_without_tokens(made: Made, pooling: str) -> None:
    model = checkpoint.load(made(classifier_pooling=pooling))
    assert model.spec.left_padding_invariant == (pooling == "mean")
    inputs = inputs_of(model)
    with torch.inference_mode():
        (wanted,) = model.network(*inputs.values())
        inputs["attention_mask"][1] = 0
        (got,) = model.network(*inputs.values())
    assert torch.isfinite(got).all() and torch.allclose(got[[0, 2]], wanted[[0, 2]], atol=1e-6)


def test_left_padding_changes_no_mean(made: Made) -> None:
    model = checkpoint.load(made("feature-extraction", "mean"))
    assert model.spec.left_padding_invariant and model.spec.pooling == "mean"
    right = inputs_of(model)
    left = {name: torch.stack([row.roll(int((1 - keep).sum())) for row, keep in zip(tensor, right["attention_mask"], strict=True)]) for name, tensor in right.items()}
    with torch.inference_mode():
        assert torch.allclose(model.network(*left.values())[0], model.network(*right.values())[0], atol=1e-5)


def test_half_precision_leaves_the_frequencies_of_positions_as_they_are(usual: Path) -> None:
    network: Any = checkpoint.load(usual).network
    before = {name: buffer.clone() for name, buffer in network.named_buffers() if name.endswith("inv_freq")}
    half = CastHalf()
    half.rewrite(network)
    after = {name: buffer for name, buffer in network.named_buffers() if name in before}
    # Of each kind of layer, and what it was made from.
    assert len(before) == 4 and all(after[name].dtype == torch.float32 and torch.equal(before[name], after[name]) for name in before)
    model = Eager(network.spec, "bfloat16", checkpoint=Path(), network=network)
    assert all(cast == every for every, cast in half.effects(model, RuntimeFacts()).values())


@pytest.mark.parametrize("step", [KeepClsOnly(), MergeQkv(), PackSequences()], ids=lambda step: step.name())
def test_what_does_not_know_its_layers_says_so(usual: Path, tmp_path: Path, step: Any) -> None:
    with pytest.raises(Unsupported, match="ultrabert"):
        step(checkpoint.load(usual), Context(tmp_path))


def test_lists_by_layer_are_read_as_the_two_kinds(usual: Path, tmp_path: Path) -> None:
    """As the published checkpoint states them."""
    listed = copied(usual, tmp_path / "listed", MADE, attention_windows=[None, 4], rope_theta=[2560000.0, 10000.0])
    models = [checkpoint.load(directory) for directory in (usual, listed)]
    config = models[1].network.base.config
    assert config.layer_types == ["full_attention", "sliding_attention"] and config.sliding_window == 4
    with torch.inference_mode():
        one, other = (model.network(*inputs_of(model).values())[0] for model in models)
    assert torch.equal(one, other)
    checkpoint.load(copied(usual, tmp_path / "all", MADE, attention_windows=[0, 0], rope_theta=[1e4, 1e4]))
    checkpoint.load(copied(usual, tmp_path / "both", (), attention_windows=[None, 4]))


@pytest.mark.parametrize(
    ("without", "fields", "words"),
    [
        (MADE, {"attention_windows": [8, 4], "rope_theta": [1e4, 1e4]}, r"attention_windows has several windows, \[4, 8\], .* use the first in all layers: give another"),
        (MADE, {"attention_windows": [None, 4], "rope_theta": 1e4}, "rope_theta must be a list with an entry for each of 2 layers, .*; got 10000.0: state layer_types, "),
        (MADE, {"attention_windows": [4], "rope_theta": [1e4, 1e4]}, r"attention_windows must be a list with an entry for each of 2 layers, .*; got \[4\]"),
        (MADE, {"attention_windows": [4, 4], "rope_theta": [1e4, 2e4]}, "rope_theta has several bases, 10000.0, 20000.0, for layers of sliding_attention, .* use the last"),
        (MADE, {"rope_theta": [1e4, 2e4]}, "rope_theta has several bases, .*, for layers of sliding_attention"),
        ((), {"rope_theta": [1e4, 1e4]}, "of rope_theta and rope_parameters .* reads the second alone: take out rope_theta"),
        ((), {"attention_windows": [None, 6]}, r"sliding_window and attention_windows contradict each other, 4 and \[None, 6\]"),
        ((), {"attention_windows": [4, None]}, r"layer_types and attention_windows contradict each other, .* and \[4, None\]"),
        ((), {"layer_types": ["full_attention", "chunked_attention"]}, r"layer_types may be full_attention and sliding_attention, .*; got \['chunked_attention'\]"),
        ((), {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_parameters must state a rope_type and rope_theta for each kind of layer; got none for 'full_attention'"),
        ((), {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}, "rope_parameters must state .* for each kind of layer; got none for 'sliding_attention'"),
    ],
)  # fmt: skip
def test_fields_of_which_transformers_would_make_another_network_are_named(usual: Path, tmp_path: Path, without: Any, fields: Any, words: str) -> None:
    with pytest.raises(Unsupported, match=f"^config.json: {words}"):
        checkpoint.load(copied(usual, tmp_path / "model", without, **fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sliding_window": 0}, "sliding_window and attention_windows must be whole numbers of at least 1; got 0"),
        ({"sliding_window": None}, "must be whole numbers of at least 1; got None"),
        ({"attention_windows": [None, [4, 4]]}, r"must be whole numbers of at least 1; got \[4, 4\]"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be a whole number from 1"),
        ({"prediction_head_size": -1}, "prediction_head_size must be a whole number from 1"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps must be a finite number"),
        ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, r"tensor 'layers\.1\.\S+' is in the checkpoint but not in the model"),
    ],
)
def test_damaged_fields_are_named(usual: Path, tmp_path: Path, fields: Any, words: str) -> None:
    with pytest.raises(IntegrityError, match=words):
        checkpoint.load(copied(usual, tmp_path / "model", (), **fields))


def test_a_head_over_the_vocabulary_may_be_called_as_it_was_published(made: Made, tmp_path: Path) -> None:
    """`cls` and `ultrabert.`: transformers writes these names too. The names of its modules are read alike."""
    from safetensors.torch import load_file, save_file

    published = made("fill-mask")
    tensors = load_file(published / "model.safetensors")
    assert "cls.weight" in tensors and "ultrabert.norm.weight" in tensors
    renamed = copied(published, tmp_path / "renamed")
    own = {name.replace("ultrabert.", "model.").replace("cls.", "head.decoder."): tensor for name, tensor in tensors.items()}
    save_file(own, renamed / "model.safetensors", {"format": "pt"})
    one, other = (checkpoint.load(directory) for directory in (published, renamed))
    with torch.inference_mode():
        assert torch.equal(one.network(*inputs_of(one).values())[0], other.network(*inputs_of(other).values())[0])
