"""`merge_qkv`, `keep_cls_only` and `pack_sequences`: the first two alone, all together, replayed, in their one order, refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from bertopt import passes, stages
from bertopt.core import Eager, RuntimeFacts
from bertopt.errors import Unsupported
from bertopt.modeling import checkpoint
from bertopt.passes import ExportOnnx, UseBetterTransformer
from bertopt.stages.fingerprint import fingerprint
from tests.support.rewritten import (
    EXACT,
    FIRST_ONLY,
    KEEP,
    KNOWN,
    MERGE,
    MODELS,
    PACK,
    SDPA,
    AnyPass,
    build,
    nodes,
    packed_error,
    padded_error,
)
from tests.support.tiny_models import Tiny

pytestmark = pytest.mark.usefixtures("one_thread")


# One pass


@pytest.mark.parametrize(("task", "pooling"), MODELS)
@pytest.mark.parametrize("family", KNOWN)
def test_merge_qkv(tiny: Tiny, context: Any, family: str, task: str, pooling: str | None) -> None:
    reference = checkpoint.load(tiny(family, task, pooling))
    model = build(reference, [MERGE], context)
    assert padded_error(reference, model) <= EXACT
    names = [name for name, _ in model.network.named_modules()]
    assert [name for name in names if name.endswith(".qkv")]
    assert not [name for name in names if name.endswith((".query", ".key", ".value", "_lin.q", ".q", ".k", ".v"))]


@pytest.mark.parametrize(("task", "pooling"), FIRST_ONLY)
@pytest.mark.parametrize("family", KNOWN)
def test_keep_cls_only(tiny: Tiny, context: Any, family: str, task: str, pooling: str | None) -> None:
    reference = checkpoint.load(tiny(family, task, pooling))
    model = build(reference, [KEEP], context)
    assert padded_error(reference, model) <= EXACT
    assert model.network.outputs == reference.spec.outputs
    parameters = sum(each.numel() for each in model.network.parameters())
    assert parameters == sum(each.numel() for each in reference.network.parameters())


# Together


@pytest.mark.parametrize(("task", "pooling"), FIRST_ONLY)
@pytest.mark.parametrize("family", KNOWN)
def test_all_three(tiny: Tiny, context: Any, family: str, task: str, pooling: str | None) -> None:
    reference = checkpoint.load(tiny(family, task, pooling))
    sdpa = [] if family in ("mpnet", "rembert") else [SDPA]
    assert padded_error(reference, build(reference, [*sdpa, KEEP, MERGE], context)) <= EXACT
    for line in ([KEEP, PACK], [*sdpa, KEEP, MERGE, PACK], [KEEP, MERGE, PACK, *sdpa]):
        assert packed_error(reference, build(reference, line, context)) <= EXACT


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("family", KNOWN)
def test_any_number_of_layers(tmp_path: Path, context: Any, family: str, layers: int) -> None:
    from tests.support.tiny_models import write_tiny

    count = "n_layers" if family == "distilbert" else "num_hidden_layers"
    reference = checkpoint.load(write_tiny_with(write_tiny, tmp_path, family, {count: layers}))
    assert reference.spec.layers == layers
    assert packed_error(reference, build(reference, [KEEP, MERGE, PACK], context)) <= EXACT


def write_tiny_with(write: Any, out: Path, family: str, size: dict[str, int]) -> Path:
    from tests.support import tiny_models

    usual = tiny_models._size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_models, "_size", lambda name: usual(name) | size)
        written: Path = write(out / "model", family)
    return written


@pytest.mark.parametrize("steps", [[MERGE], [KEEP], [PACK], [KEEP, MERGE, PACK], [SDPA, KEEP, MERGE, PACK]], ids=repr)
def test_stages_are_replayed(tiny: Tiny, tmp_path: Path, context: Any, steps: list[AnyPass]) -> None:
    reference = checkpoint.load(tiny("bert", "feature-extraction", "cls"))
    model = build(reference, steps, context)
    parent, out = tmp_path / "parent", tmp_path / "stage"
    parent.mkdir()
    out.mkdir()
    checkpoint.write_snapshot(reference, parent)
    stages.inherit(parent, out)
    stages.write_form(model, out)
    stages.write_manifest(out, {"key": "k", **stages.describe(model)})
    opened = stages.open_stage(out)
    assert isinstance(opened, Eager)
    assert opened.spec == model.spec
    assert fingerprint(opened) == fingerprint(model) != fingerprint(reference)
    if opened.spec.layout == "packed":
        assert packed_error(reference, opened) <= EXACT
    else:
        assert padded_error(reference, opened) <= EXACT


@pytest.mark.parametrize(("family", "opset", "inside"), [("bert", 23, 0), ("distilbert", 18, 2)])
def test_export_of_padded_rows(tiny: Tiny, context: Any, family: str, opset: int, inside: int) -> None:
    import onnx

    reference = checkpoint.load(tiny(family, "feature-extraction", "cls"))
    model = build(reference, [SDPA, KEEP, MERGE, ExportOnnx(opset=opset)], context)
    assert padded_error(reference, model) <= EXACT
    assert [value.name for value in onnx.load(model.path).graph.output] == ["sentence_embedding"]
    # Four products in the first layer; the last one's query stands apart. `inside`: attention spelled out.
    assert nodes(model)["MatMul"] == 4 + 5 + 2 * inside
    assert nodes(model)["Split"] == 2


# Refused


@pytest.mark.parametrize(
    ("step", "family", "task", "pooling", "words"),
    [
        (MERGE, "modernbert", "fill-mask", None, "one product already"),
        (MERGE, "deberta-v2", "fill-mask", None, "relative positions"),
        (MERGE, "deberta", "fill-mask", None, "one product already"),
        (KEEP, "deberta", "text-classification", None, "does not know the layers of deberta;"),
        (PACK, "deberta", "text-classification", None, "relative positions"),
        (KEEP, "bert", "feature-extraction", "mean", "'mean' pooling reads every token"),
        (KEEP, "bert", "feature-extraction", None, "feature-extraction answers for every token"),
        (KEEP, "bert", "token-classification", None, "answers for every token"),
        (KEEP, "bert", "question-answering", None, "answers for every token"),
        (KEEP, "deberta-v2", "text-classification", None, "does not know the layers of deberta-v2"),
        (KEEP, "modernbert", "text-classification", None, "does not know the layers of modernbert"),
        (PACK, "deberta-v2", "text-classification", None, "relative positions"),
        (PACK, "modernbert", "feature-extraction", "mean", "relative positions"),
        (PACK, "bert", "feature-extraction", "max", "max pooling"),
    ],
)
def test_unsupported(
    tiny: Tiny, context: Any, step: AnyPass, family: str, task: str, pooling: str | None, words: str
) -> None:
    with pytest.raises(Unsupported, match=words):
        step(checkpoint.load(tiny(family, task, pooling)), context())


def test_albert_with_several_groups_keeps_its_layers(tmp_path: Path, context: Any) -> None:
    from tests.support.tiny_models import write_tiny

    model = checkpoint.load(write_tiny_with(write_tiny, tmp_path, "albert", {"num_hidden_groups": 2}))
    with pytest.raises(Unsupported, match="one group of one; got 2 of 1"):
        KEEP(model, context())
    assert packed_error(model, build(model, [MERGE, PACK], context)) <= EXACT


#: The only order of these passes; use_sdpa may stand anywhere among them.
ORDER = ("keep_cls_only", "merge_qkv", "pack_sequences", "cast_half")


@pytest.mark.parametrize(("first", "second"), itertools.product((*ORDER, "use_better_transformer"), repeat=2))
def test_one_legal_order(first: str, second: str) -> None:
    before = [passes.require(first)()]
    reason = passes.require(second)().conflict(before)
    if {first, second} <= set(ORDER):
        legal = ORDER.index(first) < ORDER.index(second)
    else:
        legal = {first, second} == {"use_better_transformer", "cast_half"}
    assert (reason is None) == legal
    assert legal or len(str(reason)) > 20


@pytest.mark.parametrize("step", [KEEP, MERGE, PACK], ids=repr)
def test_sdpa_may_stand_before_or_after(step: AnyPass) -> None:
    assert SDPA.conflict([step]) is None
    assert step.conflict([SDPA]) is None
    assert UseBetterTransformer().conflict([step]) is not None


def test_a_pass_applied_twice_does_nothing(tiny: Tiny, context: Any) -> None:
    model = build(checkpoint.load(tiny("bert")), [KEEP, MERGE, PACK], context)
    assert MERGE.rewrite(model.network) == {"merged_products": 0}
    assert KEEP.rewrite(model.network) == {"narrowed_products": 0}
    assert PACK.rewrite(model.network) == {"inputs": 0}


# Mistakes that the effects must show


def test_effects_show_what_was_not_done(tiny: Tiny, context: Any) -> None:
    reference = checkpoint.load(tiny("bert"))
    assert MERGE.effects(reference, RuntimeFacts()) == {
        "merged projections": (2, 0),
        "separate key and value projections": (0, 4),
    }
    assert set(KEEP.effects(reference, RuntimeFacts()).values()) == {(4, 0), (2, 0)}
    model = build(reference, [PACK], context)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bertopt.modeling.layouts.Packed._mask", lambda rows, queries: torch.zeros(()).expand(1, 1, 1, 1))
        assert PACK.effects(model, RuntimeFacts())["texts that another's tokens change"][1] > 0
