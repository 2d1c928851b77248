"""A fresh environment with the runtime alone: what it takes, and that it serves.

    python -m campaigns.runtime_only ARTIFACT [ARTIFACT ...] [--out benchmarks/results/runtime_only.json]

For each runtime that an artefact needs: runs the README's two lines for serving, `pip install 'bertopt[serve,RUNTIME]'` from this
checkout into a new environment and `bertopt serve ARTIFACT`; asserts that torch, transformers, optimum and requests are not
there; verifies the artefact, and asks for an answer. Writes the size of the environment without compiled bytecode, and of five
starts each, the second and later ones, so that files are in memory: the seconds of `bertopt.load`, from the start of a Python that
loads to its first answer, and from the start of the server to its first answer. Not run by `make test`: it installs packages.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from bertopt.system import environment

ROOT = Path(__file__).parents[1]
RUNTIMES = {"onnx": "onnxruntime", "openvino": "openvino"}
STARTS = 5
ONE = """
import sys, time
import bertopt
start = time.perf_counter()
predict = bertopt.load(sys.argv[1])
loaded = time.perf_counter() - start
predict(["a text"])
print(loaded)
"""
ABSENT = ("torch", "transformers", "optimum", "requests", "onnx", "nncf", "scipy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
        arguments.out.write_text(json.dumps({"environment": environment.describe(), "runtimes": rows}, indent=2) + "\n")


def one(artifact: Path, runtime: str, folder: Path) -> dict[str, object]:
    source, made = folder / "source", folder / "environment"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "bertopt", source / "bertopt", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-m", "venv", made], check=True)
    python = made / "bin" / "python"
    before = size(made)
    install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-cache-dir", "--no-compile"]
    subprocess.run([*install, "-c", "constraints.txt", f".[serve,{runtime}]"], cwd=source, check=True)
    taken = size(made) - before
    script = f"import importlib.util as u; print([n for n in {ABSENT!r} if u.find_spec(n)])"
    present = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True, cwd=folder).stdout.strip()
    assert present == "[]", f"{present} came with bertopt[serve,{runtime}]"
    bertopt = made / "bin" / "bertopt"
    subprocess.run([bertopt, "verify", artifact], check=True, cwd=folder, stdout=subprocess.DEVNULL)
    loads, firsts, served = [], [], []
    for _ in range(STARTS + 1):
        start = time.perf_counter()
        loads.append(float(subprocess.run([python, "-c", ONE, artifact], capture_output=True, text=True, check=True, cwd=folder).stdout))
        firsts.append(time.perf_counter() - start)
        task, seconds = ask(bertopt, artifact, folder)
        served.append(seconds)
    return {"runtime": runtime, "task": task, "model_mb": round(size(artifact) / 1e6), "installed_mb": round(taken / 1e6),
            "load_s": statistics.median(loads[1:]), "first_answer_s": statistics.median(firsts[1:]), "served_answer_s": statistics.median(served[1:])}  # fmt: skip


def ask(bertopt: Path, artifact: Path, folder: Path) -> tuple[str, float]:
    """Serve the artefact; return its task, and the seconds from the server's start to its first answer."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    start = time.perf_counter()
    server = subprocess.Popen([bertopt, "serve", artifact, "--port", str(port)], cwd=folder, stderr=subprocess.DEVNULL)
    try:
        body = json.dumps({"inputs": "a text"}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/", body, {"Content-Type": "application/json"})
        while True:
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    assert json.load(answer)
                break
            except OSError:
                assert server.poll() is None and time.perf_counter() - start < 120, "the server did not start"
                time.sleep(0.01)
        seconds = time.perf_counter() - start
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/info", timeout=5) as answer:
            task = str(json.load(answer)["bertopt"]["task"])
    finally:
        server.terminate()
    assert server.wait(60) == 0
    return task, seconds


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


if __name__ == "__main__":
    main()
