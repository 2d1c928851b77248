"""What every command shares: the app, its options, exit codes, the table."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from bertopt._version import __version__
from bertopt.errors import BertoptError, ResourceError, UsageError
from bertopt.system import atomic_write, limits, out_of_memory, out_of_threads, temporary_directory
from bertopt.system.environment import missing_module, unusable_library

if TYPE_CHECKING:
    from bertopt.report.diff import Diff
    from bertopt.results import Report

#: The order of `bertopt --help`: the main job first. Others follow as they are defined.
_FIRST = ("optimize", "verify", "serve", "bulk", "init", "recipes", "passes", "export", "bench", "compare", "report", "inspect",
          "profile", "debug", "doctor")  # fmt: skip


#: Whether the command that runs goes on, when it is called again, where it was stopped.
_resumes = False


#: How SIGINT, SIGTERM and SIGHUP end a command.
SIGNALLED = (KeyboardInterrupt, SystemExit)


class _Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        names = super().list_commands(ctx)
        return [*(name for name in _FIRST if name in names), *(name for name in names if name not in _FIRST)]


app = typer.Typer(
    cls=_Commands, name="bertopt", no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
    help="Take a BERT-family checkpoint to the fastest artefact that is provably still the same model.",
    context_settings={"help_option_names": ["--help", "-h"]},
)  # fmt: skip

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show tracebacks and the logs of workers.")]
Junit = Annotated[
    Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML, one test case per stage and gate.")
]
Summary = Annotated[Path | None, typer.Option("--summary", metavar="FILE", help="Write a Markdown summary.")]
RecipeName = Annotated[
    Path, typer.Argument(help="A YAML file, or the name of a shipped recipe (`bertopt recipes`).", metavar="RECIPE")
]
Override = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="K=V", help="Override a key: steps.1.dtype=float16. Repeatable."),
]
Quick = Annotated[bool, typer.Option("--quick", help="A first look: time only a few rounds, so wide intervals; parity is checked in full.")]
Key = Annotated[
    Path | None, typer.Option("--key", metavar="FILE.pub", help="A public key: every artefact must be signed with it (`bertopt sign`).")
]
Directory = Annotated[Path, typer.Argument(help="An artefact or stage directory.", metavar="DIR")]


def stopped(how: str) -> str:
    """Return what is said of a command that was `how`: terminated or interrupted."""
    return f"{how}; finished parts are kept: run the same command again to continue" if _resumes else f"{how} before its end"


def say(doing: str | None) -> None:
    """Print what a command does now, which may take minutes."""
    if doing is not None:
        print(doing, file=sys.stderr, flush=True)


def read_shapes(values: Sequence[str]) -> list[tuple[int, int]]:
    """Return `8x128` and the like as batch and tokens. Raises UsageError with every mistake."""
    wrong = [item for item in values if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", item)]
    if wrong:
        raise UsageError(*(f"--shape {item}: expected BATCHxTOKENS, such as 8x128" for item in wrong))
    return [(int(batch), int(sequence)) for batch, sequence in (item.split("x") for item in values)]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"bertopt {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    for stream in (sys.stdout, sys.stderr):
        escaping(stream)


def escaping(stream: Any) -> None:
    """Have `stream` write what its encoding does not know as JSON escapes it: labels, names of files, a multiplication sign."""

    def escaped(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeEncodeError)
        return json.dumps(error.object[error.start : error.end])[1:-1], error.end

    if isinstance(stream, io.TextIOWrapper):
        codecs.register_error("bertopt-escaped", escaped)
        stream.reconfigure(errors="bertopt-escaped")


@contextlib.contextmanager
def exit_codes(verbose: bool, resumes: bool = False) -> Iterator[None]:
    """Turn errors into one clear last line and the right exit code; a traceback only for exit 1 or with -v.

    `resumes`: the command keeps what it finished, and goes on there when it is called again.
    """
    global _resumes  # noqa: PLW0603  (a signal handler gets no more)
    _resumes = resumes
    try:
        yield
    except KeyboardInterrupt:
        print(stopped("interrupted"), file=sys.stderr)
        raise typer.Exit(130) from None
    except (typer.Exit, typer.Abort, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # the tokenizers library panics with something that is no Exception
        known = _typed(error)
        if known is None:
            raise
        if verbose:
            import traceback

            traceback.print_exc()
        if known.log and (verbose or known.exit_code == 1):
            print(known.log, file=sys.stderr)
        print(known, file=sys.stderr)
        raise typer.Exit(known.exit_code) from None


#: The system has too little of something: memory, disk, quota, processes, open files; or its disk fails.
_RESOURCES = {
    errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EIO,
}  # fmt: skip
#: A path that cannot be read or written as it stands.
_PATHS = {
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY,
    errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EXDEV, errno.EBUSY, errno.ETXTBSY,
}  # fmt: skip


def _typed(error: BaseException) -> BertoptError | None:
    """Return `error` as one of bertopt's, or None where it must be a bug of bertopt."""
    if isinstance(error, BertoptError):
        return error
    if isinstance(error, ModuleNotFoundError):
        return missing_module(error)
    if isinstance(error, ImportError | OSError | ValueError) and (unusable := unusable_library(str(error))):
        return unusable
    if isinstance(error, RecursionError):
        return UsageError("a file is nested too deeply; check recipe, texts and checkpoint (-v shows which)")
    if isinstance(error, MemoryError):
        return ResourceError("out of memory; free some, raise the limit (ulimit -v, cgroup), or use smaller inputs")
    if not isinstance(error, OSError):
        if out_of_memory.ended(error):
            words = next((line.strip() for line in str(error).splitlines() if out_of_memory.said(line)), type(error).__name__)
            return ResourceError(f"memory ran out ({words}); free some, raise the limit (ulimit -v, the container's), or use smaller inputs")
        if out_of_threads.said(str(error)):
            return ResourceError(out_of_threads.REMEDY)
        little = limits.little_address_space()
        return ResourceError(f"{type(error).__name__}: {error}; {little}") if little else None
    if nowhere := temporary_directory.no_place(error):
        return nowhere
    nameless = "the current directory: " if error.errno == errno.ENOENT else ""  # os.getcwd, of one that was removed
    where = f"'{error.filename}': " if error.filename else nameless
    if error.errno in _RESOURCES:
        return ResourceError(f"{where}{error.strerror}; free some of it, or run elsewhere")
    if error.errno == errno.EEXIST:  # of mkdir, where anything but a directory lies there
        return UsageError(f"{where}{error.strerror}; expected a directory, got a file; name another place")
    if error.errno in _PATHS:
        return UsageError(f"{where}{error.strerror}; check the path and its permissions, or name another place")
    return None


