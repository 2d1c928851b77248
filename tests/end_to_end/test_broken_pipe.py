"""Commands whose output nobody reads any more, as in `bertopt schema | head -1`, or finds no room."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: What a shell reports of a program that SIGPIPE ended: 128 + 13.
GONE = 141


def call(*arguments: str, stream: str = "stdout", python: tuple[str, ...] = ()) -> tuple[int, str]:
    """Run a command whose `stream` is a pipe without a reader; return its exit code and what the other stream got."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    other = "stderr" if stream == "stdout" else "stdout"
    try:
        done = subprocess.run(
            [sys.executable, *python, "-m", "bertopt", *arguments], cwd=ROOT, text=True, timeout=60, check=False,
            stdin=subprocess.DEVNULL, env=environment, **{stream: writer, other: subprocess.PIPE},
        )  # fmt: skip
    finally:
        os.close(writer)
    return done.returncode, getattr(done, other)


@pytest.mark.parametrize(
    "arguments",
    [("schema",), ("recipes",), ("passes",), ("passes", "--json"), ("--help",), ("export", "--help"), ("--version",),
     ("report", str(ROOT / "benchmarks/results/quickstart.json"))],
    ids=" ".join,
)  # fmt: skip
def test_a_reader_that_went_away_ends_a_command_quietly(arguments: tuple[str, ...]) -> None:
    assert call(*arguments) == (GONE, "")


def test_also_without_buffers() -> None:
    assert call("schema", python=("-u",)) == (GONE, "")


def test_messages_that_nobody_reads_change_no_exit_code() -> None:
    code, output = call("recipes", stream="stderr")
    assert code == 0 and output.startswith("cpu_exact")
    assert call("export", "none.yaml", stream="stderr") == (2, "")


def test_what_was_read_is_whole() -> None:
    command = f"'{sys.executable}' -m bertopt schema | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("{\n", "") and done.returncode in (0, GONE)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("python", [(), ("-u",)], ids=["buffered", "unbuffered"])
def test_a_full_disk_is_one_line(python: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, *python, "-m", "bertopt", "recipes"], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
            check=False,
        )  # fmt: skip
    assert done.returncode == 5 and done.stderr.splitlines() == [
        "the output cannot be written: No space left on device; free some space, or write elsewhere"
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(("arguments", "code"), [(("export", "none.yaml"), 2), (("recipes",), 0)], ids=["2", "0"])
def test_messages_without_room_change_no_exit_code(arguments: tuple[str, ...], code: int) -> None:
    """A run whose messages went to a file on a disk that filled up ended with exit code 1, as for a bug."""
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "bertopt", *arguments], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=full, timeout=60, check=False
        )  # fmt: skip
        both = subprocess.run([sys.executable, "-m", "bertopt", "recipes"], cwd=ROOT, stdout=full, stderr=full, timeout=60, check=False)
    assert (done.returncode, both.returncode) == (code, 5)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_what_was_closed_is_a_stream(closed: str) -> None:
    """`bulk` asked whether standard error is a terminal: a traceback that nobody saw, after the first part."""
    code = (
        "import sys\nfrom bertopt.cli.pipes import quiet_ends\n"
        "with quiet_ends():\n    print('said', file=sys.stderr)\n    print('said', sys.stdin.isatty(), sys.stdout.isatty(), sys.stderr.isatty())\n"
    )
    done = subprocess.run(["bash", "-c", f"exec '{sys.executable}' -c \"$0\" {closed}", code], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("closed", ["<&- 2>&-", ">&- 2>&-", "<&- >&-", "<&- >&- 2>&-"])
def test_a_socket_never_gets_the_number_of_a_closed_stream(closed: str) -> None:
    """The server of the workers was given its socket under a number that was also its standard output, and crashed."""
    code = (
        "import socket\nfrom bertopt.cli.pipes import quiet_ends\n"
        "with quiet_ends():\n    print('said')\n    raise SystemExit(min(one.fileno() for one in socket.socketpair()) <= 2)\n"
    )
    done = subprocess.run(["bash", "-c", f"exec '{sys.executable}' -c \"$0\" {closed}", code], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 0
