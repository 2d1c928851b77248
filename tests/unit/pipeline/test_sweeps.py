"""The reference runs rows of the sweeps while a stage is built, and is afterwards as it was."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bertopt import stages
from bertopt.errors import WorkerCrashed
from bertopt.pipeline.sweeps import Sweeps
from bertopt.workers.client import Worker, Workers
from tests.support.shared_workers import cheap_workers
from tests.support.tiny_models import write_tiny


class Recorded:
    """A worker that says what it was asked."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.asked = worker, list[str]()

    def __getattr__(self, name: str) -> object:
        return getattr(self.worker, name)

    def call(self, op: str, **options: object) -> object:
        self.asked.append(f"{op} {options.get('threads', '')}")
        return self.worker.call(op, **options)  # type: ignore[arg-type]

    def exchange(self, op: str, *arguments: object, **options: object) -> object:
        self.asked.append(op)
        return self.worker.exchange(op, *arguments, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with cheap_workers() as shared:
        yield shared


@pytest.fixture(scope="module")
def reference(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, out = write_tiny(tmp_path_factory.mktemp("tiny")), tmp_path_factory.mktemp("out")
    from bertopt.pipeline.store import Store

    with Store(out, False, lambda _: None) as store, workers.start() as worker:
        return store.reference(worker, str(source), "auto", None, "cpu").path


def test_rows_are_run_beside_a_build_and_are_not_run_again(workers: Workers, reference: Path) -> None:
    sweeps = Sweeps(stages.read_manifest(reference).spec, reference.name, "cpu")
    with workers.start() as worker, workers.start() as stage:
        worker.open(reference, "cpu")
        stage.open(reference, "cpu")
        recorded = Recorded(worker)
        with sweeps.ahead(recorded):  # type: ignore[arg-type]
            while recorded.asked.count("cover") < 3:
                time.sleep(0.01)
        assert (recorded.asked[0], recorded.asked[-1]) == ("torch_threads 1", "torch_threads None")
        ran = recorded.asked.count("cover")
        recorded.asked.clear()
        found = sweeps.measure(reference, stage, recorded, [], every=True)  # type: ignore[arg-type]
        assert ran >= 3 and all(output.worst < 1e-5 for output in found.outputs.values())


@pytest.mark.parametrize("fails", [False, True])
def test_the_reference_has_its_threads_again_whatever_the_build_does(workers: Workers, reference: Path, fails: bool) -> None:
    sweeps = Sweeps(stages.read_manifest(reference).spec, reference.name, "cpu")
    with workers.start() as worker:
        worker.open(reference, "cpu")
        recorded = Recorded(worker)
        try:
            with sweeps.ahead(recorded):  # type: ignore[arg-type]
                if fails:
                    raise ValueError("no build")
        except ValueError:
            assert fails
        assert recorded.asked[-1] == "torch_threads None"


def test_a_reference_that_ends_beside_a_build_ends_the_step(workers: Workers, reference: Path) -> None:
    sweeps = Sweeps(stages.read_manifest(reference).spec, reference.name, "cpu")
    with workers.start() as worker:
        worker.open(reference, "cpu")
        with pytest.raises(WorkerCrashed), sweeps.ahead(worker):
            worker.kill()
            for thread in threading.enumerate():
                if thread.name == "bertopt-sweeps":
                    thread.join()  # it asks the ended worker again; where the block ended before that, nothing would be lost


def test_a_reference_whose_rows_may_depend_on_their_batch_runs_the_sweeps_as_they_are(workers: Workers, reference: Path) -> None:
    sweeps = Sweeps(stages.read_manifest(reference).spec, reference.name, "cpu", by_row=False)
    ran = []
    with workers.start() as worker:
        worker.open(reference, "cpu")
        whole = sweeps._run
        sweeps._run = lambda of, probes: ran.extend(probes) or whole(of, probes)  # type: ignore[method-assign, func-returns-value]
        sweeps.measure(reference, worker, worker, [], every=False)
    assert worker.shapes is not None
    names = [probe.name for probe in sweeps.plan.of(False, worker.shapes, False)]
    assert [probe.name for probe in ran] == [*names, *names]


def test_the_stage_to_deliver_runs_the_other_sweeps_and_is_judged_by_all(workers: Workers, reference: Path) -> None:
    """The batch sizes of a model of 12 layers took 6 s again."""
    sweeps = Sweeps(stages.read_manifest(reference).spec, reference.name, "cpu")
    ran: list[list[str]] = []
    with workers.start() as worker, workers.start() as stage:
        worker.open(reference, "cpu")
        stage.open(reference, "cpu")
        whole = sweeps._run

        def run(of: Worker, probes: Any) -> Any:
            if of is stage:
                ran.append([probe.name for probe in probes])
            return whole(of, probes)

        sweeps._run = run  # type: ignore[method-assign]
        once, twice = (sweeps.measure(reference, stage, worker, [], every) for every in (False, True))
        alone = Sweeps(sweeps.spec, reference.name, "cpu").measure(reference, stage, worker, [], every=True)
    assert ran[0] and not set(ran[0]) & set(ran[1])
    assert twice.rows > once.rows and (twice.rows, twice.tokens, twice.finite) == (alone.rows, alone.tokens, alone.finite)
    assert all(twice.outputs[name].worst < 1e-5 and alone.outputs[name].worst < 1e-5 for name in ("logits",))
