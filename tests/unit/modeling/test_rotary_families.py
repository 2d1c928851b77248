"""Families without a table of positions, whose checkpoints transformers renames and splits as it reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bertopt.core import Context, Eager, RuntimeFacts
from bertopt.errors import CheckpointWarning, Unsupported, UsageError
from bertopt.modeling import checkpoint
from bertopt.passes import CastHalf, PackSequences
from tests.support.forms import assert_answers_of_the_checkpoint, forms, with_config
from tests.support.tiny_models import CLASSES, HEADS, ROTARY_FAMILIES, write_tiny

#: ESM has its own tests.
CASES = [(family, task) for family in ROTARY_FAMILIES if family != "esm" for task in HEADS if task != "question-answering"]

Made = Callable[..., Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    def make(family: str, task: str = "text-classification", pooling: str | None = None, **extra: Any) -> Path:
        return write_tiny(tmp_path_factory.mktemp(family) / "model", family, task, pooling, extra=extra)

    return make


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
    packed = [] if family == "eurobert" else [PackSequences()(checkpoint.load(directory), Context(tmp_path)).model]
    assert_answers_of_the_checkpoint([*forms(directory, tmp_path), *packed], directory)


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


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        ("nomic_bert", {"rotary_emb_base": 10000}, r"rotary_emb_base is 10000, but transformers' nomic_bert does not read it, and uses 1000\.0; state rope_parameters: "),
        ("nomic_bert", {"n_head": 4}, "n_head is 4, .* uses 2; state num_attention_heads with 4"),
        ("nomic_bert", {"prenorm": True}, "prenorm must be False, as transformers' nomic_bert computes; got True"),
        ("nomic_bert", {"activation_function": "geglu"}, "activation_function must be 'swiglu'"),
        ("eurobert", {"clf_pooling": "mean"}, "clf_pooling is 'mean', .* uses 'late'; state classifier_pooling with 'mean'"),
        ("gte", {"logn_attention_scale": True}, "logn_attention_scale must be False"),
        # Without a local theta such a checkpoint's layers used the global one; transformers 5 reads null.
        ("modernbert", {"rope_parameters": None, "global_rope_theta": 160000.0, "local_rope_theta": None}, "rope_theta of rope_parameters must be a number above 0; got None: state it, "),
        ("gte", {"rope_parameters": {"rope_type": "ntk", "factor": 2.0, "rope_theta": 10000}}, "the rope_type of rope_parameters must be one of default, .*; got 'ntk'"),
    ],
)  # fmt: skip
def test_what_transformers_reads_under_another_name_or_not_at_all_is_named(made: Made, family: str, fields: dict[str, Any], words: str) -> None:
    """The checkpoint's own code read it, and its tensors fit either way."""
    with pytest.raises(Unsupported, match=f"^config.json: {words}"):
        checkpoint.load(with_config(made(family), **fields))


def test_the_same_under_both_names_is_no_matter(made: Made) -> None:
    nomic = {
        "n_embd": 32, "n_head": 2, "n_layer": 2, "n_inner": 64, "layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000, "activation_function": "swiglu",
        "prenorm": False, "causal": False, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "use_rms_norm": None,
    }  # fmt: skip
    checkpoint.load(with_config(made("nomic_bert"), **nomic))
    checkpoint.load(with_config(made("eurobert"), clf_pooling="late"))
    checkpoint.load(with_config(made("gte"), logn_attention_scale=False, layer_norm_type="layer_norm", position_embedding_type="rope"))


def test_texts_that_are_cut_sooner_than_the_checkpoint_says_are_named(made: Made) -> None:
    with pytest.warns(CheckpointWarning, match="n_positions is 8192, .* texts are cut after 64 tokens"):
        checkpoint.load(with_config(made("nomic_bert"), n_positions=8192))


@pytest.mark.parametrize("family", [*ROTARY_FAMILIES, "modernbert"])
def test_half_precision_leaves_the_frequencies_of_positions_as_they_are(made: Made, family: str) -> None:
    """An angle is a position times a frequency: half of the last bit that bfloat16 has near 1 is a whole turn 3,200 tokens on. The error of 4,000 tokens was 1.8 times as large."""
    network: Any = checkpoint.load(made(family)).network
    before = {name: buffer.clone() for name, buffer in network.named_buffers() if name.endswith("inv_freq")}
    half = CastHalf()
    half.rewrite(network)
    after = {name: buffer for name, buffer in network.named_buffers() if name in before}
    assert before and all(after[name].dtype == torch.float32 and torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.dtype == torch.bfloat16 for parameter in network.encoder.parameters())
    model = Eager(network.spec, "bfloat16", checkpoint=Path(), network=network)
    assert all(cast == every for every, cast in half.effects(model, RuntimeFacts()).values())
