"""Virtual environments for peers, and what they run, made once and kept under one folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent


class BuildError(Exception):
    """An environment or a peer's model could not be made; `reason` names no path, for a result file."""

    def __init__(self, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.reason = reason or text


def environment(name: str, folder: Path) -> Path:
    """The python of the environment of `name`.txt, built where it is absent or was made from other pins.

    Everything is pinned and installed without its dependencies: some ask for packages that no text model needs. torch
    comes first and by itself, so that the CPU build that the installer is set up for is taken. What has no wheel is built
    from source, its build's own tools unpinned.
    """
    pins = HERE / f"{name}.txt"
    home, digest = folder / name, hashlib.sha256(pins.read_bytes()).hexdigest()
    python, mark = home / "bin" / "python", home / "made-from"
    if mark.is_file() and mark.read_text("utf-8") == digest and python.exists():
        return python
    shutil.rmtree(home, ignore_errors=True)
    home.parent.mkdir(parents=True, exist_ok=True)
    run([sys.executable, "-m", "venv", home], home.with_suffix(".log"))
    pip: list[str | Path] = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-compile",
    ]
    torch = next(line for line in pins.read_text("utf-8").splitlines() if line.startswith("torch=="))
    run([*pip, torch], home / "pip.log")
    run([*pip, "-r", pins], home / "pip.log")
    mark.write_text(digest, "utf-8")
    return python


def built(what: str, python: Path, source: Path, out: Path, texts: Path, samples: int) -> Path:
    """`out` with what `build.py` makes of `source`; kept unless the environment or `build.py` changed."""
    mark = out / "made-from"
    key = f"{(python.parent.parent / 'made-from').read_text('utf-8')} {_digest(HERE / 'build.py')} {samples} {source.name}"
    if mark.is_file() and mark.read_text("utf-8") == key:
        return out
    part = out.with_suffix(".part")
    for old in (part, out):
        shutil.rmtree(old, ignore_errors=True)
    part.mkdir(parents=True)
    command: list[str | Path] = [python, HERE / "build.py", what, source, part, texts, str(samples)]
    run(command, out.with_suffix(".log"), {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""})
    (part / "made-from").write_text(key, "utf-8")
    part.rename(out)
    return out


def run(command: Sequence[str | Path], log: Path, variables: dict[str, str] | None = None) -> None:
    """Run to the end, output to `log`. Raises BuildError with its last lines."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        done = subprocess.run(
            command,
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(variables or {})},
            check=False,
        )
    if done.returncode:
        last = log.read_text("utf-8", "replace").splitlines()[-3:]
        raise BuildError(f"'{' '.join(map(str, command))}' exited {done.returncode}; see {log}: {' | '.join(last)}", last[-1] if last else "")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
