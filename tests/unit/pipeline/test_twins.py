"""Which rounding a stage's twin simulates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bertopt.core import Int8Rounding, Pass
from bertopt.passes import BuildNative, ConvertOpenvino, QuantizeInt8
from bertopt.pipeline.twins import Twins


@pytest.mark.parametrize(
    ("step", "device", "flags", "bits"),
    [
        (QuantizeInt8(), "cpu", ["avx2"], 7), (QuantizeInt8(), "cpu", ["avx2", "avx512f", "avx512_vnni"], 8),
        (QuantizeInt8(), "cpu", ["asimddp"], 8), (QuantizeInt8(scheme="static", symmetric=True), "cuda", ["avx2"], 8),
        (QuantizeInt8(reduce_range=True), "cpu", ["avx2", "avx512_vnni"], 7), (QuantizeInt8(reduce_range=False), "cpu", ["avx2"], 8),
        (ConvertOpenvino(precision="int8"), "cpu", ["avx2"], 7), (ConvertOpenvino(precision="int8"), "cpu", ["avx2", "avx_vnni"], 8),
        (BuildNative(), "cpu", ["avx2"], 8),
    ],
)  # fmt: skip
def test_the_twin_has_as_many_bits_as_the_pass_took_where_it_ran(
    step: Pass[Any, Any], device: str, flags: Sequence[str], bits: int
) -> None:
    """Where this process runs says nothing: an artefact is verified on other machines than it was made on."""
    seen: list[Int8Rounding] = []

    class Recorded(Twins):
        def _run(self, name: str, precision: Any, how: Int8Rounding | None, draw: int, timeout: float) -> Any:
            assert how is not None
            seen.append(how)
            return {}

    twins = Recorded(None, Path(), "cpu", None, None, [], lambda text: None)  # type: ignore[arg-type]
    manifest: Any = SimpleNamespace(precision="int8", device=device, passes=[step.record()], environment={"isa": flags})
    none: Mapping[str, Any] = {}
    twins.compare("int8", [], manifest, none, none, None, 1.0)
    assert {how.weight_bits for how in seen} == {bits}
