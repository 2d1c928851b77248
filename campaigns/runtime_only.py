"""A fresh environment with the runtime alone: what it takes, and that it serves.

    python -m campaigns.runtime_only ARTIFACT [ARTIFACT ...] [--out FILE]

For each runtime that an artefact needs: installs `bertopt[serve,RUNTIME]` from this checkout into a new environment, asserts
that torch, transformers, optimum and requests are not there, verifies the artefact, serves it, asks for an answer, and writes the
size of the environment. Not run by `make test`: it installs packages.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUNTIMES = {"onnx": "onnxruntime", "openvino": "openvino"}
ABSENT = ("torch", "transformers", "optimum", "requests", "onnx", "nncf", "scipy")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("artifacts", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for artifact in arguments.artifacts:
        form = json.loads((artifact / "manifest.json").read_text())["form"]
        with tempfile.TemporaryDirectory(prefix="bertopt-runtime-") as folder:
            rows.append(one(artifact.resolve(), RUNTIMES[form], Path(folder)))
        print(rows[-1], flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=2) + "\n")


def one(artifact: Path, runtime: str, folder: Path) -> dict[str, object]:
    source, environment = folder / "source", folder / "environment"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "bertopt", source / "bertopt", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    before = size(environment)
    install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-cache-dir", "--no-compile"]
    subprocess.run([*install, "-c", "constraints.txt", f".[serve,{runtime}]"], cwd=source, check=True)
    taken = size(environment) - before
    script = f"import importlib.util as u; print([n for n in {ABSENT!r} if u.find_spec(n)])"
    present = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True, cwd=folder).stdout.strip()
    assert present == "[]", f"{present} came with bertopt[serve,{runtime}]"
    subprocess.run([python, "-m", "bertopt", "verify", artifact], check=True, cwd=folder, capture_output=True)
    return {"runtime": runtime, "installed_mb": round(taken / 1e6), "task": ask(python, artifact, folder)}


def ask(python: Path, artifact: Path, folder: Path) -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    server = subprocess.Popen([python, "-m", "bertopt", "serve", artifact, "--port", str(port)], cwd=folder, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/info", timeout=5) as answer:
                    task = str(json.load(answer)["bertopt"]["task"])
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline, "the server did not start"
                time.sleep(0.1)
        body = json.dumps({"inputs": "a text"}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert json.load(answer)
    finally:
        server.terminate()
    assert server.wait(60) == 0
    return task


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


if __name__ == "__main__":
    main()
