"""Time a stage, the reference and its parent against each other, each in its own worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bertopt.checks import latency, parity, probes
from bertopt.checks.latency import Contender, Turn
from bertopt.checks.ratio import MIN_ROUNDS, QUICK_ROUNDS
from bertopt.core import Session, Spec
from bertopt.results import Case, Latency
from bertopt.spec import Text
from bertopt.system.cpu_contention import MachineWatch, findings
from bertopt.workers.client import Worker
from bertopt.workers.remote_session import RemoteSession

if TYPE_CHECKING:
    from bertopt.core import Array
    from bertopt.recipe.parser import Timing


@dataclass(frozen=True)
class Budget:
    """Most seconds of timing for each shape and for the mix, after `min_rounds` rounds. Unused seconds go to the next race."""

    shape_s: float = 2.5
    mix_s: float = 4.0
    min_rounds: int = MIN_ROUNDS

    @classmethod
    def of(cls, timing: Timing) -> Budget:
        """Return the budget of a recipe's `timing:`; `quick` ends every race after `QUICK_ROUNDS` rounds."""
        return QUICK if timing.quick else cls(timing.shape_s, timing.mix_s)

    def total_s(self, shapes: int) -> float:
        """Return the most seconds that one stage is timed for, rounds beyond the budget excluded."""
        return shapes * self.shape_s + self.mix_s


#: Every race ends after `QUICK_ROUNDS` rounds.
QUICK = Budget(0.0, 0.0, QUICK_ROUNDS)


def race(
    racing: dict[str, Worker], spec: Spec, shapes: Sequence[tuple[int, int]], mix: Sequence[Text], budget: Budget,
) -> tuple[list[Latency], list[Case]]:  # fmt: skip
    """Time `racing["stage"]` on every [B, S] that all can run, and end to end on the texts `mix` if there are any, against the other workers.

    The others are `reference`, and `parent` if that is another stage. All but the one being timed are paused. The cases compare some of the
    outputs that the stage computed while it was timed with the reference's for the same inputs.
    """
    shapes = [shape for shape in shapes if all(worker.fits(shape) for worker in racing.values())]
    figures: list[Latency] = []
    cases: list[Case] = []
    unused_s = 0.0
    try:
        for worker in racing.values():
            worker.pause()
        for shape in [*shapes, *([None] if mix else [])]:
            timed, unused_s = race_case(racing, shape, mix, budget, unused_s)
            figures.append(timed)
            if "reference" in racing:
                cases += _sampled(racing, spec, "mix" if shape is None else f"{shape[0]} × {shape[1]}")
    finally:
        for worker in racing.values():
            worker.resume()
    return figures, cases


def race_case(
    racing: dict[str, Worker], shape: tuple[int, int] | None, mix: Sequence[Text], budget: Budget, extra_s: float,
) -> tuple[Latency, float]:  # fmt: skip
    """Race paused workers on one case. Return the figures, and the seconds left of the case's budget and `extra_s`."""
    contenders = {}
    for role, worker in racing.items():
        worker.resume()
        if shape is None:
            worker.call("mix", texts=list(mix))
        RemoteSession(worker).sampled()
        worker.pause()
        contenders[role] = Contender(
            role, _turn(worker, shape), worker.resume, worker.pause, _graphs(worker)
        )
    machine = MachineWatch([worker.pid for worker in racing.values()], any(worker.device == "cuda" for worker in racing.values()))
    unused_s = latency.race(
        list(contenders.values()), (budget.shape_s if shape else budget.mix_s) + extra_s, between=machine.calibrate,
        stolen=machine.stolen, min_rounds=budget.min_rounds,
    )  # fmt: skip
    return latency.measure(contenders, shape, len(mix), findings(machine.seen())), unused_s


def _sampled(racing: dict[str, Worker], spec: Spec, what: str) -> list[Case]:
    stage, reference = racing["stage"], racing["reference"]
    stage.resume()
    samples = RemoteSession(stage).sampled()
    stage.pause()
    reference.resume()
    cases = []
    for inputs, outputs in samples:
        probe = probes.timed(spec, inputs, f"{what}, under the clock")
        expected = parity.answer(RemoteSession(reference), probe, spec)
        cases.append(parity.compare(probe, spec, parity.answer(_Recorded(outputs), probe, spec), expected))
    reference.pause()
    return cases


class _Recorded(Session):
    """Outputs that were computed before."""

    def __init__(self, outputs: Mapping[str, Array]) -> None:
        self.outputs = outputs

    def load(self, inputs: Mapping[str, Array]) -> None:
        """Do nothing: the outputs belong to these inputs already."""

    def step(self) -> None:
        """Do nothing: there is nothing left to run."""

    def fetch(self) -> dict[str, Array]:
        return dict(self.outputs)


def _turn(worker: Worker, shape: tuple[int, int] | None) -> Callable[[int], Turn]:
    def turn(steps: int) -> Turn:
        if shape is None:
            timed = worker.call("time_mix", steps=steps)
        else:
            timed = worker.call("time", shape=list(shape), steps=steps)
        return Turn(timed["step_ms"], timed["unfinished_ms"])

    return turn


def _graphs(worker: Worker) -> Callable[[], int]:
    return lambda: int(worker.call("stats")["facts"].get("graphs", 0))
