"""Exports that are forked from a process with torch imported: seconds each, where starting Python and torch takes half a minute.

The server of the workers is forked too, from the export; workers are forked as always. Not looked at: kills while Python
starts and imports.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import traceback
import types
from pathlib import Path
from typing import Any, NoReturn

from bertopt.system import process_tree


class Forked:
    """A forked process, as far as `subprocess.Popen` is used of one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            waited, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if waited else None
        return self.returncode

    def wait(self, timeout: float = 600.0) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("forked", timeout)
            time.sleep(0.005)
        return code


def prepare() -> None:
    """Import what exports need, for one thread, and adopt what they leave behind."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch  # noqa: F401
    import transformers.modeling_utils  # noqa: F401
    import transformers.models.auto  # noqa: F401

    import bertopt.modeling.checkpoint  # noqa: F401
    import bertopt.pipeline  # noqa: F401
    from bertopt.checks import latency
    from bertopt.pipeline.race import Budget
    from campaigns.faults import exports

    exports.cheapen()
    latency.TURN_MS = 1.0
    Budget.of = lambda _: Budget(0.0, 0.0, min_rounds=3)  # type: ignore[method-assign, assignment]
    process_tree.adopt_orphans()


def start(recipe: Path, out: Path, temporary: Path, said: Path) -> Forked:
    """Fork an export of `recipe`; what it says goes to the file `said`."""
    pid = os.fork()
    if pid:
        return Forked(pid)
    code: Any = 1
    try:
        os.setsid()
        _redirect(said)
        os.environ["TMPDIR"], tempfile.tempdir = str(temporary), None
        from bertopt.cli import main
        from bertopt.workers import client

        forking = types.SimpleNamespace(Popen=_server, TimeoutExpired=subprocess.TimeoutExpired, DEVNULL=None)
        setattr(client, "subprocess", forking)  # noqa: B010
        main(["export", str(recipe), "--out", str(out)])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _server(command: list[str], pass_fds: list[int], stdout: Any, env: dict[str, str], **_: Any) -> Forked:
    """Stand for `Popen` of the server: fork it."""
    pid = os.fork()
    if pid:
        return Forked(pid)
    try:
        os.setsid()
        os.dup2(stdout.fileno(), 1)
        os.dup2(stdout.fileno(), 2)
        os.environ.update(env)
        os.closerange(3, pass_fds[0])
        os.closerange(pass_fds[0] + 1, 256)
        _serve(pass_fds[0])
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _serve(fd: int) -> NoReturn:
    from bertopt.workers import server

    server.main(fd)


def _redirect(said: Path) -> None:
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    # Whoever started the campaign may have put other objects there.
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)


def left(seconds: float = 30.0) -> list[int]:
    """Wait until nothing runs that an export started; return what still does when the time is up."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not (found := process_tree.descendants(os.getpid())) or time.monotonic() > deadline:
            return found
        time.sleep(0.02)
