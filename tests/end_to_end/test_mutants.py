"""The mutation suite's table, and the mutants that take no time. All of them: `python -m campaigns.mutants`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from campaigns.mutants.controls import CONTROLS
from campaigns.mutants.harness import Bench, Finding, judged
from campaigns.mutants.plant import NEW, Gate, table
from tests.support.shared_workers import cheap_workers

MUTANTS = table()
QUICK = (
    "tanh_gelu", "wrong_for_left_padding", "nan_in_one_row", "squeezed_batch_of_one", "counts_nothing",
    "unused_int8_tensor", "temperature_in_a_cast", "class_bias_behind_bf16", "rows_swapped_by_int8",
    "reordered_labels", "half_not_done", "changed_parent", "one_layer_without_mask", "truncated_external_data",
    "written_padding_in_float32", "same_row_before_in_bf16", "far_distances_of_deberta_v2_in_torch",
)  # fmt: skip


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with cheap_workers("pipeline", new_interpreter=True):
        yield Bench(tmp_path_factory.mktemp("mutants"))


def test_there_are_enough() -> None:
    assert len(MUTANTS) >= 157 and sum(mutant.table in NEW for mutant in MUTANTS.values()) >= 60
    assert {mutant.gate for mutant in MUTANTS.values()} == set(get_args(Gate))


def test_every_mutant_says_what_is_wrong_and_is_planted_by_a_pass_or_a_deed() -> None:
    assert [mutant.name for mutant in MUTANTS.values() if not mutant.about.endswith(".")] == []
    assert [mutant.name for mutant in MUTANTS.values() if not (mutant.deed or mutant.step.startswith("plant_"))] == []


@pytest.mark.parametrize(
    ("name", "checkpoint", "steps"), CONTROLS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_harmless_change_passes_every_gate(bench: Bench, name: str, checkpoint: object, steps: object) -> None:
    assert judged(bench.recipe(checkpoint, steps)) == ([], "delivered")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", QUICK)
def test_a_mutant_is_caught_by_its_gate(bench: Bench, name: str) -> None:
    finding = bench.plant(MUTANTS[name])
    assert finding.good, finding


def test_a_mutant_is_caught_by_its_exit_code_alone() -> None:
    assert Finding("m", "wrong", "parity", ("finite",), "", 3, 0.0).good
    assert not Finding("m", "wrong", "latency", ("latency",), "void", 0, 0.0).good


def test_an_unknown_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from campaigns.mutants import __main__

    monkeypatch.setattr("sys.argv", ["mutants", "no_such_mutant"])
    with pytest.raises(SystemExit, match="no mutant no_such_mutant"):
        __main__.main()
