"""Errors become one last line and a documented exit code; tracebacks are for bugs and -v."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from bertopt import __main__ as program
from bertopt import cli
from bertopt.cli.app import exit_codes
from bertopt.cli.export import watched
from bertopt.errors import BertoptError, IntegrityError, UsageError, WorkerCrashed
from bertopt.results import Report
from tests.support.command_line import call
from tests.support.judged import report, row


def fail(error: BaseException, verbose: bool = False) -> int:
    with pytest.raises(typer.Exit) as end, exit_codes(verbose):
        raise error
    return end.value.exit_code


def with_log(error: BertoptError) -> BertoptError:
    error.log = "Traceback: the worker's"
    return error


def test_a_refusal_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert fail(with_log(IntegrityError("the file is damaged"))) == 6
    assert capsys.readouterr().err == "the file is damaged\n"
    assert fail(with_log(IntegrityError("the file is damaged")), verbose=True) == 6
    said = capsys.readouterr().err
    assert "Traceback: the worker's" in said and said.endswith("\nthe file is damaged\n")


def test_a_bug_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert fail(with_log(WorkerCrashed("ValueError: x"))) == 1
    assert capsys.readouterr().err == "Traceback: the worker's\nValueError: x\n"
    with pytest.raises(ZeroDivisionError), exit_codes(False):
        raise ZeroDivisionError
    with pytest.raises(OSError, match="Bad file"), exit_codes(False):
        raise OSError(errno.EBADF, "Bad file descriptor")


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.EACCES, 2), (errno.EROFS, 2), (errno.ENAMETOOLONG, 2), (errno.ENOTDIR, 2), (errno.EISDIR, 2),
     (errno.ENOENT, 2), (errno.EEXIST, 2), (errno.ELOOP, 2), (errno.ENOSPC, 5), (errno.EDQUOT, 5), (errno.EFBIG, 5),
     (errno.EMFILE, 5), (errno.ENOMEM, 5), (errno.EIO, 5)],
    ids=errno.errorcode.get,
)  # fmt: skip
def test_errors_of_the_system(number: int, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert fail(OSError(number, os.strerror(number), "/some/where")) == code
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith(f"'/some/where': {os.strerror(number)}; ")


@pytest.mark.parametrize("error", [ImportError("libtorch_cpu.so: failed to map segment from shared object"), RuntimeError("std::bad_alloc")])
def test_memory_that_ran_out_in_a_library(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    """torch asks for more at once than half of `ulimit -v`: it was a traceback and exit code 1."""
    assert fail(error) == 5
    assert capsys.readouterr().err == f"memory ran out ({error}); free some, raise the limit (ulimit -v, the container's), or use smaller inputs\n"


def test_the_line_that_speaks_of_memory_is_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    """numpy says ten lines of advice around it."""
    assert fail(ImportError("\n\nIMPORTANT: READ THIS\n\nOriginal error was: x.so: failed to map segment\n")) == 5
    assert capsys.readouterr().err.startswith("memory ran out (Original error was: x.so: failed to map segment); ")


def test_the_errors_that_the_system_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "x", tmp_path / ("x" * 300), tmp_path):
        with pytest.raises(typer.Exit) as end, exit_codes(False):
            path.write_text("")
        assert end.value.exit_code == 2
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_a_current_directory_that_was_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(typer.Exit) as end, exit_codes(False):
        Path("x").absolute()
    assert end.value.exit_code == 2 and capsys.readouterr().err.startswith("the current directory: No such file or directory; ")


def test_other_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert fail(MemoryError()) == 5
    assert fail(RecursionError("maximum recursion depth exceeded")) == 2
    assert fail(KeyboardInterrupt()) == 130
    assert fail(UsageError("one", "two")) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "keeps"),
    [(["export", "{}/r.yaml", "--out", "{}"], True), (["optimize", "{}"], True), (["bulk", "{}/a.jsonl", "{}/out", "--artifact", "{}"], True),
     (["verify", "{}"], False), (["compare", "{}", "{}"], False), (["bench", "{}"], False)],
    ids=lambda command: command[0] if isinstance(command, list) else "",
)  # fmt: skip
def test_only_what_is_kept_is_said_to_be(
    command: list[str], keeps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whoever stops `verify` loses what it did."""
    seen: list[str] = []

    def ended(*_: object, **__: object) -> None:
        with pytest.raises(SystemExit):
            cli._terminated(15, None)
        seen.append(capfd.readouterr().err)
        raise KeyboardInterrupt

    for place in ("commands.export.run", "commands.optimize.plan", "commands.bulk.bulk", "commands.verify.verify", "commands.compare.compare", "commands.bench.bench"):
        monkeypatch.setattr(f"bertopt.{place}", ended)
    found = call(*(part.format(tmp_path) for part in command))
    words = "; finished parts are kept: run the same command again to continue\n" if keeps else " before its end\n"
    assert (found.exit_code, found.stderr, seen) == (130, f"interrupted{words}", [f"terminated{words}"])


@pytest.mark.parametrize("module", ["starlette", "uvicorn", "httptools", "prometheus_client", "orjson"])
def test_a_missing_module_of_the_server_names_its_extra(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fail(ModuleNotFoundError(f"No module named '{module}'", name=module)) == 4
    assert "pip install 'bertopt[serve]'" in capsys.readouterr().err


def test_a_library_that_a_module_lacks_is_the_machine_s_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert fail(ImportError("libcudnn.so.9: cannot open shared object file: No such file or directory")) == 4
    assert "cannot be loaded (libcudnn.so.9: cannot open" in capsys.readouterr().err
    with pytest.raises(ImportError):
        fail(ImportError("cannot import name 'nothing' from 'bertopt'"))


def _interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_before_a_command_begins_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One that came while typer read the options, or during the imports, ended in a traceback."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(cli, "app", _interrupted)
    with pytest.raises(SystemExit) as end:
        cli.main([])
    assert end.value.code == 130 and capsys.readouterr().err == "interrupted\n"
    monkeypatch.setattr("builtins.__import__", _interrupted)
    with pytest.raises(SystemExit) as end:
        program.main()
    monkeypatch.undo()
    assert end.value.code == 130


@pytest.mark.parametrize(
    ("ended", "code", "words"),
    [(KeyboardInterrupt(), 130, "interrupted"), (SystemExit(143), 143, "interrupted"), (OSError(errno.ENOSPC, "No space left"), 5, "No space left")],
    ids=["SIGINT", "SIGTERM", "disk"],
)  # fmt: skip
@pytest.mark.parametrize("stages", [True, False], ids=["of a run", "without a report"])
def test_files_for_ci_are_never_those_of_an_earlier_run(ended: BaseException, code: int, words: str, stages: bool, tmp_path: Path) -> None:
    """A job that is cancelled or takes too long gets a signal."""
    xml, text = tmp_path / "j.xml", tmp_path / "s.md"
    xml.write_text("all passed")
    text.write_text("all passed")

    def run(keep: Callable[[Report], None]) -> Report:
        if stages:
            keep(report(row("good")))
        raise ended

    with pytest.raises(type(ended)):
        watched(run, tmp_path, xml, text)
    assert words in xml.read_text() and "<error" in xml.read_text() and ("good" in xml.read_text()) is stages
    assert words in text.read_text() and f"exit code {code}" in text.read_text() and "passed" not in text.read_text().splitlines()[0]
