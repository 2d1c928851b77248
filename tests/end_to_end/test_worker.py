"""Workers: what goes over the wire, how they end, and that nothing is ever left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertopt import stages
from bertopt.core import Context
from bertopt.errors import (
    BertoptError,
    IntegrityError,
    PassFailed,
    ResourceError,
    StepTimeout,
    Unsupported,
    UsageError,
    WorkerCrashed,
)
from bertopt.pipeline.race import Budget, race
from bertopt.system import limits, process_tree
from bertopt.workers import client, protocol, remote_tokenizer
from bertopt.workers.client import Worker, Workers
from bertopt.workers.remote_session import RemoteSession
from bertopt.workers.remote_tokenizer import RemoteTokenizer
from tests.support import example_passes
from tests.support.tiny_models import Tiny

ROOT = Path(__file__).parents[2]


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
    protocol.send(here, {"op": "run", "args": {"ä": None}}, {"a": array, "b": np.ones(2)})
    message, arrays = protocol.receive(there)
    assert message == {"op": "run", "args": {"ä": None}} and list(arrays) == ["a", "b"]
    assert arrays["a"].dtype == array.dtype and arrays["a"].shape == array.shape and arrays["a"].flags.writeable
    np.testing.assert_array_equal(arrays["a"], array)


def test_a_closed_wire_is_the_end() -> None:
    here, there = Pipe()
    here.close()
    with pytest.raises(EOFError):
        protocol.receive(there)


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
        worker.call("load_checkpoint", source=str(tiny()), task="auto", part=str(out), fields=fields)
    return out


def build(worker: Worker, parent: Path, part: Path, step: example_passes.Touch, timeout: float | None = None) -> None:
    part.mkdir()
    ctx = Context(part)
    context = {"device": ctx.device, "shapes": ctx.shapes, "texts": ctx.texts, "seed": ctx.seed}
    worker.call(
        "build", timeout=timeout, parent=str(parent), record=step.record().model_dump(), part=str(part),
        context=context, fields={"key": "k", "name": "step", "device": "cpu"},
    )  # fmt: skip


def warm_up(worker: Worker, reference: Path, folder: Path) -> None:
    """Import what a build needs, so that a short timeout sees nothing but the pass."""
    build(worker, reference, folder / "warm-up", example_passes.Touch())


def test_a_session_in_a_worker_answers_as_one_here(worker: Worker, reference: Path) -> None:
    from bertopt.sessions import open_session
    from bertopt.stages import open_stage

    inputs = {
        "input_ids": np.array([[2, 7, 8, 3]]), "attention_mask": np.array([[1, 1, 1, 1]]),
        "token_type_ids": np.zeros((1, 4), np.int64),
    }  # fmt: skip
    stage = open_stage(reference)
    opened = worker.call("open", directory=str(reference), device="cpu")
    assert opened == {"shapes": {"longest": stage.spec.max_length, "profiles": []}, "layout": "padded"}
    _, there = worker.exchange("run", inputs)
    here = open_session(stage).run(inputs)
    np.testing.assert_allclose(there["logits"], here["logits"], atol=1e-6)
    session = RemoteSession(worker)
    session.load(inputs)
    session.step()
    np.testing.assert_array_equal(session.fetch()["logits"], there["logits"])


def test_what_is_kept_of_timed_runs(worker: Worker, reference: Path) -> None:
    worker.call("open", directory=str(reference), device="cpu")
    session = RemoteSession(worker)
    assert session.sampled() == []
    for _ in range(2):
        timed = worker.call("time", shape=[2, 6], steps=3)
        assert len(timed["step_ms"]) == 3 and min(timed["step_ms"]) > 0
    worker.call("mix", texts=["the cat sat on the mat", "a dog"])
    assert len(worker.call("time_mix", steps=3)["step_ms"]) == 3
    samples = session.sampled()
    assert len(samples) == 3 and session.sampled() == []
    assert [inputs["input_ids"].shape for inputs, _ in samples] == [(2, 6), (2, 6), (2, 8)]
    assert (samples[0][0]["input_ids"] != samples[1][0]["input_ids"]).any()
    for inputs, answers in samples:
        np.testing.assert_allclose(session.run(inputs)["logits"], answers["logits"], atol=1e-6)


@pytest.mark.parametrize("step", [example_passes.Touch(), example_passes.StaleWhenTimed(), example_passes.AnswerLate()])
def test_what_is_answered_under_the_clock_is_checked(
    workers: Workers, reference: Path, tmp_path: Path, step: example_passes.Touch
) -> None:
    spec = stages.read_manifest(reference).spec
    with workers.start() as timed, workers.start() as against:
        build(timed, reference, tmp_path / "stage", step)
        for worker, directory in ((timed, tmp_path / "stage"), (against, reference)):
            worker.call("open", directory=str(directory), device="cpu")
        figures, cases = race(
            {"stage": timed, "reference": against}, spec, [(1, 8), (2, 8)], ["a cat sat", "a dog"], Budget(0.0, 0.0)
        )  # fmt: skip
    assert [case.kind for case in figures] == ["shape", "shape", "mix"]
    assert {case.where.split("], ")[1] for case in cases} == {
        f"{what}, under the clock" for what in ("1 × 8", "2 × 8", "mix")
    }
    assert {case.padding for case in cases} == {"timed"} and all(case.compared for case in cases)
    shapes = [case for case in cases if "mix" not in case.where]
    if isinstance(step, example_passes.StaleWhenTimed):
        assert max(case.max_abs for case in shapes) > 0.01
    else:
        assert max(case.max_abs for case in cases) < 1e-5
    void = ["still busy when the clock stopped" in (case.warning or "") for case in figures]
    # The mix fetches its answers under the clock.
    assert void == [isinstance(step, example_passes.AnswerLate)] * 2 + [False]


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
    with pytest.raises(PassFailed, match="ValueError: a bug in the pass") as error:
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
    assert not worker.alive and not process_tree.runs(worker.pid)
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


@pytest.mark.parametrize(
    ("child", "end", "error", "words"),
    [
        ("none", "stop", StepTimeout, "longer than 3 s"),
        ("none", "deaf", StepTimeout, "longer than 3 s"),
        ("plain", "hang", StepTimeout, "longer than 3 s"),
        ("setsid", "hang", StepTimeout, "longer than 3 s"),
        ("daemon", "hang", StepTimeout, "longer than 3 s"),
        ("deaf", "hang", StepTimeout, "longer than 3 s"),
        ("stopped", "hang", StepTimeout, "longer than 3 s"),
        # What it forked holds its socket open, so that nothing is closed when it dies.
        ("setsid", "SIGSEGV", WorkerCrashed, "signal SIGSEGV"),
        ("daemon", "SIGSEGV", WorkerCrashed, "signal SIGSEGV"),
        ("daemon", "SIGKILL", ResourceError, "memory runs out"),
        ("stopped", "exit", WorkerCrashed, "exit code 3"),
    ],
)
def test_nothing_that_a_worker_started_outlives_it(
    workers: Workers, reference: Path, tmp_path: Path, child: Any, end: Any, error: type[BertoptError], words: str
) -> None:
    (tmp_path / "pids").mkdir()
    step = example_passes.Family(pids=str(tmp_path / "pids"), child=child, end=end)
    bystander, worker = workers.start(), workers.start()
    warm_up(worker, reference, tmp_path)
    with pytest.raises(error, match=words) as raised:
        build(worker, reference, tmp_path / "part", step, timeout=3 if error is StepTimeout else None)
    ids = [int(path.name) for path in (tmp_path / "pids").iterdir()]
    assert len(ids) == (1 if child == "none" else 3) and worker.pid in ids
    assert not [number for number in ids if process_tree.runs(number)]
    if words != "exit code 3" and end not in ("SIGKILL", "deaf"):
        assert "example_passes.py" in raised.value.log
    assert bystander.call("device") is not None
    bystander.close()


def test_a_worker_that_takes_too_much_memory_is_ended(workers: Workers, reference: Path, tmp_path: Path) -> None:
    (tmp_path / "pids").mkdir()
    worker = workers.start()
    worker.memory_bytes = 2**20
    step = example_passes.Family(pids=str(tmp_path / "pids"), child="plain", end="hang")
    with pytest.raises(ResourceError, match=r"took \d+ MiB of memory during 'build' and was ended; it may take 1 MiB here"):
        build(worker, reference, tmp_path / "part", step)
    assert not worker.alive and not process_tree.runs(worker.pid)
    assert not [path for path in (tmp_path / "pids").iterdir() if process_tree.runs(int(path.name))]


def test_every_call_has_a_limit_of_time(workers: Workers, reference: Path, tmp_path: Path) -> None:
    (tmp_path / "pids").mkdir()
    worker = workers.start()
    warm_up(worker, reference, tmp_path)
    with workers.calls_within(3.0), pytest.raises(StepTimeout, match="longer than 3 s"):
        build(worker, reference, tmp_path / "part", example_passes.Family(pids=str(tmp_path / "pids"), child="none", end="deaf"))
    assert workers.call_s == client.CALL_S, "the limit of one block is not the next one's"


def test_a_tokenizer_that_takes_all_time_ends_a_worker(
    workers: Workers, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = tmp_path / "bomb"
    shutil.copytree(reference, bomb)
    fields = json.loads((bomb / "tokenizer.json").read_text())
    fields["normalizer"] = {"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10_000}] * 2}  # fmt: skip
    (bomb / "tokenizer.json").write_text(json.dumps(fields))
    stages.write_manifest(bomb, stages.read_manifest(bomb).model_dump(mode="json", exclude={"files"}))
    tokenizer = RemoteTokenizer(workers, reference)
    assert tokenizer.batch(["the cat", "a"])["input_ids"].shape[0] == 2
    assert tokenizer.word(2) == "[CLS]"
    tokenizer.close()
    assert tokenizer.word(3) == "[SEP]"  # a worker is started again
    tokenizer.close()
    monkeypatch.setattr(remote_tokenizer, "BATCH_S", 1.0)
    with pytest.raises(StepTimeout, match="longer than 1 s"):
        RemoteTokenizer(workers, bomb).batch(["a cat sat"] * 1000)


def test_what_a_good_worker_leaves_behind_ends_with_it(workers: Workers, reference: Path, tmp_path: Path) -> None:
    (tmp_path / "pids").mkdir()
    with workers.start() as bystander, workers.start() as worker:
        for number, each in enumerate((bystander, worker)):
            (tmp_path / "pids" / str(number)).mkdir()
            step = example_passes.Family(pids=str(tmp_path / "pids" / str(number)), child="daemon", end="return")
            build(each, reference, tmp_path / f"part-{number}", step)
        theirs, ids = ([int(path.name) for path in (tmp_path / "pids" / str(n)).iterdir()] for n in range(2))
        worker.close()
        assert not [number for number in ids if process_tree.runs(number)]
        # The other's are none of ours: it lives.
        assert all(map(process_tree.runs, theirs)) and len(theirs) == len(ids) == 3
    assert not [number for number in theirs if process_tree.runs(number)]


def test_killed_from_outside_is_taken_for_lack_of_memory(worker: Worker) -> None:
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(ResourceError, match="memory runs out"):
        worker.call("device")


def test_a_timeout_kills_the_whole_group(worker: Worker, reference: Path, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    warm_up(worker, reference, tmp_path)
    with pytest.raises(StepTimeout, match="'build' took longer than 3 s"):
        build(worker, reference, tmp_path / "a", example_passes.Hang(pids=str(pids)), timeout=3)
    _, child = map(int, pids.read_text().split())
    assert becomes(lambda: not process_tree.runs(worker.pid) and not process_tree.runs(child))


def test_close_ends_a_worker_in_any_state(workers: Workers, reference: Path, tmp_path: Path) -> None:
    idle, stopped, killed = workers.start(), workers.start(), workers.start()
    stopped.pause()
    os.kill(killed.pid, signal.SIGKILL)
    for worker in (idle, stopped, killed):
        worker.close()
        worker.close()
        assert not process_tree.runs(worker.pid)


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


def test_a_server_without_workers_ends_at_once() -> None:
    """An interrupt in the first seconds of a command waited five more for the server, which imported torch."""
    started = Workers()
    started.close()
    assert started._server.returncode == -signal.SIGKILL, "it was waited for until it had imported torch and read its socket"


@pytest.mark.parametrize(("limit", "raised"), [(None, WorkerCrashed), (2**29, ResourceError)])
def test_a_server_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch, limit: int | None, raised: type[BertoptError]) -> None:
    monkeypatch.setattr(client, "SERVER_S", 0.2)
    monkeypatch.setattr(limits, "address_space_bytes", lambda: limit)
    with Workers() as workers:
        os.kill(workers._server.pid, signal.SIGSTOP)
        with pytest.raises(raised, match=r"did not start within 0\.2 s"):
            workers.start()
        assert workers._server.poll() is not None


# As OpenBLAS does where memory ends while it is loaded: Python runs no handler of a signal.
SPINS = """
import os
import signal
import time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
with open(os.environ["PID_FILE"], "w") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(60)
"""


def test_a_server_that_still_loads_libraries_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(SPINS)
    pids = tmp_path / "pids"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "PID_FILE": str(pids)}
    script = "import time; from bertopt.workers.client import Workers; workers = Workers(); time.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", script], env=environment)
    assert becomes(lambda: pids.is_file() and pids.read_text().endswith("\n"))
    server = int(pids.read_text())
    assert process_tree.runs(server)
    parent.kill()
    parent.wait()
    assert becomes(lambda: not process_tree.runs(server), 10)


SCRIPT = """
import os
import sys
import time
from pathlib import Path
from bertopt.workers.client import Workers
from tests.support.example_passes import Family, Hang