def check_ci_files(junit: Path | None, summary: Path | None) -> None:
    """Raise UsageError where `ci_files` could not write: before the work, which may take hours."""
    for path in (junit, summary):
        if path is not None:
            atomic_write.check(path)


def ci_files(junit: Path | None, summary: Path | None, report: Report | None, diff: Diff | None = None) -> None:
    """Write the files that `--junit` and `--summary` ask for."""
    if junit is not None:
        from bertopt.report import junit as xml

        xml.write(junit, report, diff)
    if summary is not None:
        from bertopt.report import markdown_summary as text

        text.write(summary, report, diff)


@contextlib.contextmanager
def ci_files_of_errors(junit: Path | None, summary: Path | None, source: object) -> Iterator[None]:
    """Write them also where an error or a signal ends a command on `source` without a report: an earlier run's would tell another story."""
    try:
        yield
    except (Exception, *SIGNALLED) as error:
        verdict_in_ci_files(junit, summary, source, *verdict(error))
        raise


def verdict(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the reason of a command that `error` ends."""
    if isinstance(error, SIGNALLED):
        return (error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 130), "interrupted before its end: nothing was decided"
    known = _typed(error)
    return (known.exit_code if known else 1), str(known or error)


def verdict_in_ci_files(junit: Path | None, summary: Path | None, source: object, exit_code: int, reason: str) -> None:
    """Write the files of what has no more of a report than a verdict."""
    if junit is None and summary is None:
        return
    from bertopt.results import Report
    from bertopt.system import environment

    model = {"source": str(source)}
    report = Report(bertopt_version=__version__, recipe={}, environment=environment.describe(), model=model, exit_code=exit_code, reason=reason)
    ci_files(junit, summary, report)


def table(report: Report) -> None:
    """Print the table of a report."""
    from bertopt.report.terminal import console, render

    console().print(render(report))
