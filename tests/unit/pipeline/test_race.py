"""Races of workers that only record what is asked of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bertopt.checks import latency
from bertopt.checks.latency import Contender, Turn
from bertopt.core import Spec
from bertopt.pipeline.race import Budget, race

SPEC = Spec(family="bert", task="text-classification", inputs=("input_ids", "attention_mask"), outputs=("logits",),
            layers=1, heads=1, hidden=4, vocabulary=50, token_types=0, pad_id=0, max_length=16, text_length=16,
            labels=("a", "b"), parameters=1)  # fmt: skip


class Recorder:
    """A worker of one role that is awake, asleep or closed."""

    pid = 1

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.state = name, log, "awake"
        log.append(f"open {name}")

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

    def close(self) -> None:
        self.state = "closed"
        self.log.append(f"close {self.name}")


class Stadium:
    """Workers opened so far, and races in which the stage of the n-th team takes n ms a step, the others 10."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.opened: list[Recorder] = []
        self.budgets: list[float] = []
        self.left: Callable[[float], float] = lambda _: 0.0
        monkeypatch.setattr(latency, "race", self.race)

    def start(self, role: str) -> Any:
        self.opened.append(Recorder(role, self.log))
        return self.opened[-1]

    def race(self, contenders: list[Contender], budget_s: float, **_: Any) -> float:
        assert [worker.state for worker in self.opened if worker.state == "awake"] == []
        self.log.append(" ".join(contender.name for contender in contenders))
        self.budgets.append(budget_s)
        team = 1 + sum(line == "open stage" for line in self.log)
        for contender in contenders:
            contender.rounds += [Turn([float(team) if contender.name == "stage" else 10.0])] * latency.MIN_ROUNDS
        return self.left(budget_s)


@pytest.fixture
def stadium(monkeypatch: pytest.MonkeyPatch) -> Stadium:
    return Stadium(monkeypatch)


def team(stadium: Stadium) -> dict[str, Any]:
    found = {role: stadium.start(role) for role in ("stage", "reference", "parent")}
    stadium.log.clear()
    return found


def test_teams_are_opened_in_turn_and_closed(stadium: Stadium) -> None:
    racing = team(stadium)
    timed, cases = race(racing, SPEC, [(1, 8), (8, 8), (4, 8)], ["a"], Budget(6.0, 9.0, processes=3), None, stadium.start)
    heats = ["stage reference parent"] * 3
    assert stadium.log == [
        *heats,
        "open parent", "open reference", "open stage", *heats, "close parent", "close reference", "close stage",
        "open stage", "open reference", "open parent", *heats, "close stage", "close reference", "close parent",
    ]  # fmt: skip
    assert stadium.budgets == [2.0, 2.0, 3.0] * 3
    # The first team is its owner's, as it was.
    assert [worker.state for worker in racing.values()] == ["awake"] * 3
    assert [(case.batch, case.sequence) for case in timed] == [(1, 8), (4, 8), (None, None)] and cases == []
    for case in timed:
        assert (case.n, case.p50_ms) == (1 if case.kind == "mix" else 3 * latency.MIN_ROUNDS, 2.0)
        assert case.vs_reference is not None and case.vs_reference == case.vs_parent
        assert case.vs_reference.ratio == pytest.approx(10 / 6 ** (1 / 3))


def test_what_one_race_leaves_is_the_next_ones(stadium: Stadium) -> None:
    stadium.left = lambda budget: budget - 0.5
    timed, _ = race(team(stadium), SPEC, [(1, 8)], [], Budget(4.0, 9.0, processes=2), None, stadium.start)
    assert stadium.budgets == [2.0, 3.5]
    assert [case.kind for case in timed] == ["shape"]


@pytest.mark.parametrize("when", ["opening", "racing"])
def test_a_team_that_fails_is_closed(stadium: Stadium, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    racing = team(stadium)
    begin = stadium.race

    def breaks(contenders: list[Contender], budget_s: float, **options: Any) -> float:
        if len(stadium.opened) > 3:
            raise RuntimeError(when)
        return begin(contenders, budget_s, **options)

    def start(role: str) -> Any:
        if when == "opening" and role == "stage":
            raise RuntimeError(when)
        return stadium.start(role)

    monkeypatch.setattr(latency, "race", breaks)
    with pytest.raises(RuntimeError, match=when):
        race(racing, SPEC, [(1, 8)], [], Budget(processes=2), None, start)
    assert {worker.state for worker in stadium.opened[3:]} == {"closed"} and len(stadium.opened) > 3
    assert {worker.state for worker in racing.values()} == {"awake"}
