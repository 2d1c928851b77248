"""One checkpoint: start its contenders, check what they answer, time them in interleaved rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import figures
from benchmarks.peers.contender import Contender, ContenderError, decoded
from benchmarks.peers.models import Scenario
from benchmarks.peers.roster import Ready
from bertopt.pipeline.progress import ProgressCallback
from bertopt.system.cpu_contention import MachineWatch, findings

#: A contender this many times slower than the fastest sits out after this many rounds.
BEATEN, AFTER = 1.7, 3
#: Texts that everyone answers before it is timed.
WARM = 32


@dataclass(frozen=True)
class Job:
    """What is raced on. `texts` are by name, `truth` the labels of the natural ones."""

    scenarios: Sequence[Scenario]
    texts: Mapping[str, list[str]]
    truth: Sequence[str]
    rounds: int
    budget_s: float
    timeout_s: float


def start(ready: Ready, logs: Path, job: Job) -> Contender:
    """Open a contender and give it the texts. Raises ContenderError."""
    log = logs / f"{ready.entry.name.replace(' ', '-')}.log"
    contender = Contender(ready.entry.name, ready.python, ready.options, log, job.timeout_s, ready.path)
    try:
        for name, texts in job.texts.items():
            contender.ask("texts", name=name, texts=texts)
    except ContenderError:
        contender.close()
        raise
    return contender


def race(
    race_: dict[str, Any], ready: Sequence[Ready], reference: Any, job: Job, logs: Path,
    save: Callable[[], None], on_progress: ProgressCallback,
) -> None:  # fmt: skip
    """Add turns to `race_` until everyone has `job.rounds`, or the budget is spent, opening included; `save` after every round.

    What an earlier run measured of the same contender is kept. `reference` is what natural texts should give; where it is
    None, fidelity and facts are those of an earlier race, of the same contenders with other threads.
    """
    began = time.monotonic()
    with ExitStack() as stack:
        running: dict[str, Contender] = {}
        for one in ready:
            name = one.entry.name
            entry = enrolled(race_, one)
            on_progress(f"opening {name}")
            try:
                contender = stack.enter_context(start(one, logs, job))
                if reference is not None:
                    entry["facts"] = contender.facts
                    answers = decoded(contender.ask("answers", name="natural"))
                    entry["fidelity"] = figures.fidelity(answers, reference, job.truth)
                warm(contender, job)
            except (ContenderError, ValueError) as error:
                entry["failed"] = str(error)
                on_progress(f"failed: {error}")
                continue
            entry.pop("failed", None)
            running[name] = contender
        save()
        machine = MachineWatch([contender.pid for contender in running.values()])
        rounds(race_, running, job, save, on_progress, machine, began)
        race_["warnings"] = sorted({*race_.get("warnings", []), *findings(machine.seen())})
        for name, contender in running.items() if reference is not None else ():
            race_["contenders"][name]["facts"] = contender.ask("facts")
        save()


def enrolled(race_: dict[str, Any], one: Ready) -> dict[str, Any]:
    """The contender's entry; its turns are forgotten where what it runs has changed."""
    name = one.entry.name
    entry: dict[str, Any] = race_["contenders"].setdefault(name, {})
    if entry.get("identity") != one.identity:
        entry.clear()
        race_["turns"] = [turn for turn in race_["turns"] if turn["contender"] != name]
    entry.update(peer=one.entry.peer, environment=one.entry.environment, identity=one.identity)
    return entry


def warm(contender: Contender, job: Job) -> None:
    """Once through every kind of call, so that nothing is compiled or allocated while the clock runs."""
    for scenario in job.scenarios:
        few = min(scenario.count, WARM)
        contender.ask("run", name=scenario.texts, start=0, stop=few, window=min(scenario.window, few))


def rounds(
    race_: dict[str, Any], running: dict[str, Contender], job: Job, save: Callable[[], None],
    on_progress: ProgressCallback, machine: MachineWatch, began: float,
) -> None:  # fmt: skip
    """Scenarios and contenders in random order, every contender once a scenario, until all have their rounds.
    Who fails leaves `running`."""
    slowest = 0.0
    rng = np.random.default_rng(len(race_["turns"]))
    first = 1 + max((turn["round"] for turn in race_["turns"]), default=-1)
    number = first
    while owed := missing(race_, list(running), job):
        start_s = time.monotonic()
        if number > first and start_s - began + slowest > job.budget_s:
            on_progress(f"the budget of {job.budget_s:.0f} s is spent after {number - first} rounds")
            break
        machine.calibrate()
        for i in rng.permutation(len(job.scenarios)):
            scenario = job.scenarios[i]
            names = owed.get(scenario.name, [])
            for k in rng.permutation(len(names)):
                name = names[k]
                if name not in running:
                    continue
                try:
                    turn = one_turn(running[name], scenario, number, len(job.texts[scenario.texts]))
                except ContenderError as error:
                    running.pop(name).close()
                    race_["contenders"][name]["failed"] = str(error)
                    on_progress(f"failed: {error}")
                    continue
                race_["turns"].append(turn)
                on_progress(f"round {number + 1}: {scenario.name}: {name} {figures.cost(turn):.2f} ms")
        slowest = max(slowest, time.monotonic() - start_s)
        number += 1
        save()


def missing(race_: Mapping[str, Any], names: Sequence[str], job: Job) -> dict[str, list[str]]:
    """Who runs in the next round, by scenario: all as long as one lacks rounds, but for the beaten ones that no ratio is
    taken against."""
    found, turns = {}, race_["turns"]
    for scenario in job.scenarios:
        best = {figures.best_peer(race_, scenario.name, near) for near in (False, True)}
        out = figures.beaten(turns, scenario.name, names, AFTER, BEATEN) - best
        left = [name for name in names if name not in out]
        if any(len(figures.costs(turns, scenario.name, name)) < job.rounds for name in left):
            found[scenario.name] = left
    return found


def one_turn(contender: Contender, scenario: Scenario, number: int, of: int) -> dict[str, Any]:
    """One contender's calls of a scenario. Raises ContenderError."""
    begin, stop = scenario.slice(number, of)
    found = contender.ask("run", name=scenario.texts, start=begin, stop=stop, window=scenario.window)
    taken = found["seconds"]
    p50, p90 = (1e3 * float(value) for value in np.quantile(taken, [0.5, 0.9]))
    return {
        "round": number, "scenario": scenario.name, "contender": contender.name, "texts": stop - begin,
        "seconds": round(sum(taken), 6), "cpu_s": round(found["cpu_s"], 6), "p50_ms": round(p50, 4), "p90_ms": round(p90, 4),
    }  # fmt: skip
