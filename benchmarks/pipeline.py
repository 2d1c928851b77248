"""What bertopt itself costs: starting, each stage beyond its pass, memory; and how that grows with layers and steps.

    python -m benchmarks.pipeline [--layers 2,6,12] [--steps 1,2,4] [--starts 5] [--out FILE]
    python -m benchmarks.pipeline --recipe bertopt/recipes/quickstart.yaml [--quick] [--out FILE]

Tiny random models, so that nearly all of the time is bertopt's own and its libraries' start. Each run is
`python -m bertopt.export` on a fresh directory, once with everything and once with --build-only. About 10 minutes on two cores.
With --recipe that recipe is run alone, from an empty directory, and its time is given by stage and phase.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from bertopt.pipeline import run
from bertopt.recipe.parser import load
from bertopt.results import Report
from bertopt.system import environment

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "pipeline.json"
#: Steps of a recipe, taken from the front.
STEPS = ("use_sdpa", "export_onnx", "fuse_ort", "quantize_int8")
STARTS = {
    "import bertopt": ["-c", "import bertopt"], "bertopt --version": ["-m", "bertopt.cli", "--version"],
    "bertopt --help": ["-m", "bertopt.cli", "--help"], "bertopt passes": ["-m", "bertopt.cli", "passes"],
}  # fmt: skip
#: A gate that a random model fails is no failure of the measurement.
EXITS = (0, 3)


class Failed(Exception):
    """bertopt did not end as it should; the message has its last lines."""


def timed(arguments: Sequence[str | Path], exits: Sequence[int] = (0,)) -> tuple[float, int, int]:
    """Seconds, peak resident bytes of the process itself, not of what it starts, and exit code. Raises Failed."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile() as log:
        start = time.perf_counter()
        process = subprocess.Popen([sys.executable, *arguments], env=variables, stdout=log, stderr=log)
        peak = 0
        while process.poll() is None:
            peak = max(peak, resident_peak(process.pid))
            time.sleep(0.005)
        seconds = time.perf_counter() - start
        log.seek(0)
        if process.returncode not in exits:
            last = log.read().decode("utf-8", "replace").splitlines()[-5:]
            raise Failed(f"'{' '.join(map(str, arguments))}' exited {process.returncode}: {' | '.join(last)}")
    return seconds, peak, process.returncode


def resident_peak(pid: int) -> int:
    """Bytes, 0 for a process that has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text("utf-8")
    except OSError:
        return 0
    lines = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return 1024 * int(lines[0].split()[1]) if lines else 0


def checkpoint(out: Path, layers: int) -> Path:
    """A BERT classifier of `layers` layers and hidden size 32."""
    import transformers

    from tests.support.tiny_models import write_tiny

    write_tiny(out)
    config = transformers.AutoConfig.from_pretrained(out)
    config.num_hidden_layers = layers
    transformers.BertForSequenceClassification(config).eval().save_pretrained(out)
    return out


def recipe(path: Path, model: Path, steps: int) -> Path:
    lines = [f"schema_version: 1\nmodel: {model}\ndevice: cpu\ninputs: {{shapes: [[1, 16]]}}\nsteps:"]
    path.write_text("\n".join([*lines, *(f"  - pass: {name}" for name in STEPS[:steps])]) + "\n", "utf-8")
    return path


def exported(folder: Path, layers: int, steps: int) -> dict[str, Any]:
    """One case: with checks and without. `own_s` is each stage's share of the time that no pass was building in."""
    model = folder / f"model-{layers}"
    if not model.is_dir():
        checkpoint(model, layers)
    row: dict[str, Any] = {"layers": layers, "steps": steps}
    for kind, flags in (("full", []), ("build_only", ["--build-only"])):
        out = folder / f"{layers}-{steps}-{kind}"
        written = recipe(folder / f"{layers}-{steps}.yaml", model, steps)
        seconds, peak, code = timed(["-m", "bertopt.export", written, "--out", out, *flags], EXITS)
        stages = json.loads((out / "report.json").read_text("utf-8"))["stages"]
        building = sum(stage["build_s"] or 0.0 for stage in stages)
        row[kind] = {
            "wall_s": round(seconds, 3), "build_s": round(building, 3), "own_s": round((seconds - building) / len(stages), 3),
            "stages": len(stages), "parent_peak_mib": round(peak / 2**20, 1), "exit_code": code,
            "statuses": [stage["status"] for stage in stages],
        }  # fmt: skip
    return row


def cpu_seconds() -> float:
    """CPU seconds so far of this process and of all that it started, those that have ended included."""
    me = psutil.Process()
    total = float(sum(me.cpu_times()[:2]))
    for process in me.children(recursive=True):
        # A process counts its children when it has waited for them.
        with contextlib.suppress(psutil.Error):
            total += sum(process.cpu_times()[:4])
    return total


