"""Read files from untrusted sources: errors that libraries raise become errors about the file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from bertopt.errors import BertoptError, IntegrityError, ResourceError, UsageError
from bertopt.system import disk_full, limits, out_of_memory, out_of_threads, temporary_directory

_SHOWN = 300


@contextlib.contextmanager
def reading(what: str, remedy: str) -> Iterator[None]:
    """Turn whatever is raised while `what` is read into an IntegrityError that ends in `remedy`.

    Errors raised on purpose, interruptions and a lack of disk or memory stay what they are: memory becomes ResourceError.
    """
    try:
        yield
    except (BertoptError, KeyboardInterrupt, SystemExit, GeneratorExit, NameError, ImportError):
        # A name or a module that is missing is never the file's doing.
        raise
    except BaseException as error:  # the tokenizers library panics with something that is no Exception
        first = plain(first_line(error))
        kind = type(error).__name__
        if isinstance(error, MemoryError) or out_of_memory.said(first):
            raise ResourceError(f"memory ran out while {what} was read ({first}); use a machine with more, or {remedy}") from error
        if disk_full.is_full(error):
            raise
        if nowhere := temporary_directory.no_place(error):
            raise nowhere from error
        if out_of_threads.said(str(error)):
            raise ResourceError(out_of_threads.REMEDY) from error
        if isinstance(error, UnicodeEncodeError):
            raise UsageError(f"{what} lies at a path that is not UTF-8, which libraries cannot open; rename it") from error
        if little := limits.little_address_space():
            raise ResourceError(f"{what} could not be read ({kind}: {first}); {little}") from error
        raise IntegrityError(f"{what} cannot be read ({kind}: {first}); {remedy}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, `no message` where it has none."""
    return next(iter(str(error).strip().splitlines()), "no message")


def is_utf16(line: bytes) -> bool:
    """Return whether a line of a file is most likely in UTF-16: of ASCII every other byte is NUL, and without a mark at its begin it is UTF-8 too."""
    return 3 * line.count(0) > len(line)


def printable(text: str) -> str:
    """Return text with control characters escaped, line breaks included."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def plain(text: str) -> str:
    """Return text of an untrusted file in one short line with control characters escaped."""
    clean = printable(text)
    return clean if len(clean) <= _SHOWN else f"{clean[: _SHOWN - 1]}…"
