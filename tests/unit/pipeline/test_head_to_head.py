"""The fastest stages race each other where their races against the checkpoint do not tell them apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertopt.errors import ResourceError
from bertopt.pipeline import head_to_head
from bertopt.pipeline.rows import Done
from bertopt.results import Latency, Ratio, Stage


def row(name: str, ratio: float | None, low: float = 0.0, high: float = 0.0, status: str = "ok", index: int = 1) -> Stage:
    against = None if ratio is None else Ratio(ratio=ratio, low=low or ratio, high=high or ratio)
    mix = Latency(kind="mix", batch=None, sequence=None, n=8, p50_ms=1.0, p90_ms=1.0, p99_ms=None, texts_per_s=1.0, vs_reference=against)
    return Stage(index=index, name=name, status=status, latency=[mix])  # type: ignore[arg-type]


def done(*rows: Stage) -> list[Done]:
    return [Done(each, each.name, path=Path(each.name)) for each in rows]


#: What a noisy machine gave for a model of 12 layers: the one that takes half the time has the lower estimate.
CHECKPOINT = row("reference", None, index=0)
INT8, BF16 = row("int8", 17.5, 6.3, 48.6), row("bf16", 23.3, 0.001, 1e5)
ONNX = row("onnx", 2.2, 1.16, 4.16)
NOISY = [CHECKPOINT, INT8, BF16, ONNX]


def test_a_lucky_estimate_does_not_decide() -> None:
    times = {"int8": 1.0, "bf16": 1.9, "onnx": 8.0}

    def race(name: str, other: str) -> Ratio:
        ratio = times[other] / times[name]
        return Ratio(ratio=ratio, low=0.95 * ratio, high=1.05 * ratio)

    assert head_to_head.fastest(done(*NOISY), []).row.name == "bf16", "the estimates alone"
    races = head_to_head.decide(NOISY, race, pytest.fail)
    assert [(race.stage, race.other) for race in races] == [("int8", "bf16"), ("onnx", "int8")]
    assert head_to_head.fastest(done(*NOISY), races).row.name == "int8"
    # If it fails the coverage sweeps, the next one is that which lost against it by least.
    for failed, next_ in (([INT8], "bf16"), ([INT8, BF16], "onnx"), ([BF16, ONNX], "int8"), ([INT8, BF16, ONNX], "reference")):
        rows = [each.model_copy(update={"status": "failed"}) if each in failed else each for each in NOISY]
        assert head_to_head.fastest(done(*rows), races).row.name == next_


def test_a_stage_that_is_clearly_the_fastest_is_not_raced_again() -> None:
    rows = [CHECKPOINT, row("int8", 5.5, 5.2, 5.8), row("bf16", 3.5, 3.3, 3.7), row("onnx", 2.0, 1.0, 5.1)]
    assert head_to_head.candidates(rows) == ["int8"]
    assert head_to_head.decide(rows, lambda name, other: pytest.fail("raced"), pytest.fail) == []
    assert head_to_head.fastest(done(*rows), []).row.name == "int8"


def test_candidates() -> None:
    reached = [row("b", 2.0, 1.0, 3.0), row("a", 2.5, 2.4, 2.6), row("c", 1.9, 1.5, 2.4)]
    assert head_to_head.candidates(reached) == ["a", "b", "c"]
    assert head_to_head.candidates([*reached, row("d", 1.8, 0.1, 9.0)]) == ["a", "b", "c"], "no more than three"
    assert head_to_head.candidates([row("failed", 9.0, status="failed"), *reached]) == ["a", "b", "c"]
    assert head_to_head.candidates([row("untimed", None), *reached]) == ["a", "b", "c"]
    # All were raced against the checkpoint itself.
    assert head_to_head.candidates([CHECKPOINT, row("a", 0.98, 0.5, 1.5), row("b", 0.97, 0.5, 1.5)]) == []
    assert head_to_head.candidates([CHECKPOINT]) == [] and head_to_head.candidates([]) == []


@pytest.mark.parametrize("lost", [None, ResourceError("memory is exhausted")], ids=["void", "error"])
def test_a_race_that_cannot_be_run_leaves_the_estimates(lost: ResourceError | None) -> None:
    def race(name: str, other: str) -> Ratio | None:
        if name != "int8":
            return Ratio(ratio=0.5, low=0.5, high=0.5)
        if lost:
            raise lost
        return None

    warnings: list[str] = []
    races = head_to_head.decide(NOISY, race, warnings.append)
    assert [(race.stage, race.other) for race in races] == [("onnx", "bf16")]
    (warning,) = warnings
    assert warning.startswith("'int8' may be as fast as 'bf16', but could not be raced against it: ")
    assert head_to_head.fastest(done(*NOISY), races).row.name == "bf16"


def test_the_checkpoint_is_delivered_where_nothing_is_faster() -> None:
    rows = [CHECKPOINT, row("slow", 0.8), row("failed", 3.0, status="failed")]
    assert head_to_head.fastest(done(*rows), []).row.name == "reference"
