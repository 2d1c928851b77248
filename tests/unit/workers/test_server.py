"""What the process that workers are forked from has imported: each of them would import the rest anew."""

from __future__ import annotations

import subprocess
import sys

from bertopt.system import environment

NEEDED = ("bertopt.passes", "bertopt.runtime.predictor", "bertopt.modeling.checkpoint", "torch", "transformers.modeling_utils", "transformers.models.auto")


def test_what_nearly_every_worker_needs_is_imported_before_they_are_forked() -> None:
    code = f"import sys; from bertopt.workers import server; server._preload(); print(*[name for name in {NEEDED!r} if name not in sys.modules])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": environment.python_path()})
    assert done.stdout.split() == []
