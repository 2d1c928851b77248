"""Unpadded attention: one row of texts answers as the padded network, on the CPU and without a value leaving a device."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bertopt.core import Context, Eager
from bertopt.errors import Unsupported
from bertopt.modeling import checkpoint, packing, varlen
from bertopt.passes import CastHalf, ExportOnnx, KeepClsOnly, MergeQkv, PackSequences, UseSdpa
from bertopt.runtime.batch_limits import BatchLimits
from bertopt.runtime.batch_plan import plan
from bertopt.runtime.cost_model import Costs
from bertopt.runtime.predictor import Predictor
from bertopt.sessions import open_session
from tests.support.built import apply_passes
from tests.support.specs import spec
from tests.support.tiny_models import FAMILIES, NORM_FIRST_FAMILIES, OTHER_FAMILIES, TASKS, Tiny

VARLEN = PackSequences(attention="varlen")
PACKABLE = (*FAMILIES, "albert", "ernie", "data2vec-text", *NORM_FIRST_FAMILIES)
CASES = [(family, task, None) for family in PACKABLE for task in TASKS] + [
    ("bert", "feature-extraction", pooling) for pooling in ("mean", "cls", "mean_sqrt_len")
]


def padded_inputs(model: Eager, seed: int) -> dict[str, np.ndarray]:
    """Random lengths; rows padded right, left, with holes, and one token long."""
    dice = np.random.default_rng(seed)
    shape = (7, 24)
    mask = np.zeros(shape, np.int64)
    for row, length in enumerate(dice.integers(2, shape[1] + 1, shape[0]).tolist()):
        mask[row, :length] = 1
    mask[1] = mask[1, ::-1]
    mask[2] = np.arange(shape[1]) % 3 != 1
    mask[3] = np.arange(shape[1]) == 0
    ids = dice.integers(5, model.spec.vocabulary, shape)
    arrays = {"input_ids": ids, "attention_mask": mask, "token_type_ids": dice.integers(0, 2, shape)}
    return {name: arrays[name] for name in model.spec.inputs}


@pytest.mark.parametrize(("family", "task", "pooling"), CASES)
def test_answers_are_the_padded_networks(
    tiny: Tiny, tmp_path: Path, family: str, task: str, pooling: str | None
) -> None:
    reference = checkpoint.load(tiny(family, task, pooling))
    packed = apply_passes(reference, VARLEN, tmp_path=tmp_path)
    for seed in range(2):
        inputs = padded_inputs(reference, seed)
        wanted, got = open_session(reference).run(inputs), open_session(packed).run(inputs)
        valid = inputs["attention_mask"] != 0
        reads_first = reference.spec.granularity == "text" and not reference.spec.left_padding_invariant
        rows = valid[:, 0] if reads_first and pooling in (None, "cls") else np.ones(len(valid), bool)
        for name in reference.spec.outputs:
            chosen = rows if reference.spec.granularity == "text" else valid
            np.testing.assert_allclose(got[name][chosen], wanted[name][chosen], atol=1e-5, rtol=0)


@pytest.mark.parametrize("before", [(MergeQkv(),), (UseSdpa(),), (KeepClsOnly(), MergeQkv())], ids=str)
@pytest.mark.parametrize("family", PACKABLE)
def test_it_follows_the_other_rewrites(tiny: Tiny, tmp_path: Path, family: str, before: tuple[Any, ...]) -> None:
    reference = checkpoint.load(tiny(family, "text-classification"))
    packed = apply_passes(reference, *before, VARLEN, tmp_path=tmp_path)
    inputs = padded_inputs(reference, 3)
    first = inputs["attention_mask"][:, 0] != 0
    wanted, got = open_session(reference).run(inputs)["logits"], open_session(packed).run(inputs)["logits"]
    np.testing.assert_allclose(got[first], wanted[first], atol=1e-5, rtol=0)


def test_what_is_counted_and_shown(tiny: Tiny, tmp_path: Path) -> None:
    reference = checkpoint.load(tiny("bert", "token-classification"))
    result = VARLEN(reference, Context(workdir=tmp_path))
    assert result.changes == {"attention_calls": 2}
    assert result.model.spec.one_row and result.model.spec.row_length == 32_768
    shown = VARLEN.effects(result.model, open_session(result.model).facts())
    assert shown["attention calls without a mask"] == (2, 2)
    assert all(expected == got for expected, got in shown.values())


def test_boundaries_cover_the_row_with_texts_no_longer_than_the_longest() -> None:
    segments = torch.tensor([1] * 5 + [2] * 3 + [0] * 17)
    bounds = varlen.boundaries(segments, 4, 6)
    assert bounds.dtype == torch.int32 and bounds.shape == (4 + 6 + 1,)
    assert bounds.tolist() == [0, 5, 8, 8, 8, 14, 20, 25, 25, 25, 25]


@pytest.mark.parametrize("pooling", ["mean", "cls", "mean_sqrt_len"])
def test_nan_in_padding_reaches_no_text(tiny: Tiny, tmp_path: Path, pooling: str) -> None:
    model = apply_passes(checkpoint.load(tiny("bert", "feature-extraction", pooling)), VARLEN, tmp_path=tmp_path)
    inputs = dict(zip(model.network.inputs, model.network.example(3, 8), strict=True))
    rows = model.network.layout(inputs, model.network.base)
    hidden = torch.randn(1, inputs["input_ids"].shape[1], model.spec.hidden)
    hidden[0, inputs["segment_ids"][0] == 0] = torch.nan
    assert rows.pool(hidden, pooling)[0, :3].isfinite().all()


def test_padding_is_pooled_in_pieces(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU adds the tokens of a bag one after the other, and a row padded to a graph's size may have thousands of padding."""
    model = apply_passes(checkpoint.load(tiny("bert", "feature-extraction", "mean")), VARLEN, tmp_path=tmp_path)
    longest = model.network.base.config.max_position_embeddings
    lengths, tokens = [3, longest, 5], 5 * longest
    segments = torch.zeros(1, tokens, dtype=torch.int64)
    segments[0, : sum(lengths)] = torch.repeat_interleave(torch.arange(1, 4), torch.tensor(lengths))
    zeros = torch.zeros_like(segments)
    named = {"input_ids": zeros, "token_type_ids": zeros, "position_ids": zeros, "segment_ids": segments, "first_tokens": zeros[:, :7]}
    rows = model.network.layout({name: named[name] for name in model.network.inputs}, model.network.base)
    bags: list[int] = []
    summing = torch.nn.functional.embedding_bag

    def recorded(ids: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, **options: Any) -> torch.Tensor:
        bags.extend(offsets.diff().tolist())
        assert offsets[-1] == tokens
        return summing(ids, weight, offsets, **options)

    monkeypatch.setattr(torch.nn.functional, "embedding_bag", recorded)
    hidden = torch.randn(1, tokens, model.spec.hidden)
    pooled = rows.pool(hidden, "mean")[0]
    assert max(bags) == longest and sum(bags) == tokens
    for text, part in enumerate(hidden[0].split([*lengths, tokens - sum(lengths)])[:3]):
        torch.testing.assert_close(pooled[text], part.mean(dim=0))
    assert not pooled[3:].any() and len(pooled) == 7


