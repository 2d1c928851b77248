"""Standard output and error whose reader went away, as in `bertopt schema | head -1`."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertopt.errors import ResourceError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

#: What a shell reports of a program that SIGPIPE ended, such as `cat` or `git`: 128 + 13.
READER_GONE = 141


class _Output(io.FileIO):
    """Standard output: where it cannot be written, the program ends.

    Python ignores SIGPIPE, and must: a worker or a client that went away is an error to report. Only here is it the reader
    of the output. typer and rich would end the program too, with exit code 1.
    """

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            _discard(self)
            if isinstance(error, BrokenPipeError):
                raise SystemExit(READER_GONE) from None
            print(f"the output cannot be written: {error.strerror}; free some space, or write elsewhere", file=sys.stderr)
            raise SystemExit(ResourceError.exit_code) from None


class _Messages(io.FileIO):
    """Standard error: where messages have no reader, or no room, a run or a server goes on without, and its exit code stays its own."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            _discard(self)
        except OSError:  # the next message may find room
            pass
        return memoryview(data).nbytes


def _discard(stream: io.FileIO) -> None:
    """Let what is still written to `stream` go nowhere."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def _open_closed() -> None:
    """Open what the caller closed of standard input, output and error; a socket or a file would get its number otherwise."""
    opened = set()
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, so this one
            opened.add(number)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # as Python leaves it for what was closed
            # ctypes keeps a file of libffi open, which may have got this number.
            place = number if number in opened else os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(place, "w" if number else "r", encoding="utf-8", closefd=False))


@contextlib.contextmanager
def quiet_ends() -> Iterator[None]:
    """Wrap standard output and error while a command runs; those of a test or a notebook stay as they are."""
    _open_closed()
    if sys.stdout is sys.__stdout__:
        sys.stdout = _over(sys.stdout, _Output)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _over(sys.stderr, _Messages)
    try:
        yield
    finally:  # here, since the interpreter would report a failing flush at its end, and exit with 120
        for stream in (sys.stdout, sys.stderr):
            stream.flush()


def _over(stream: Any, kind: type[io.FileIO]) -> Any:
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    raw = kind(stream.fileno(), "wb", closefd=False)
    unbuffered = isinstance(stream.buffer, io.RawIOBase)  # python -u
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw), stream.encoding, stream.errors,
        line_buffering=stream.line_buffering, write_through=stream.write_through,
    )  # fmt: skip
