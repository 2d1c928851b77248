"""Which rounding a stage's twin simulates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bertopt.checks.parity import DEFAULT_LIMITS, ProbeOutputs
from bertopt.checks.probes import Probe
from bertopt.core import Pass
from bertopt.passes import BuildNative, CastHalf, CastOnnxHalf, ConvertOpenvino, ExportOnnx, QuantizeInt8, UseSdpa
from bertopt.pipeline.twins import Twins
from tests.support.specs import spec


def simulated(precision: str, device: str, steps: Sequence[Pass[Any, Any]], flags: Sequence[str] = ()) -> list[Any]:
    """Return what the twins of a stage that `steps` made simulate."""
    seen: list[Any] = []

    class Recorded(Twins):
        def _run(self, name: str, precision: Any, how: Any, draw: int) -> Any:
            seen.append(how)
            return {}

    twins = Recorded(None, Path(), "cpu", spec(), None, [], lambda text: None)  # type: ignore[arg-type]
    manifest: Any = SimpleNamespace(precision=precision, device=device, passes=[step.record() for step in steps], environment={"isa": flags})
    none: Mapping[str, Any] = {}
    twins.compare("stage", [], manifest, none, none, None)
    return seen


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
    assert {how.weight_bits for how in simulated("int8", device, [step], flags)} == {bits}


@pytest.mark.parametrize(
    ("steps", "rounds"),
    [
        ([UseSdpa(), BuildNative(precision="bf16")], "layer_products"), ([UseSdpa(), CastHalf()], "operators"), ([ExportOnnx(), CastOnnxHalf()], "operators"),
    ],
)  # fmt: skip
def test_half_precision_rounds_as_its_passes_say(steps: Sequence[Pass[Any, Any]], rounds: str) -> None:
    assert simulated("bfloat16", "cpu", steps) == [rounds]


def test_an_answer_that_moves_in_its_context_is_seen_where_the_question_has_the_best_scores() -> None:
    """No answer is of the question, whose scores say nothing."""
    questions = spec(task="question-answering", inputs=("input_ids", "attention_mask"), outputs=("start_logits",))
    ids = np.tile([1, 7, 7, 2, 2, 8, 8, 8, 2], (40, 1))
    mask = np.ones_like(ids)
    probe = Probe("pairs", "pair", {"input_ids": ids, "attention_mask": mask}, mask == 1, np.ones(40, bool))
    rng = np.random.default_rng(0)
    reference = rng.normal(size=ids.shape) + np.where(np.arange(9) == 2, 9, 0) - np.where(np.arange(9) > 7, 9, 0)
    reference[5, 5:8] = 1, 3, 0
    noise = rng.normal(size=(2, *ids.shape)) * 0.02
    moved = reference + noise[0]
    moved[5, 5:7] = moved[5, [6, 5]]

    class Simulated(Twins):
        def _run(self, name: str, precision: Any, how: Any, draw: int) -> Any:
            return {"pairs": ProbeOutputs({"start_logits": reference + noise[1]})}

    twins = Simulated(None, Path(), "cpu", questions, None, [probe], lambda text: None, (1, 2))  # type: ignore[arg-type]

    def margin(scores: Any) -> float:
        answers = [{"pairs": ProbeOutputs({"start_logits": values})} for values in (scores, reference)]
        found = twins.compare("bf16", ["pairs"], SimpleNamespace(precision="bfloat16", passes=[]), *answers, None)  # type: ignore[arg-type]
        assert found is not None and found.flip_margin is not None
        return found.flip_margin

    limit = DEFAULT_LIMITS["bfloat16"].flip_margin_max
    assert limit is not None and margin(reference + noise[0]) < limit < margin(moved)
