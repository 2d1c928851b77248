"""Race the fastest stages against each other, where their races against the checkpoint do not tell which of them is the fastest.

Each stage is raced against the checkpoint in turn, minutes apart. On a machine that other processes disturb, the intervals of two stages
overlap, and the higher estimate may be that of the slower one. In one race a disturbance affects both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from bertopt.checks.measurements import StageMeasurements
from bertopt.checks.ratio import MIN_ROUNDS
from bertopt.errors import BertoptError
from bertopt.pipeline.examiner import Examiner
from bertopt.pipeline.measurement_cache import identity
from bertopt.pipeline.race import race
from bertopt.pipeline.rows import Done
from bertopt.results import HeadToHead, Ratio, Stage

#: Most stages that race each other.
MOST = 3


def run(examiner: Examiner, done: Sequence[Done], warn: Callable[[str], None]) -> list[HeadToHead]:
    """Return the races of the stages that may be the fastest, each against the fastest so far; none where there is one such stage."""
    paths = {each.row.name: each.path for each in done}

    def race_of(name: str, other: str) -> Ratio | None:
        mine, theirs = paths[name], paths[other]
        assert mine is not None and theirs is not None, "what was timed was built"
        return _measure(examiner, name, mine, other, theirs)

    return decide([each.row for each in done], race_of, warn)


def decide(rows: Sequence[Stage], race_of: Callable[[str, str], Ratio | None], warn: Callable[[str], None]) -> list[HeadToHead]:
    """As `run`, where `race_of` returns how many times faster the first of two stages is than the second, None where its clock was void.

    Calls `warn` for a race that tells nothing: the estimates of the two then stay as they are.
    """
    races = list[HeadToHead]()
    leader, *others = candidates(rows) or [""]
    for name in others:
        try:
            ratio, why = race_of(name, leader), "the clock was not valid"
        except BertoptError as error:
            ratio, why = None, str(error)
        if ratio is None:
            warn(f"'{name}' may be as fast as '{leader}', but could not be raced against it: {why}")
            continue
        races.append(HeadToHead(stage=name, other=leader, ratio=ratio))
        leader = name if ratio.ratio > 1 else leader
    return races


def candidates(rows: Sequence[Stage]) -> list[str]:
    """Return the names of the stages that may be the fastest, by their intervals, the highest estimate first.

    None where the checkpoint seems to be the fastest: all were raced against that.
    """
    timed = [(row.name, row.speed_up()) for row in rows if row.status == "ok"]
    ranked = sorted(((name, ratio) for name, ratio in timed if ratio), key=lambda each: -each[1].ratio)
    if not ranked or ranked[0][1].ratio <= 1:
        return []
    return [name for name, ratio in ranked if ratio.high >= ranked[0][1].low][:MOST]


def fastest(done: Iterable[Done], races: Sequence[HeadToHead]) -> Done:
    """Return the stage that passed and is the fastest end to end, by its race against another stage where there was one, else by that against
    the checkpoint, whose own speed is 1."""
    every = list(done)
    speeds = {each.row.name: ratio.ratio if (ratio := each.row.speed_up()) else 1.0 for each in every}
    # Also of those that failed afterwards: others were raced against them.
    for found in races:
        speeds[found.stage] = speeds[found.other] * found.ratio.ratio
    return max((each for each in every if each.row.status == "ok"), key=lambda each: speeds[each.row.name])


def _measure(examiner: Examiner, name: str, directory: Path, other_name: str, other: Path) -> Ratio | None:
    """Race two stages end to end, now or as recorded for the same inputs."""
    names = [identity(directory), identity(other), "head to head"]
    measured = examiner.records.read(names)
    if measured is None:
        examiner.on_progress(f"{name}: latency beside {other_name}")
        examiner.open_stages.close_others({examiner.reference, directory, other})
        racing = {"stage": examiner.open_stages.worker(directory), "parent": examiner.open_stages.worker(other)}
        # A quick look too: this race decides which model is delivered, and takes less time than the sweeps over it.
        budget = replace(examiner.plan.budget, min_rounds=MIN_ROUNDS)
        timed, _ = race(racing, examiner.spec, (), examiner.plan.mix, budget)
        measured = StageMeasurements(latency=timed)
        examiner.records.write(names, measured)
    return measured.latency[0].vs_parent
