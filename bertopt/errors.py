"""The errors a user can meet, each with its exit code. Messages say what was expected, what was got, what to do."""

from __future__ import annotations

import re
from typing import ClassVar

#: How the loader of shared libraries, and C++, say that there is no memory.
_NO_MEMORY = re.compile("failed to map segment|bad_alloc")


class BertoptError(Exception):
    """Base of all errors raised on purpose. `exit_code` is the process's when the error ends a run."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str = "", log: str = "") -> None:
        super().__init__(message)
        #: Last lines that a worker wrote, where the error is about one.
        self.log = log


class UsageError(BertoptError):
    """A recipe or a command line that cannot be run. `problems` holds every mistake found, one a line."""

    exit_code: ClassVar[int] = 2

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Unsupported(BertoptError):
    """This machine or this model cannot do it: a row in the report, never a traceback."""

    exit_code: ClassVar[int] = 4


class ResourceError(BertoptError):
    """Out of memory or disk."""

    exit_code: ClassVar[int] = 5


def missing_library(needs: str, install: str, instead: str = "", failed: ImportError | None = None) -> Unsupported | ResourceError:
    """Return the error of an optional library that cannot be imported: what `needs` it, what pip installs, and what to do without it.

    `failed` is the import's error: one of a library that is there, such as a shared library that the loader does not find, is quoted.
    """
    if failed is not None and not (isinstance(failed, ModuleNotFoundError) and "." not in (failed.name or "")):
        said = next(iter(str(failed).splitlines()), "no message")
        if _NO_MEMORY.search(said):
            return ResourceError(f"{needs}, and memory ran out while it was loaded ({said}); free some, or raise the limit (ulimit -v, the container's)")
        return Unsupported(f"{needs}; its import fails ({said}): install it again, or run bertopt doctor, which may say how")
    return Unsupported(f"{needs}; pip install {install}{f', or {instead}' if instead else ''}")


class IntegrityError(BertoptError):
    """A file that is not what it claims to be, or that bertopt refuses to load."""

    exit_code: ClassVar[int] = 6


class WrongAnswer(BertoptError):
    """Outputs that cannot be right whatever the limits are, such as those with other names or shapes than the model's spec says."""

    exit_code: ClassVar[int] = 3


class PassFailed(BertoptError):
    """A pass that is not part of bertopt raised an error, which is the cause, or returned something that a pass must not return."""

    exit_code: ClassVar[int] = 3


class StepTimeout(BertoptError):
    """A step took longer than its `timeout`."""

    exit_code: ClassVar[int] = 7


class WorkerCrashed(BertoptError):
    """A worker process died, or raised an unexpected error. `log` holds its last lines."""


class WorkerRaised(WorkerCrashed):
    """A worker process raised an unexpected error, whose traceback is in `log`."""


class CheckpointWarning(UserWarning):
    """An artefact behaves differently from what a file of the checkpoint says. A run's report lists these warnings."""


_WORKERS_RAISE: tuple[type[BertoptError], ...] = (
    UsageError, Unsupported, ResourceError, IntegrityError, WrongAnswer, PassFailed, StepTimeout, WorkerCrashed, WorkerRaised, BertoptError,
)  # fmt: skip

BY_NAME = {error.__name__: error for error in _WORKERS_RAISE}
