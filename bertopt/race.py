"""Time a stage, the reference and its parent against each other, each open in a worker of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bertopt.checks import latency, parity, probes
from bertopt.checks.latency import Contender, Turn
from bertopt.checks.machine import Machine
from bertopt.core import Session, Spec
from bertopt.results import Case, Latency
from bertopt.runtime.tokens import Text
from bertopt.worker import RemoteSession, Worker

if TYPE_CHECKING:
    from bertopt.core import Array


@dataclass(frozen=True)
class Budget:
    """Most seconds of timing for each shape, and for the mix. What one does not need is left to those after it.

    A race ends sooner where its intervals are narrower than `narrow` to either side, as a share of the ratio.
    """

    shape_s: float = 2.5
    mix_s: float = 4.0
    narrow: float = latency.NARROW


def race(
    racing: dict[str, Worker], spec: Spec, shapes: Sequence[tuple[int, int]], mix: Sequence[Text], budget: Budget,
    timeout: float | None,
) -> tuple[list[Latency], list[Case]]:  # fmt: skip
    """Time `racing["stage"]` on every [B, S] it can run, and on the mix, against the others there are.

    The others are `reference`, and `parent` where that is another. All but the one that is timed are stopped. The cases
    hold a few of the stage's answers under the clock against the reference's to the same inputs.
    """
    for worker in racing.values():
        worker.pause()
    timed: list[Latency] = []
    cases: list[Case] = []
    spare = 0.0
    try:
        for shape in [*(shape for shape in shapes if all(worker.fits(shape) for worker in racing.values())), None]:
            figures, spare = race_case(racing, shape, mix, budget, spare, timeout)
            timed.append(figures)
            if "reference" in racing:
                cases += _sampled(racing, spec, "mix" if shape is None else f"{shape[0]} × {shape[1]}", timeout)
    finally:
        for worker in racing.values():
            worker.resume()
    return timed, cases


def race_case(
    racing: dict[str, Worker], shape: tuple[int, int] | None, mix: Sequence[Text], budget: Budget, spare: float,
    timeout: float | None,
) -> tuple[Latency, float]:  # fmt: skip
    """The stage's figures, and the seconds left of its budget and of `spare`."""
    contenders = {}
    for role, worker in racing.items():
        worker.resume()
        if shape is None:
            worker.call("mix", timeout=timeout, texts=list(mix))
        RemoteSession(worker, timeout).sampled()
        worker.pause()
        contenders[role] = Contender(
            role, _turn(worker, shape, timeout), worker.resume, worker.pause, _graphs(worker, timeout)
        )
    machine = Machine([worker.pid for worker in racing.values()])
    left = latency.race(
        list(contenders.values()), (budget.shape_s if shape else budget.mix_s) + spare, between=machine.calibrate,
        withheld=machine.withheld, narrow=budget.narrow,
    )  # fmt: skip
    reference = contenders.get("reference")
    figures = latency.measure(
        contenders["stage"], shape, len(mix), reference, contenders.get("parent", reference), machine.warnings()
    )
    return figures, left


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
