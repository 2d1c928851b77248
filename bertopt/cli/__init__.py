"""The command line: parses, calls, prints. Results on stdout, progress on stderr."""

from __future__ import annotations

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
from bertopt.cli.app import app

__all__ = ["app", "bench", "bulk", "compare", "debug", "deploy", "doctor", "export", "info", "init", "main", "optimize", "profile", "push",
           "report", "serve", "sign", "verify"]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `bertopt`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    app(args=list(arguments) if arguments is not None else None, prog_name="bertopt")
