"""Races of workers that only record their calls, and what a race is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bertopt.checks import latency, ratio
from bertopt.checks.latency import Contender, Turn
from bertopt.checks.ratio import MIN_ROUNDS
from bertopt.core import Spec
from bertopt.pipeline.race import Budget, race, race_case
from bertopt.recipe.parser import Timing
from bertopt.system import cpu_contention
from bertopt.system.cpu_contention import MachineWatch

SPEC = Spec(family="bert", task="text-classification", inputs=("input_ids", "attention_mask"), outputs=("logits",),
            layers=1, heads=1, hidden=4, vocabulary=50, token_types=0, pad_id=0, max_length=16, text_length=16,
            labels=("a", "b"), parameters=1)  # fmt: skip


class Recorder:
    """A worker of one role that is awake or asleep."""

    pid, device = 1, "cpu"

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.state = name, log, "awake"

    def fits(self, shape: tuple[int, int]) -> bool:
        return shape[0] <= 4

    def call(self, op: str, **_: Any) -> Any:
        assert self.state == "awake"
        return {}

    def exchange(self, op: str, *_: Any, **__: Any) -> Any:
        assert self.state == "awake"
        return 0, {}

    def pause(self) -> None:
        self.state = "asleep"

    def resume(self) -> None:
        self.state = "awake"


class Track:
    """Workers opened so far, and races in which the stage takes 2 ms a step, the others 10."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.opened: list[Recorder] = []
        self.budgets: list[float] = []
        self.left: Callable[[float], float] = lambda _: 0.0
        monkeypatch.setattr(latency, "race", self.race)

    def team(self) -> dict[str, Any]:
        self.opened = [Recorder(role, self.log) for role in ("stage", "reference", "parent")]
        return {worker.name: worker for worker in self.opened}

    def race(self, contenders: list[Contender], budget_s: float, **_: Any) -> float:
        assert [worker.state for worker in self.opened if worker.state == "awake"] == []
        self.log.append(" ".join(contender.name for contender in contenders))
        self.budgets.append(budget_s)
        for contender in contenders:
            contender.rounds += [Turn([2.0 if contender.name == "stage" else 10.0])] * MIN_ROUNDS
        return self.left(budget_s)


@pytest.fixture
def track(monkeypatch: pytest.MonkeyPatch) -> Track:
    return Track(monkeypatch)


def test_all_cases_are_raced_that_all_can_run(track: Track) -> None:
    racing = track.team()
    timed, cases = race(racing, SPEC, [(1, 8), (8, 8), (4, 8)], ["a"], Budget(6.0, 9.0))
    assert track.log == ["stage reference parent"] * 3
    assert track.budgets == [6.0, 6.0, 9.0]
    assert [worker.state for worker in racing.values()] == ["awake"] * 3
    assert [(case.batch, case.sequence) for case in timed] == [(1, 8), (4, 8), (None, None)] and cases == []
    for case in timed:
        assert (case.n, case.p50_ms) == (1 if case.kind == "mix" else MIN_ROUNDS, 2.0)
        assert case.vs_reference is not None and case.vs_reference == case.vs_parent
        assert case.vs_reference.ratio == pytest.approx(5)


def test_what_one_race_leaves_is_the_next_one_s(track: Track) -> None:
    track.left = lambda budget: budget - 0.5
    race(track.team(), SPEC, [(1, 8), (2, 8)], ["a"], Budget(4.0, 9.0))
    assert track.budgets == [4.0, 7.5, 16.0]


def test_workers_are_resumed_after_a_race_that_fails(track: Track, monkeypatch: pytest.MonkeyPatch) -> None:
    racing = track.team()

    def fails(*_: Any, **__: Any) -> float:
        raise RuntimeError("lost")

    monkeypatch.setattr(latency, "race", fails)
    with pytest.raises(RuntimeError, match="lost"):
        race(racing, SPEC, [(1, 8)], [], Budget())
    assert {worker.state for worker in racing.values()} == {"awake"}


def test_a_race_of_workers_reads_the_cpu_steal_and_keeps_to_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    class Begun(Exception):
        pass

    given: dict[str, Any] = {}

    def begin(contenders: Any, seconds: float, **options: Any) -> float:
        given.update(options, seconds=seconds)
        raise Begun

    monkeypatch.setattr(latency, "race", begin)
    monkeypatch.setattr(MachineWatch, "_cpu_seconds", lambda _: cpu_contention._CpuSeconds(9.0, 3.0, 5.0, 1.0))
    monkeypatch.setattr("bertopt.system.cpu_contention.os.cpu_count", lambda: 2)
    with pytest.raises(Begun):
        race_case({}, (1, 8), [], Budget(2.0, 9.0), 1.0)
    assert (given["seconds"], given["min_rounds"], given["stolen"]()) == (3.0, ratio.MIN_ROUNDS, 2.0)
    with pytest.raises(Begun):
        race_case({}, None, [], Budget.of(Timing(quick=True)), 0.0)
    assert (given["seconds"], given["min_rounds"]) == (0.0, ratio.QUICK_ROUNDS)
