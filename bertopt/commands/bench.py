"""`bertopt bench`: how fast artefacts are on this machine, the others raced against the first."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from bertopt.errors import UsageError
from bertopt.pipeline import pair
from bertopt.pipeline.measurement_plan import mix_texts
from bertopt.pipeline.own_texts import fitting
from bertopt.pipeline.progress import ProgressCallback
from bertopt.pipeline.race import Budget, race
from bertopt.recipe.texts import read_or_built_in
from bertopt.results import Latency
from bertopt.stages.opening import Opened, opening
from bertopt.system import environment
from bertopt.workers.client import Worker, Workers


class Timed(BaseModel, extra="forbid"):
    """The figures of one artefact. `vs_reference` of each is against the first artefact."""

    directory: str
    form: str
    precision: str
    latency: list[Latency]
    facts: dict[str, Any]
    peak_rss_bytes: int


class Bench(BaseModel, extra="forbid"):
    """What `bench` measured, and where."""

    environment: dict[str, Any]
    artefacts: list[Timed]


def bench(
    directories: Sequence[Path], texts: Path | None = None, shapes: Sequence[tuple[int, int]] = (), seconds: float = 2.5,
    on_progress: ProgressCallback = lambda _: None, key: Path | None = None,
) -> Bench:  # fmt: skip
    """Time each artefact (or stage) on every [B, S] of `shapes`, by default those it was checked on, and on texts, by default
    the built-in ones; each race takes `seconds` at most. With the public `key` each must be signed with it.

    Each runs in its own worker; all but the first are raced against the first. Raises UsageError where they do not take
    the same inputs, IntegrityError where a file changed, Unsupported where this machine cannot run one.
    """
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(opening(directory, key)) for directory in directories]
        return _timed(directories, opened, texts, shapes, seconds, on_progress)


def _timed(
    directories: Sequence[Path], opened: Sequence[Opened], texts: Path | None, shapes: Sequence[tuple[int, int]], seconds: float,
    on_progress: ProgressCallback,
) -> Bench:  # fmt: skip
    """Time what was opened of `directories`: they themselves, or private copies."""
    manifests = [one.manifest for one in opened]
    spec = manifests[0].spec
    for directory, manifest in zip(directories, manifests, strict=True):
        other = manifest.spec
        if (other.task, other.inputs) != (spec.task, spec.inputs):
            raise UsageError(
                f"'{directory}' takes {', '.join(other.inputs)} for {other.task}, '{directories[0]}' takes "
                f"{', '.join(spec.inputs)} for {spec.task}; time models of one kind together"
            )
    grid = list(shapes) or pair.shapes(manifests[0])
    too_long = [shape for shape in grid if shape[1] > spec.max_length]
    if too_long:
        raise UsageError(f"sequence must be at most the model's {spec.max_length} usable positions; got {too_long[0]}")
    budget = Budget(seconds, seconds)
    rows: list[Timed] = []
    with Workers() as workers:
        first = _open(workers, opened[0])
        mix = mix_texts(spec, fitting(first, opened[0].path, read_or_built_in(texts)))
        for number, (directory, one) in enumerate(zip(directories, opened, strict=True)):
            on_progress(f"timing {directory}")
            worker, manifest = _open(workers, one) if number else first, one.manifest
            racing = {"stage": worker} | ({"reference": first} if number else {})
            latency, _ = race(racing, spec, grid, mix, budget)
            stats = worker.call("stats")
            rows.append(
                Timed(
                    directory=str(directory), form=manifest.form, precision=manifest.precision, latency=latency,
                    facts=stats["facts"], peak_rss_bytes=stats["peak_rss_bytes"],
                )
            )  # fmt: skip
            if number:
                worker.close()
    return Bench(environment=environment.describe(), artefacts=rows)


def _open(workers: Workers, one: Opened) -> Worker:
    worker = workers.start()
    worker.open(one.path, one.manifest.device)
    return worker
