"""Workers: what goes over the wire, how they end, and that nothing is ever left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest

from bertopt import wire
from bertopt.core import Context
from bertopt.errors import (
    IntegrityError,
    ResourceError,
    StepTimeout,
    Unsupported,
    UsageError,
    WorkerCrashed,
)
from bertopt.worker import Worker, Workers, _runs
from tests import example_passes
from tests.conftest import Tiny

ROOT = Path(__file__).parents[1]


def becomes(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3),
        np.zeros((0, 4), np.float32),
        np.array(3.5),
        np.arange(24.0).reshape(4, 6)[::2, ::-1],
        np.arange(6, dtype=np.int32).reshape(2, 3).T,
        np.array([True, False]),
        np.array([np.nan, np.inf], np.float16),
    ],
    ids=["plain", "empty", "0-d", "strided", "transposed", "bool", "half"],
)
def test_arrays_survive_the_wire(array: np.ndarray) -> None:
    here, there = Pipe()
    wire.send(here, {"op": "run", "args": {"ä": None}}, {"a": array, "b": np.ones(2)})
    message, arrays = wire.receive(there)
    assert message == {"op": "run", "args": {"ä": None}} and list(arrays) == ["a", "b"]
    assert arrays["a"].dtype == array.dtype and arrays["a"].shape == array.shape and arrays["a"].flags.writeable
    np.testing.assert_array_equal(arrays["a"], array)


def test_a_closed_wire_is_the_end() -> None:
    here, there = Pipe()
    here.close()
    with pytest.raises(EOFError):
        wire.receive(there)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with pytest.MonkeyPatch.context() as patch:
        example_passes.make_cheap(patch)
        with Workers() as started:
            yield started


@pytest.fixture
def worker(workers: Workers) -> Iterator[Worker]:
    with workers.start() as started:
        yield started


@pytest.fixture(scope="module")
def reference(workers: Workers, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stage 00 of the tiny checkpoint."""
    out = tmp_path_factory.mktemp("reference")
    with workers.start() as worker:
        fields = {"key": "k", "name": "reference", "device": "cpu"}
        worker.call("load_checkpoint", source=str(tiny()), task="auto", revision=None, part=str(out), fields=fields)
    return out


def build(worker: Worker, parent: Path, part: Path, step: example_passes.Touch, timeout: float | None = None) -> None:
    part.mkdir()
    ctx = Context(part)
    context = {"device": ctx.device, "shapes": ctx.shapes, "texts": ctx.texts, "seed": ctx.seed}
    worker.call(
        "build", timeout=timeout, parent=str(parent), record=step.record().model_dump(), part=str(part),
        context=context, fields={"key": "k", "name": "step", "device": "cpu"},
    )  # fmt: skip


def test_a_session_in_a_worker_answers_as_one_here(worker: Worker, reference: Path) -> None:
    from bertopt.sessions import open_session
    from bertopt.stage import open_stage

    inputs = {
        "input_ids": np.array([[2, 7, 8, 3]]), "attention_mask": np.array([[1, 1, 1, 1]]),
        "token_type_ids": np.zeros((1, 4), np.int64),
    }  # fmt: skip
    assert worker.call("open", directory=str(reference), device="cpu") == {"max_shape": None}
    _, there = worker.exchange("run", inputs)
    here = open_session(open_stage(reference)).run(inputs)
    np.testing.assert_allclose(there["logits"], here["logits"], atol=1e-6)
    worker.call("load", inputs)
    assert len(worker.call("time", steps=3)) == 3
    np.testing.assert_array_equal(worker.exchange("fetch")[1]["logits"], there["logits"])


