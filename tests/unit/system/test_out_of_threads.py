"""A container's limit of processes counts threads too: what libraries say where it is reached is no damage and no bug."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import NoReturn

import pytest

from bertopt.cli.app import exit_codes, typer
from bertopt.errors import ResourceError
from bertopt.serve import server
from bertopt.serve.settings import Settings
from bertopt.system import out_of_threads, untrusted
from bertopt.workers import diagnosis
from bertopt.workers import server as worker

PYTHON = "can't start new thread"
OPENVINO = "Exception from src/inference/src/cpp/core.cpp:117:\nException from src/inference/src/dev/plugin.cpp:54:\nResource temporarily unavailable\n\n\n"
RUNTIME = "/onnxruntime_src/onnxruntime/core/platform/posix/env.cc:327 PosixThread::PosixThread() pthread_create failed, error code: 11"
RUST = 'The global thread pool has not been initialized.: ThreadPoolBuildError { kind: IOError(Os { code: 11, kind: WouldBlock, message: "" }) }'
SAID = pytest.mark.parametrize("said", [PYTHON, OPENVINO, RUNTIME, RUST])


class PanicException(BaseException):
    """As the tokenizers library raises it."""


def raised(said: str) -> BaseException:
    return PanicException(said) if said == RUST else RuntimeError(said)


@SAID
def test_an_intact_artefact_is_not_damaged(said: str) -> None:
    with pytest.raises(ResourceError, match="no further thread or process may be started; raise the limit"), untrusted.reading("'x'", "export it again"):
        raise raised(said)


@SAID
def test_a_command_ends_with_5(said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, exit_codes(verbose=False):
        raise raised(said)
    assert ended.value.exit_code == 5
    assert capsys.readouterr().err.splitlines()[-1] == out_of_threads.REMEDY


@SAID
def test_a_worker_says_so(said: str) -> None:
    described = worker._describe(raised(said))
    assert (described["type"], described["message"]) == ("ResourceError", out_of_threads.REMEDY)


def test_a_worker_that_ends_by_it() -> None:
    """OpenBLAS interrupts the process in which it finds no thread."""
    log = "OpenBLAS blas_thread_init: pthread_create failed for thread 1 of 2: Resource temporarily unavailable\nTraceback\nKeyboardInterrupt"
    for error in (diagnosis.server_ended(1, log), diagnosis.worker_ended("open", -6, [], log)):
        assert isinstance(error, ResourceError) and out_of_threads.REMEDY in str(error)


def test_an_end_of_the_interpreter_stays_one() -> None:
    with pytest.raises(SystemExit), exit_codes(verbose=False):
        raise SystemExit(143)


def test_a_server_that_could_not_start_threads_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """libuv aborted the process without a word."""
    pytest.importorskip("uvicorn")
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def third_fails(self: threading.Thread) -> None:
        if len(started) == 2:
            refuse()
        start(self)
        started.append(self)

    def refuse() -> NoReturn:
        raise RuntimeError(PYTHON)

    monkeypatch.setattr(threading.Thread, "start", third_fails)
    with pytest.raises(ResourceError, match="no further thread"):
        server.serve({}, Settings())
    assert len(started) == 2 and not any(thread.is_alive() for thread in started)


@pytest.fixture(autouse=True)
def loggers_stay() -> Iterator[None]:
    import logging

    kept = {name: (list(logging.getLogger(name).handlers), logging.getLogger(name).propagate, logging.getLogger(name).level) for name in ("bertopt.serve", "uvicorn", "bertopt.access")}
    yield
    for name, (handlers, propagate, level) in kept.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