reference, out = map(Path, sys.argv[1:])
workers = Workers()
idle, stopped, busy = workers.start(), workers.start(), workers.start()
stopped.pause()
(out / "family").mkdir()
(out / "ids").write_text(f"{workers._server.pid} {idle.pid} {stopped.pid} {busy.pid}")
(out / "part").mkdir()
context = {"device": "cpu", "shapes": [], "texts": [], "seed": 0}
family = Family(pids=str(out / "family"), child="daemon", end="return").record().model_dump()
(out / "other").mkdir()
fields = {"key": "k", "name": "step", "device": "cpu"}
idle.call("build", parent=str(reference), record=family, part=str(out / "other"), context=context, fields=fields)
# A process forked here holds the server's socket open after this one is gone.
if os.fork() == 0:
    time.sleep(60)
    os._exit(0)
busy.call("build", parent=str(reference), record=Hang(pids=str(out / "pids")).record().model_dump(),
          part=str(out / "part"), context=context, fields=fields)
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
    family = [int(path.name) for path in (tmp_path / "family").iterdir()]
    assert len(ids) == 6 and len(family) == 3
    ids += family
    try:
        assert becomes(lambda: not any(map(process_tree.runs, ids))), [number for number in ids if process_tree.runs(number)]
    finally:
        os.killpg(parent.pid, signal.SIGKILL)


