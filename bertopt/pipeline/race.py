"""Time a stage, the reference and its parent against each other, each open in a worker of its own, or in several."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bertopt.checks import latency, parity, probes
from bertopt.checks.latency import Contender, Turn
from bertopt.core import Session, Spec
from bertopt.results import Case, Latency
from bertopt.runtime.tokenization import Text
from bertopt.system.cpu_contention import Machine, Seen, findings
from bertopt.workers.client import Worker
from bertopt.workers.remote_session import RemoteSession

if TYPE_CHECKING:
    from bertopt.core import Array


@dataclass(frozen=True)
class Budget:
    """Most seconds of timing for each shape, and for the mix. What one does not need is left to those after it.

    A race ends sooner where its intervals are narrower than `narrow` to either side, as a share of the ratio. `processes`
    run each contender, one after another: two that run the same model differ by about 1 % for longer than a race.
    """

    shape_s: float = 2.5
    mix_s: float = 4.0
    narrow: float = latency.NARROW
    processes: int = 1


@dataclass(frozen=True)
class Raced:
    """One team after the race of one shape, and what was seen of the machine meanwhile."""

    team: dict[str, Contender]
    seen: Seen


def race(
    racing: dict[str, Worker], spec: Spec, shapes: Sequence[tuple[int, int]], mix: Sequence[Text], budget: Budget,
    timeout: float | None, start: Callable[[str], Worker],
) -> tuple[list[Latency], list[Case]]:  # fmt: skip
    """Time `racing["stage"]` on every [B, S] it can run, and on the mix if there is any, against the others there are.

    The others are `reference`, and `parent` where that is another. Where the budget asks for more processes, `start` opens
    a role's model in a new one; these share the budget, and all of one team are closed before the next is opened. All but
    the one that is timed are stopped. The cases hold a few of the stage's answers under the clock against the
    reference's to the same inputs.
    """
    shapes = [shape for shape in shapes if all(worker.fits(shape) for worker in racing.values())]
    found: dict[tuple[int, int] | None, list[Raced]] = {}
    cases: list[Case] = []
    spare = 0.0
    for number in range(budget.processes):
        with _team(racing, number, start) as team:
            for shape in [*shapes, *([None] if mix else [])]:
                raced, spare = race_case(team, shape, mix, budget, spare, timeout)
                found.setdefault(shape, []).append(raced)
                if "reference" in team:
                    cases += _sampled(team, spec, "mix" if shape is None else f"{shape[0]} × {shape[1]}", timeout)
    return [
        latency.measure(
            [each.team for each in all_teams], shape, len(mix), findings(*(each.seen for each in all_teams))
        )
        for shape, all_teams in found.items()
    ], cases


@contextmanager
def _team(racing: dict[str, Worker], number: int, start: Callable[[str], Worker]) -> Iterator[dict[str, Worker]]:
    """The first team is `racing`, asleep; any other is new processes of the same roles, opened in turn in this order and
    in its reverse, as the one opened first may be a little slower for good."""
    opened: dict[str, Worker] = {}
    try:
        if number:
            for role in reversed(racing) if number % 2 else racing:
                opened[role] = start(role)
                opened[role].pause()
        for worker in racing.values():
            worker.pause()
        yield {role: opened[role] for role in racing} if number else racing
    finally:
        for worker in opened.values():
            worker.close()
        for worker in racing.values():
            worker.resume()


def race_case(
    team: dict[str, Worker], shape: tuple[int, int] | None, mix: Sequence[Text], budget: Budget, spare: float,
    timeout: float | None,
) -> tuple[Raced, float]:  # fmt: skip
    """One team's race, and the seconds left of its share of the budget and of `spare`."""
    contenders = {}
    for role, worker in team.items():
        worker.resume()
        if shape is None:
            worker.call("mix", timeout=timeout, texts=list(mix))
        RemoteSession(worker, timeout).sampled()
        worker.pause()
        contenders[role] = Contender(
            role, _turn(worker, shape, timeout), worker.resume, worker.pause, _graphs(worker, timeout)
        )
    machine = Machine([worker.pid for worker in team.values()])
    left = latency.race(
        list(contenders.values()), (budget.shape_s if shape else budget.mix_s) / budget.processes + spare,
        between=machine.calibrate, withheld=machine.withheld, narrow=budget.narrow * math.sqrt(budget.processes),
    )  # fmt: skip
    return Raced(contenders, machine.seen()), left


def _sampled(racing: dict[str, Worker], spec: Spec, what: str, timeout: float | None) -> list[Case]:
    stage, reference = racing["stage"], racing["reference"]
    stage.resume()
    samples = RemoteSession(stage, timeout).sampled()
    stage.pause()
    reference.resume()
    cases = []
    for inputs, answers in samples:
        probe = probes.timed(spec, inputs, f"{what}, under the clock")
        expected = parity.answer(RemoteSession(reference, timeout), probe, spec)
        cases.append(parity.compare(probe, spec, parity.answer(_Recorded(answers), probe, spec), expected))
    reference.pause()
    return cases


class _Recorded(Session):
    """Answers that were given before."""

    def __init__(self, answers: Mapping[str, Array]) -> None:
        self.answers = answers

    def load(self, inputs: Mapping[str, Array]) -> None:
        """The answers are to these inputs already."""

    def step(self) -> None:
        """There is nothing left to run."""

    def fetch(self) -> dict[str, Array]:
        return dict(self.answers)


def _turn(worker: Worker, shape: tuple[int, int] | None, timeout: float | None) -> Callable[[int], Turn]:
    def turn(steps: int) -> Turn:
        if shape is None:
            found = worker.call("time_mix", timeout=timeout, steps=steps)
        else:
            found = worker.call("time", timeout=timeout, shape=list(shape), steps=steps)
        return Turn(found["taken"], found["late"])

    return turn


def _graphs(worker: Worker, timeout: float | None) -> Callable[[], int]:
    return lambda: int(worker.call("stats", timeout=timeout)["facts"].get("graphs", 0))
