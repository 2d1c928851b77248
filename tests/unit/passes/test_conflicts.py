"""Which passes may follow which."""

from __future__ import annotations

import pytest

from bertopt.passes import (
    BuildTensorrt,
    CastHalf,
    CastOnnxHalf,
    CompileTorch,
    ExportOnnx,
    FuseOrt,
    QuantizeInt8,
    UseBetterTransformer,
    UseSdpa,
)
from tests.support.lab import AnyPass

SDPA, E23, E20 = UseSdpa(), ExportOnnx(), ExportOnnx(opset=20)


@pytest.mark.parametrize(
    ("step", "before", "words"),
    [
        (CastHalf(), [CastHalf(mode="autocast")], "half precision already"),
        (E23, [UseBetterTransformer()], "cannot be exported"),
        (E23, [CastHalf(mode="autocast")], "autocast exists only while torch runs"),
        (FuseOrt(), [E23, FuseOrt()], "fused already"),
        (FuseOrt(), [E23, QuantizeInt8()], "fuse before quantize_int8"),
        (FuseOrt(), [E23, CastOnnxHalf()], "fuse before cast_onnx_half"),
        (CastOnnxHalf(), [CastHalf(), E23], "half precision already"),
        (CastOnnxHalf(), [E23, CastOnnxHalf()], "half precision already"),
        (CastOnnxHalf(), [E23, QuantizeInt8()], "cast back and forth"),
        (QuantizeInt8(), [E23, QuantizeInt8()], "quantised already"),
        (QuantizeInt8(), [E23, CastOnnxHalf()], "quantise the float32 graph"),
        (QuantizeInt8(), [CastHalf(), E23], "quantise the float32 graph"),
        (BuildTensorrt(), [E23, FuseOrt()], "branch from export_onnx"),
        (BuildTensorrt(), [E23, QuantizeInt8()], "static INT8 without zero points"),
        (SDPA, [UseSdpa(backend="math")], "scaled_dot_product_attention already"),
        (SDPA, [UseBetterTransformer()], "none is left to switch"),
        (UseBetterTransformer(), [UseBetterTransformer()], "converted already"),
        (UseBetterTransformer(), [CastHalf(mode="autocast")], "autocast does not reach into the fast path"),
        (CastHalf(mode="autocast"), [UseBetterTransformer()], "autocast does not reach into nn.TransformerEncoder"),
        (
            BuildTensorrt(),
            [SDPA, E23],
            "no float32 Attention kernel: put cast_onnx_half before, or export with opset: 22",
        ),
        (BuildTensorrt(), [SDPA, E20], None),
        (BuildTensorrt(), [SDPA, CastHalf(dtype="float16"), E23], None),
        (CastHalf(), [SDPA, UseBetterTransformer()], None),
        (E23, [SDPA, CastHalf()], None),
        (FuseOrt(), [SDPA, E20], None),
        (CastOnnxHalf(), [SDPA, E20, FuseOrt()], None),
        (QuantizeInt8(), [SDPA, E20, FuseOrt()], None),
        (BuildTensorrt(), [SDPA, E23, CastOnnxHalf()], None),
        (CompileTorch(), [SDPA, CastHalf()], None),
    ],
)
def test_conflicts(step: AnyPass, before: list[AnyPass], words: str | None) -> None:
    found = step.conflict(before)
    if words is None:
        assert found is None
    else:
        assert found is not None
        assert words in found


@pytest.mark.parametrize(("step", "before"), [(CastOnnxHalf(dtype="bfloat16"), [SDPA, E23]), (E23, [SDPA, CastHalf()])])
def test_graphs_that_no_cpu_runs(step: AnyPass, before: list[AnyPass]) -> None:
    assert "no bfloat16 kernels for a CPU" in str(step.device_conflict("cpu", before))
    assert step.device_conflict("auto", before) is step.device_conflict("cuda", before) is None
    assert CastOnnxHalf().device_conflict("cpu", before) is E23.device_conflict("cpu", [SDPA]) is None