class PhaseClock:
    """Listens to a run and adds up the seconds of each (stage, phase), such as ("bf16", "latency").

    CPU seconds of all processes too: they depend less on what else the machine does.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.cpu_seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._phase, self._since, self._cpu_s = ("run", "starting"), time.perf_counter(), cpu_seconds()

    def __call__(self, report: Report, doing: str | None, left_s: float | None = None) -> None:
        now, cpu_s = time.perf_counter(), cpu_seconds()
        self.seconds[self._phase] += now - self._since
        # What a killed process used since may be lost.
        self.cpu_seconds[self._phase] += max(0.0, cpu_s - self._cpu_s)
        self._since, self._cpu_s = now, cpu_s
        stage, _, phase = (doing or "recording").rpartition(": ")
        # "bf16: 300 labelled texts" is the task metric, "reference: loading NAME" is loading.
        self._phase = (stage or "run", "quality" if phase.endswith("labelled texts") else phase.split()[0])


def by_phase(path: Path, quick: bool) -> dict[str, Any]:
    """Run a recipe in an empty directory: seconds of the whole run, and of each stage's phases."""
    clock = PhaseClock()
    with tempfile.TemporaryDirectory(prefix="bertopt-phases-") as folder:
        report = run(load(path, ["timing.quick=true"] if quick else []), Path(folder), on_report=clock)
    rows = [
        {"stage": stage, "phase": phase, "seconds": round(s, 2), "cpu_s": round(clock.cpu_seconds[stage, phase], 2)}
        for (stage, phase), s in clock.seconds.items()
    ]
    return {"recipe": path.name, "quick": quick, "wall_s": round(report.wall_s, 2), "exit_code": report.exit_code, "phases": rows}


def phase_table(found: Mapping[str, Any]) -> str:
    """A row for each stage and a column for each phase, in seconds, and with CPU seconds the last row."""
    stages = list(dict.fromkeys(row["stage"] for row in found["phases"]))
    phases = list(dict.fromkeys(row["phase"] for row in found["phases"]))
    seconds = {(row["stage"], row["phase"]): row["seconds"] for row in found["phases"]}
    lines = [f"| stage | {' | '.join(phases)} | all |", "|:--|" + " --: |" * (len(phases) + 1)]
    for stage in stages:
        cells = [seconds.get((stage, phase)) for phase in phases]
        shown = " | ".join("" if cell is None else f"{cell:.1f}" for cell in cells)
        lines.append(f"| {stage} | {shown} | {sum(cell or 0 for cell in cells):.1f} |")
    totals = [sum(seconds.get((stage, phase), 0) for stage in stages) for phase in phases]
    lines.append(f"| all | {' | '.join(f'{total:.1f}' for total in totals)} | {found['wall_s']:.1f} |")
    used = [sum(row["cpu_s"] for row in found["phases"] if row["phase"] == phase) for phase in phases]
    lines.append(f"| CPU seconds | {' | '.join(f'{total:.1f}' for total in used)} | {sum(used):.1f} |")
    return "\n".join(lines) + "\n"


def table(document: Mapping[str, Any]) -> str:
    lines = ["| start | median, s | peak, MiB |", "| :-- | --: | --: |"]
    lines += [f"| `{s['command']}` | {s['median_s']:.2f} | {s['peak_mib']:.0f} |" for s in document["starts"]]
    lines += [
        "", "| layers | steps | whole run, s | of it passes, s | own share a stage, s | built only, own share, s | parent, MiB |",
        "| --: | --: | --: | --: | --: | --: | --: |",
    ]  # fmt: skip
    for row in document["runs"]:
        full, built = row["full"], row["build_only"]
        lines.append(
            f"| {row['layers']} | {row['steps']} | {full['wall_s']:.1f} | {full['build_s']:.1f} | {full['own_s']:.1f} | "
            f"{built['own_s']:.1f} | {full['parent_peak_mib']:.0f} |"
        )
    where = document["environment"]
    return "\n".join([*lines, "", f"{where['cores']} cores of {where['cpu']}; the reference counts as a stage."]) + "\n"


def numbers(word: str) -> list[int]:
    return [int(part) for part in word.split(",")]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=numbers, default=[2, 6, 12])
    parser.add_argument("--steps", type=numbers, default=[1, 2, 4])
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--recipe", type=Path, help="give the time of this recipe's run by stage and phase instead")
    parser.add_argument("--quick", action="store_true", help="with --recipe: time few rounds")
    options = parser.parse_args(words)
    if options.recipe:
        timed_run = {"environment": environment.describe(), **by_phase(options.recipe, options.quick)}
        out = options.out if options.out != RESULT else RESULT.with_name(f"phases_{options.recipe.stem}.json")
        out.write_text(json.dumps(timed_run, indent=1) + "\n", "utf-8")
        print(phase_table(timed_run) + f"{out}")
        return 0
    if not all(1 <= steps <= len(STEPS) for steps in options.steps) or options.starts < 1 or min(options.layers) < 1:
        parser.error(f"--steps must be 1 to {len(STEPS)}, --layers and --starts positive")
    console = Console(stderr=True)
    document: dict[str, Any] = {"environment": environment.describe(), "steps": STEPS, "starts": [], "runs": []}
    try:
        for name, arguments in STARTS.items():
            console.print(name, highlight=False)
            found = [timed(arguments) for _ in range(options.starts)]
            document["starts"].append(
                {"command": name, "median_s": statistics.median(seconds for seconds, _, _ in found),
                 "seconds": [round(seconds, 4) for seconds, _, _ in found],
                 "peak_mib": max(peak for _, peak, _ in found) / 2**20}
            )  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="bertopt-pipeline-") as folder:
            for layers in options.layers:
                for steps in options.steps:
                    console.print(f"{layers} layers, {steps} steps", highlight=False)
                    document["runs"].append(exported(Path(folder), layers, steps))
    except Failed as error:
        console.print(f"pipeline: {error}", highlight=False, markup=False, soft_wrap=True)
        return 1
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    options.out.with_suffix(".md").write_text(table(document), "utf-8")
    print(table(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