def test_errors_keep_their_class(worker: Worker, reference: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"no manifest\.json"):
        worker.call("open", directory=str(tmp_path / "empty"), device="cpu")
    (tmp_path / "empty" / "manifest.json").write_text("{}")
    with pytest.raises(IntegrityError, match="damaged"):
        worker.call("open", directory=str(tmp_path / "empty"), device="cpu")
    with pytest.raises(Unsupported, match="quantum computer"):
        build(worker, reference, tmp_path / "a", example_passes.NeverHere())
    with pytest.raises(ResourceError, match="no space left on the disk"):
        build(worker, reference, tmp_path / "b", example_passes.FillDisk())
    with pytest.raises(WorkerCrashed, match="ValueError: a bug in the pass") as error:
        build(worker, reference, tmp_path / "c", example_passes.RaiseError())
    assert "example_passes.py" in error.value.log
    # After all that it still works.
    build(worker, reference, tmp_path / "d", example_passes.Touch())


def test_a_crash_is_an_error_and_hurts_nobody_else(
    workers: Workers, worker: Worker, reference: Path, tmp_path: Path
) -> None:
    other = workers.start()
    with pytest.raises(WorkerCrashed, match="signal SIGSEGV during 'build'"):
        build(worker, reference, tmp_path / "a", example_passes.KillItself())
    assert not worker.alive and not _runs(worker.pid)
    # Asked again, woken or closed, a dead worker does no harm: its process id may be another's by now.
    with pytest.raises(WorkerCrashed, match="has ended"):
        worker.call("stats")
    worker.pause()
    worker.resume()
    worker.close()
    assert other.call("device") is not None
    other.close()
    with workers.start() as third:
        assert third.call("device") is not None


def test_killed_from_outside_is_taken_for_lack_of_memory(worker: Worker) -> None:
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(ResourceError, match="memory runs out"):
        worker.call("device")


def test_a_timeout_kills_the_whole_group(worker: Worker, reference: Path, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with pytest.raises(StepTimeout, match="'build' took longer than 1 s"):
        build(worker, reference, tmp_path / "a", example_passes.Hang(pids=str(pids)), timeout=1)
    _, child = map(int, pids.read_text().split())
    assert becomes(lambda: not _runs(worker.pid) and not _runs(child))


def test_close_ends_a_worker_in_any_state(workers: Workers, reference: Path, tmp_path: Path) -> None:
    idle, stopped, killed = workers.start(), workers.start(), workers.start()
    stopped.pause()
    os.kill(killed.pid, signal.SIGKILL)
    for worker in (idle, stopped, killed):
        worker.close()
        worker.close()
        assert not _runs(worker.pid)


def test_pause_and_resume(worker: Worker) -> None:
    worker.pause()
    status = Path(f"/proc/{worker.pid}/status")
    assert becomes(lambda: "\nState:\tT" in status.read_text())
    worker.resume()
    assert worker.call("device") is not None


def test_no_workers_inside_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERTOPT_WORKER", "1")
    with pytest.raises(UsageError, match="__main__"):
        Workers()


SCRIPT = """
import sys
from pathlib import Path
from bertopt.worker import Workers
from tests.example_passes import Hang

reference, out = map(Path, sys.argv[1:])
workers = Workers()
idle, stopped, busy = workers.start(), workers.start(), workers.start()
stopped.pause()
(out / "ids").write_text(f"{workers._server.pid} {idle.pid} {stopped.pid} {busy.pid}")
(out / "part").mkdir()
context = {"device": "cpu", "shapes": [], "texts": [], "seed": 0}
busy.call("build", parent=str(reference), record=Hang(pids=str(out / "pids")).record().model_dump(),
          part=str(out / "part"), context=context, fields={"key": "k", "name": "step", "device": "cpu"})
"""


def test_nothing_outlives_a_killed_parent(reference: Path, tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(reference), str(tmp_path)], cwd=ROOT, start_new_session=True
    )
    try:
        assert becomes((tmp_path / "pids").exists)
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    ids = [int(number) for name in ("ids", "pids") for number in (tmp_path / name).read_text().split()]
    assert len(ids) == 6
    assert becomes(lambda: not any(map(_runs, ids))), [number for number in ids if _runs(number)]
