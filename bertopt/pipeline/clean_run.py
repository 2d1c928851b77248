"""Run an artefact in a new interpreter: another hash seed, thread count and working directory, no worker's variables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bertopt.core import Device
from bertopt.errors import BY_NAME, StepTimeout, WorkerCrashed
from bertopt.passes import registry
from bertopt.runtime.replay import Answers

#: Other than the one that workers run with.
HASH_SEED = "4242"
TIMEOUT_S = 600.0


def answers(directory: Path, device: Device) -> Answers:
    """Return what the artefact in `directory` answers there. Raises what it raises there."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BERTOPT_")}
    environment |= {"PYTHONHASHSEED": HASH_SEED, "PYTHONPATH": os.pathsep.join(str(Path(path).resolve()) for path in sys.path)}
    single = environment.get("OMP_NUM_THREADS") == "1" or os.cpu_count() == 1
    with tempfile.TemporaryDirectory(prefix="bertopt-clean-") as folder:
        out = Path(folder) / "answers.json"
        request = {
            "directory": str(directory.resolve()), "device": device, "threads": 2 if single else 1,
            "passes": registry.importable_passes(), "out": str(out),
        }  # fmt: skip
        try:
            ended = subprocess.run(
                [sys.executable, "-m", "bertopt.runtime.replay_process"], input=json.dumps(request), text=True, env=environment,
                cwd=folder, capture_output=True, timeout=TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise StepTimeout(f"the delivered artefact did not answer within {TIMEOUT_S:g} s in a new interpreter") from error
        if ended.returncode or not out.is_file():
            raise WorkerCrashed(f"the delivered artefact ended a new interpreter with {ended.returncode}", ended.stderr)
        found = json.loads(out.read_text("utf-8"))
    if "error" in found:
        kind, text = found["error"]
        raise BY_NAME.get(kind, WorkerCrashed)(f"the delivered artefact cannot be opened in a new interpreter: {text}")
    recorded: Answers = found["answers"]
    return recorded