def test_a_server_that_was_killed_is_a_lack_of_resources(reference: Path) -> None:
    with Workers() as workers:
        worker = workers.start()
        os.kill(workers._server.pid, signal.SIGKILL)
        with pytest.raises(ResourceError, match=r"the server of the workers was killed by SIGKILL.*memory runs out"):
            worker.call("open", directory=str(reference), device="cpu")
        with pytest.raises(ResourceError, match="killed by SIGKILL"):
            workers.start()


def test_a_server_that_ends_for_want_of_memory_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As under `ulimit -v`: Python itself says MemoryError, or a library cannot be mapped."""
    for text in ("MemoryError", "ImportError: libtorch_cpu.so: failed to map segment from shared object"):
        fake = tmp_path / "python"
        fake.write_text(f"#!/bin/sh\necho '{text}' >&2\nexit 1\n")
        fake.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(fake))
        with Workers() as workers, pytest.raises(ResourceError, match=r"memory.*ulimit -v"):
            workers.start()
    fake.write_text("#!/bin/sh\necho 'SyntaxError: nonsense' >&2\nexit 1\n")
    with Workers() as workers, pytest.raises(WorkerCrashed, match="SyntaxError: nonsense"):
        workers.start()


@pytest.mark.parametrize(
    "lost",
    ["ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory",
     "OSError: libcudart.so.13: cannot open shared object file: No such file or directory",
     "ValueError: libcudnn.so.*[0-9] not found in the system path [/usr/lib/python3.11]"],
    ids=["torch 2.14", "runtime", "torch 2.13"],
)  # fmt: skip
def test_a_server_without_a_library_of_torch_is_the_machine_s_fault(lost: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """PyPI's torch takes its CUDA libraries from other wheels, also where there is no GPU; it was a traceback and exit code 1."""
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\necho 'Traceback (most recent call last):\n  import torch\n{lost}' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    with Workers() as workers, pytest.raises(Unsupported, match=r"cannot be loaded \(libcud\w+\.so.*run bertopt doctor") as raised:
        workers.start()
    assert raised.value.exit_code == 4 and "Traceback" not in str(raised.value) and "lib/python" not in str(raised.value)


def test_what_a_killed_run_left_in_the_temporary_directory_is_swept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gone = subprocess.Popen(["true"])
    gone.wait()
    left, foreign, running = (tmp_path / name for name in (f"bertopt-{gone.pid}-abc", "bertopt-notes", f"bertopt-{os.getppid()}-x"))
    for path in (left, foreign, running):
        path.mkdir()
        (path / "server.log").write_text("x")
    with Workers():
        assert not left.exists() and foreign.exists() and running.exists()
        assert [path for path in tmp_path.iterdir() if path not in (foreign, running)]
    assert sorted(tmp_path.iterdir()) == sorted([foreign, running])
