"""The command line: parses, calls, prints. Results on stdout, progress on stderr."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence

from bertopt.cli import (
    bench,
    bulk,
    compare,
    debug,
    deploy,
    doctor,
    export,
    info,
    init,
    optimize,
    profile,
    push,
    report,
    serve,
    sign,
    verify,
)
from bertopt.cli.app import app, stopped
from bertopt.cli.pipes import quiet_ends

__all__ = ["app", "bench", "bulk", "compare", "debug", "deploy", "doctor", "export", "info", "init", "main", "optimize", "profile", "push",
           "report", "serve", "sign", "verify"]  # fmt: skip


def _terminated(number: int, _: object) -> None:
    # Not `print`: the signal may have come while something was printed.
    with contextlib.suppress(OSError):  # nobody reads it
        os.write(2, f"{stopped('terminated')}\n".encode())
    sys.exit(128 + number)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `bertopt`."""
    signal.signal(signal.SIGTERM, _terminated)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # a terminal that closes; `nohup` has it ignored
        signal.signal(signal.SIGHUP, _terminated)
    with quiet_ends():
        try:
            app(args=list(arguments) if arguments is not None else None, prog_name="bertopt")
        except KeyboardInterrupt:  # while typer reads the command line; `exit_codes` has those of a command
            print("interrupted", file=sys.stderr)
            sys.exit(130)
