"""What is kept of a worker's log."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bertopt.workers import diagnosis

_CRASH = """
import ctypes, faulthandler
faulthandler.enable()
def deep(calls):
    return deep(calls - 1) if calls else ctypes.string_at(0)
deep(60)
"""


def test_the_call_that_crashed_is_kept_however_deep_it_was(tmp_path: Path) -> None:
    """faulthandler writes the innermost call first: of a compiler's hundred calls the last lines are those that started it."""
    log = tmp_path / "0.log"
    with log.open("w") as file:
        file.write("a warning\n" * 40 + "what a library says of it\n")
        file.flush()
        subprocess.run([sys.executable, "-c", _CRASH], stdout=file, stderr=file, check=False)
    kept = diagnosis.tail(log)
    assert "what a library says of it\nFatal Python error: Segmentation fault" in kept and "string_at" in kept
    assert len(kept.splitlines()) == diagnosis.LOG_TAIL


def test_otherwise_the_last_lines_are_kept(tmp_path: Path) -> None:
    (tmp_path / "0.log").write_text("\n".join(map(str, range(50))))
    assert diagnosis.tail(tmp_path / "0.log").splitlines() == [str(number) for number in range(20, 50)]
    assert diagnosis.tail(tmp_path / "none.log") == ""