@pytest.mark.parametrize(
    ("family", "task", "pooling", "before"),
    [(*case, before) for case in CASES for before in ((), (MergeQkv(),))]
    + [(*case, (KeepClsOnly(), MergeQkv())) for case in CASES if case[1] == "text-classification" or case[2] == "cls"],
)
def test_no_value_leaves_the_device(
    tiny: Tiny, tmp_path: Path, family: str, task: str, pooling: str | None, before: tuple[Any, ...]
) -> None:
    """On `meta` there are no values: whatever asked for one, or made a tensor on the CPU, would raise.

    Both packed forms; it does not see a synchronisation that a CUDA kernel makes by itself.
    """
    reference = checkpoint.load(tiny(family, task, pooling))
    for attention in ("masked", "varlen"):
        pack = PackSequences(attention=attention)
        steps = (*before, pack, CastHalf()) if attention == "masked" else (*before, CastHalf(), pack)
        network: Any = apply_passes(reference, *steps, tmp_path=tmp_path).network
        inputs = [tensor.to("meta") for tensor in network.example(3, 8)]
        with torch.inference_mode():
            outputs = network.to("meta")(*inputs)
        assert all(output.device.type == "meta" for output in outputs)


def test_a_gpu_runs_one_kernel_for_attention() -> None:
    """torch's operator in Python around that kernel fills a tensor of zeros in each call, and a package in C++ would have to call Python."""
    calls: list[str] = []

    class Recorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    module: Any = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=512))
    heads = torch.empty(1, 12, 40, 64, dtype=torch.bfloat16, device="meta")
    bounds = torch.empty(1, 1, 2, 9, dtype=torch.int32, device="meta")
    with torch.inference_mode(), Recorded():  # type: ignore[no-untyped-call]
        answer, _ = varlen.attend(module, heads, heads, heads, bounds, scaling=0.125)
    views = ("aten.select.", "aten.transpose.", "aten.unsqueeze.")
    assert [call for call in calls if not call.startswith(views)] == ["aten._flash_attention_forward.default"]
    assert answer.shape == (1, 40, 12, 64)


def test_what_a_gpu_cannot_do_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    assert "put pack_sequences after cast_half" in (VARLEN.device_conflict("cuda", []) or "")
    assert VARLEN.device_conflict("cuda", [CastHalf()]) is None and VARLEN.device_conflict("cpu", []) is None
    model = checkpoint.load(tiny())
    with pytest.raises(Unsupported, match="half precision only"):
        VARLEN(model, Context(workdir=tmp_path, device="cuda"))
    assert "multiples of 8" in (varlen.unsupported(torch.bfloat16, 12) or "")
    assert varlen.unsupported(torch.float16, 64) is None
    for family in ("mpnet", "rembert"):
        with pytest.raises(Unsupported, match="attention: masked"):
            VARLEN(checkpoint.load(tiny(family)), Context(workdir=tmp_path))


