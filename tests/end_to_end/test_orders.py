"""Orders of passes: all pairs as the recipe checker sees them, and a few triples built. `python -m campaigns.orders` builds all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bertopt import passes
from campaigns import orders
from tests.support.shared_workers import cheap_workers
from tests.support.tiny_models import Tiny

#: What may follow what on a CPU: every other pair is refused. The two of a pair stand after what the first one needs.
GOOD = {
    ("use_sdpa", "use_better_transformer"), ("use_sdpa", "cast_half"), ("use_sdpa", "compile_torch"),
    ("use_sdpa", "export_onnx"), ("use_better_transformer", "cast_half"), ("use_better_transformer", "compile_torch"),
    ("use_sdpa", "keep_cls_only"), ("use_sdpa", "merge_qkv"), ("use_sdpa", "pack_sequences"),
    ("keep_cls_only", "use_sdpa"), ("keep_cls_only", "merge_qkv"), ("keep_cls_only", "pack_sequences"),
    ("keep_cls_only", "cast_half"), ("keep_cls_only", "compile_torch"), ("keep_cls_only", "export_onnx"),
    ("merge_qkv", "use_sdpa"), ("merge_qkv", "pack_sequences"), ("merge_qkv", "cast_half"),
    ("merge_qkv", "compile_torch"), ("merge_qkv", "export_onnx"), ("pack_sequences", "use_sdpa"),
    ("pack_sequences", "cast_half"), ("pack_sequences", "compile_torch"), ("pack_sequences", "export_onnx"),
    ("cast_half", "use_sdpa"), ("cast_half", "use_better_transformer"), ("cast_half", "compile_torch"),
    ("export_onnx", "fuse_ort"), ("export_onnx", "cast_onnx_half"), ("export_onnx", "quantize_int8"),
    ("export_onnx", "build_tensorrt"), ("fuse_ort", "cast_onnx_half"), ("fuse_ort", "quantize_int8"),
    ("cast_onnx_half", "build_tensorrt"), ("export_onnx", "convert_openvino"),
    ("cast_half", "quantize_fp8"), ("quantize_fp8", "use_sdpa"), ("quantize_fp8", "compile_torch"),
    ("quantize_fp8", "package_aot"), ("use_sdpa", "package_aot"), ("keep_cls_only", "package_aot"),
    ("merge_qkv", "package_aot"), ("pack_sequences", "package_aot"), ("cast_half", "package_aot"),
    ("use_sdpa", "build_native"),
}  # fmt: skip


@pytest.fixture(scope="module")
def workers() -> Iterator[None]:
    with cheap_workers("pipeline"):
        yield


def test_every_pair_is_good_or_refused_with_a_reason(tiny: Tiny) -> None:
    good = set()
    for pair in orders.orders(orders.built_in(), 2):
        reason = orders.refusal(tiny(), (*orders.lead(pair[0]), *pair))
        if reason is None:
            good.add(pair)
        else:
            # Which step, why, and what to do instead or the fact that forbids it.
            assert f"({pair[1]})" in reason
            assert len(reason.partition("): ")[2] or reason.partition(") takes")[2]) > 15
    assert good == GOOD


def test_the_command_knows_every_pass_of_bertopt_and_no_other() -> None:
    assert orders.built_in() == [name for name in passes.all_passes() if name in orders.built_in()]
    assert "touch" not in orders.built_in()
    for name in orders.built_in():
        cls = passes.require(name)
        assert cls.model_validate(orders.OPTIONS.get(name, {})).name() == name
        assert orders.refusal(Path("org/name"), (*orders.lead(name), name)) is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (("use_sdpa", "export_onnx", "build_tensorrt"), "TensorRT has no float32 Attention kernel"),
        (("cast_half", "export_onnx"), "no bfloat16 kernels for a CPU"),
        (("export_onnx", "cast_onnx_half", "quantize_int8"), "quantise the float32 graph"),
        (("export_onnx", "fuse_ort", "fuse_ort"), "fused already"),
        (("export_onnx", "fuse_ort", "build_tensorrt"), "does not know ONNX Runtime's own operators"),
        (("export_onnx", "quantize_int8", "build_tensorrt"), "takes static INT8 without zero points only"),
        (("use_better_transformer", "export_onnx"), "cannot be exported"),
        (("cast_half", "quantize_fp8", "use_better_transformer"), "fast path reads the weights itself"),
        (("use_better_transformer", "use_sdpa"), "none is left to switch"),
        (("use_sdpa", "use_sdpa"), "runs through scaled_dot_product_attention already"),
        (("use_sdpa", "compile_torch", "export_onnx"), "takes an eager model"),
        (("merge_qkv", "keep_cls_only"), "put keep_cls_only before merge_qkv"),
        (("pack_sequences", "merge_qkv"), "put merge_qkv before pack_sequences"),
        (("cast_half", "pack_sequences"), "put pack_sequences before cast_half"),
        (("pack_sequences", "use_better_transformer"), "and what pack_sequences changed in them"),
        (("use_sdpa", "pack_sequences", "export_onnx", "cast_onnx_half", "build_tensorrt"), "slots for their texts"),
    ],
)
def test_reasons(line: orders.Order, words: str) -> None:
    assert words in str(orders.refusal(Path("org/name"), line))


@pytest.mark.usefixtures("workers")
def test_a_few_triples_are_built(tiny: Tiny, tmp_path: Path) -> None:
    wanted = [
        ("use_sdpa", "cast_half", "use_better_transformer"),
        ("use_sdpa", "export_onnx", "quantize_int8"),
        ("export_onnx", "cast_onnx_half", "build_tensorrt"),
        ("export_onnx", "fuse_ort", "fuse_ort"),
    ]
    cases = orders.check(tiny(), wanted, tmp_path)
    found = {case.order: case.outcome for case in cases}
    assert found.pop(wanted[2]) in ("built", "ok", "missing"), cases
    assert found == {wanted[0]: "ok", wanted[1]: "ok", wanted[3]: "refused"}, cases
    shown = orders.table(cases)
    assert "4 triples: 2 ok" in shown and "1 refused" in shown and "0 broken" in shown


@pytest.mark.usefixtures("workers")
def test_an_order_that_fails_is_broken_with_its_reason(tiny: Tiny, tmp_path: Path) -> None:
    cases = orders.check(tiny(), [("use_sdpa", "swap_labels"), ("swap_labels", "use_sdpa")], tmp_path)
    assert [case.outcome for case in cases] == ["broken", "broken"]
    assert "label" in str(cases[0].reason) and str(cases[1].reason).startswith("after swap_labels: reverted: ")
    assert "BROKEN use_sdpa > swap_labels: " in orders.table(cases)
