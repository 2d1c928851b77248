"""The image of a server: built by buildah from `deploy/docker/Dockerfile.serve`, run by podman with a read-only root, asked, stopped.

    python -m campaigns.container ARTIFACT [--runtime runc] [--build-option=--volume=/pip/index:/pip/index:ro …] [--out FILE]

ARTIFACT is one for ONNX Runtime or OpenVINO. Needs buildah, podman and the base image, which a machine
without a registry makes from a Debian of the same Python:

    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm root
    ln -s /usr/bin/python3 root/usr/local/bin/python
    container=$(buildah from scratch) && buildah add $container root / && buildah commit $container docker.io/library/python:3.11-slim

Asserts that the answers are the artefact's, that the user is not root, that nothing but /tmp can be written, that neither torch nor pip
is there, that the health check of the image passes, and that SIGTERM ends it with exit code 0. Exits 1 where one does not hold.
Not looked at: Docker itself, other architectures, limits on memory and CPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from bertopt.system import environment

ROOT = Path(__file__).parents[1]
IMAGE, URL = "bertopt-serve-campaign", "http://127.0.0.1:8080"
RUNTIMES = {"onnx": "onnxruntime", "openvino": "openvino"}
#: In the container, and what each prints.
ASKED = {
    "id -u": "10001",
    "touch /bertopt-campaign 2>/dev/null || echo refused": "refused",
    "touch /artifact/bertopt-campaign 2>/dev/null || echo refused": "refused",
    "touch /tmp/bertopt-campaign && echo written": "written",
    "python -c \"import importlib.util as u; print([n for n in ('torch', 'transformers', 'pip') if u.find_spec(n)])\"": "[]",
    "python -c \"import urllib.request as u; print(u.urlopen('http://127.0.0.1:8080/health', timeout=2).status)\"": "200",
}
#: A machine may forbid to raise these, which podman does by default.
LIMITS = ("--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--runtime", default="runc", help="of podman (default: runc)")
    parser.add_argument("--build-option", action="append", default=[], help="of `buildah bud`, such as a volume with pip's index; repeatable")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    runtime = RUNTIMES[json.loads((arguments.artifact / "manifest.json").read_text())["form"]]
    build_s = build(arguments.artifact, runtime, arguments.build_option)
    size = int(said("podman", "image", "inspect", "--format={{.Size}}", IMAGE))
    start = time.perf_counter()
    container = said("podman", "--runtime", arguments.runtime, "run", "--detach", "--read-only", "--tmpfs=/tmp", "--network=host", *LIMITS, IMAGE)
    try:
        wait_until_ready(container)
        ready_s = time.perf_counter() - start
        wrong = [f"{command}: expected {expected}; got {got}" for command, expected in ASKED.items()
                 if (got := said("podman", "exec", container, "sh", "-c", command)) != expected]  # fmt: skip
        verified = subprocess.run([sys.executable, "-m", "bertopt", "verify", arguments.artifact, "--url", URL], check=False).returncode
        start = time.perf_counter()
        subprocess.run(["podman", "--runtime", arguments.runtime, "stop", "--time=30", container], check=True, stdout=subprocess.DEVNULL)
        stop_s, exit_code = time.perf_counter() - start, int(said("podman", "inspect", "--format={{.State.ExitCode}}", container))
    finally:
        subprocess.run(["podman", "--runtime", arguments.runtime, "rm", "--force", container], check=True, stdout=subprocess.DEVNULL)
    result = {
        "environment": environment.describe(), "runtime": runtime, "image_mb": round(size / 1e6), "build_s": round(build_s, 1),
        "ready_s": round(ready_s, 1), "stop_s": round(stop_s, 1), "exit_code": exit_code, "verify_exit_code": verified, "wrong": wrong,
        "holds": not wrong and exit_code == 0 and verified == 0,
    }  # fmt: skip
    print(json.dumps({name: value for name, value in result.items() if name != "environment"}))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["holds"] else 1


def build(artifact: Path, runtime: str, options: list[str]) -> float:
    """Build the image from the committed files and the artefact; return the seconds that took."""
    with tempfile.TemporaryDirectory(prefix="bertopt-image-") as folder:
        context = Path(folder) / "context"
        subprocess.run(["git", "clone", "--quiet", ROOT, context], check=True)
        shutil.copytree(artifact, context / "artifact")
        start = time.perf_counter()
        subprocess.run(
            ["buildah", "bud", "--format=docker", "--quiet", "--pull-never", *options, "--file=deploy/docker/Dockerfile.serve",
             f"--build-arg=RUNTIME={runtime}", "--build-arg=ARTIFACT=artifact", f"--tag={IMAGE}", "."],
            cwd=context, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        return time.perf_counter() - start


def wait_until_ready(container: str) -> None:
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"{URL}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.1)
    logs = subprocess.run(["podman", "logs", container], capture_output=True, text=True, check=False)
    raise RuntimeError(f"the container must be ready within a minute; it said: {(logs.stdout + logs.stderr)[-2000:]}")


def said(*command: str) -> str:
    """Return what a command prints. Raises RuntimeError with its complaint where it fails."""
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit {ended.returncode}: {ended.stderr.strip()}")
    return ended.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