def test_orders() -> None:
    assert VARLEN.conflict([CastHalf()]) is None
    assert PackSequences().conflict([CastHalf()]) is not None
    assert UseSdpa().conflict([VARLEN]) is not None
    assert ExportOnnx().conflict([VARLEN]) is not None


def test_plans_are_batches_of_one_row() -> None:
    one_row = spec(layout="packed", row_length=1024, one_row=True, max_length=512, text_length=512)
    lengths = np.random.default_rng(0).integers(1, 300, 400)
    buckets = (64, 96, 128, 192, 256, 384, 512, 768, 1024)
    for sizes in ((), buckets):
        limits = BatchLimits(rows=9, tokens=65_536, length=512, buckets=sizes)
        chosen = plan(one_row, lengths, Costs(call=0, launch=200.0), limits)
        seen = set()
        flat = packing.flat(one_row, np.ones(lengths.sum(), np.int64), None, lengths)
        for batch in packing.batches(one_row, flat, chosen.rows, chosen.batches):
            rows, tokens = batch.inputs["input_ids"].shape
            assert rows == 1 and tokens <= 1024 and tokens == lengths[batch.texts].sum()
            assert not sizes or len(batch.texts) <= 1024 // 16
            seen |= set(batch.texts.tolist())
        assert seen == set(range(len(lengths)))
    run = sum(limits.bucket(int(used)) for used in chosen.rows.used)
    assert run <= 1.05 * lengths.sum()


def test_a_launch_bound_device_gets_few_rows_and_a_busy_one_full_ones() -> None:
    one_row = spec(layout="packed", row_length=1024, one_row=True, max_length=512, text_length=512)
    limits = BatchLimits(rows=9, tokens=65_536, length=512, buckets=(64, 128, 256, 512, 1024))
    lengths = np.full(60, 10)
    assert len(plan(one_row, lengths, Costs(call=0, launch=4096.0), limits).batches) == 1
    assert len(plan(one_row, lengths, Costs(call=0, launch=1.0), limits).batches) >= 1


def test_a_predictor_answers_as_the_padded_one(tiny: Tiny, tmp_path: Path) -> None:
    reference = checkpoint.load(tiny("bert", "feature-extraction", "mean"))
    packed = apply_passes(reference, VARLEN, tmp_path=tmp_path)
    texts = ["", "a cat", "the dog sat on the mat . " * 9, *("a good film " * n for n in range(12))]
    wanted = Predictor(open_session(reference), reference.spec, reference.checkpoint)(texts)
    predictor = Predictor(open_session(packed), packed.spec, reference.checkpoint)
    np.testing.assert_allclose(predictor(texts), wanted, atol=1e-5)
    np.testing.assert_allclose(predictor(texts[1:2]), wanted[1:2], atol=1e-5)


#: What replaces nothing of torch that has no kernel on `meta` (nested tensors and autocast have none).
PADDED_PASSES = [(UseSdpa(),), (MergeQkv(),), (KeepClsOnly(),), (CastHalf(),), (UseSdpa(), MergeQkv(), CastHalf())]


#: Families whose layers `merge_qkv` and `keep_cls_only` do not know.
OTHER_LAYERS = (
    "deberta", "deberta-v2", "modernbert", "ultrabert", "roformer",
)  # fmt: skip


def refuses(step: Any, family: str, task: str) -> bool:
    """Whether a pass cannot take such a model; all other models it must take."""
    if isinstance(step, KeepClsOnly):
        return task != "text-classification" or family in OTHER_LAYERS
    if isinstance(step, MergeQkv):
        return family in OTHER_LAYERS
    return isinstance(step, UseSdpa) and family in ("deberta", "deberta-v2", "mpnet", "rembert", "roformer")


@pytest.mark.parametrize("passes", PADDED_PASSES, ids=str)
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_FAMILIES, *NORM_FIRST_FAMILIES])
def test_padded_networks_make_no_tensor_on_the_cpu(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, task: str, passes: tuple[Any, ...]
) -> None:
    """transformers asks the device whether a mask is all ones, unless it is traced: the one synchronisation there is."""
    from transformers import masking_utils

    monkeypatch.setattr(masking_utils, "is_tracing", lambda *_: True)
    model = checkpoint.load(tiny(family, task))
    if any(refuses(step, family, task) for step in passes):
        with pytest.raises(Unsupported):
            apply_passes(model, *passes, tmp_path=tmp_path)
        return
    network: Any = apply_passes(model, *passes, tmp_path=tmp_path).network
    inputs = [tensor.to("meta") for tensor in network.example(3, 8)]
    with torch.inference_mode():
        assert all(output.device.type == "meta" for output in network.to("meta")(*inputs))
