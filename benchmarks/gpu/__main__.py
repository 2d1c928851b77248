"""What a GPU does with BERT: peaks, every variant, texts end to end, ONNX Runtime, TensorRT, and the shipped recipes run to
their ends. No network; random weights, but in the recipes.

    python -m benchmarks.gpu --part smoke|torch|mix|onnxruntime|tensorrt|recipes [--out DIR]   each under 9 minutes; call again to go on
    python -m benchmarks.gpu                                                          all parts
    python -m benchmarks.gpu --minutes 8 --together                                   what is most wanted first, until then
    python -m benchmarks.gpu --table                                                  the table of what is in DIR
    python -m benchmarks.gpu --device cpu --quick                                     all of it small, to see that it works

Runs with what is installed: what is missing is named in its row. Every case runs in a process that ends with it, so that
an error of the device costs one case; --together saves their starts, and memory held by the process is then of all
cases so far. DIR/<part>.json is written after every row; finished cases are not run again, others go on where they ended.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu import graph_runtimes, mix, recipes, smoke, table, torch_part
from benchmarks.gpu import setting as shared
from benchmarks.gpu.setting import Missing, Setting
from bertopt.system import atomic_write

ROOT = Path(__file__).parents[2]
#: Seconds of one part in one call, the last case's end included.
PART_S = 520.0
#: Seconds that must be left to begin a case.
CASE_S = 20.0
_ROW = "row "


class Part(NamedTuple):
    cases: Callable[[bool], list[str]]
    run: Callable[[str, Setting], Iterator[dict[str, Any]]]


PARTS = {
    "smoke": Part(smoke.cases, smoke.run), "torch": Part(torch_part.cases, torch_part.run), "mix": Part(mix.cases, mix.run),
    "onnxruntime": Part(graph_runtimes.onnx_cases, graph_runtimes.run_onnx),
    "tensorrt": Part(graph_runtimes.engine_cases, graph_runtimes.run_engine), "recipes": Part(recipes.cases, recipes.run),
}  # fmt: skip
#: What is wanted most of a GPU that is there for minutes, as parts and patterns of cases; then all the others.
ORDER: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("smoke", ("pytest",)),
    ("recipes", ("gpu_fastest",)),
    ("smoke", ("aa",)),
    ("torch", ("bert-base/bf16", "bert-base/compile", "bert-base/package", "bert-base/unpadded_graphs_compile", "bert-base/unpadded_graphs_fp8_compile")),
    ("smoke", ("small_kernels", "package")),
    ("mix", ("bert-base/bf16", "bert-base/unpadded_graphs*", "minilm-l6/unpadded_graphs_compile", "*/sentence_transformers_bf16")),
    ("onnxruntime", ("bert-base/fp16_*",)),
    ("recipes", ("ort_cuda_fp16",)),
    ("torch", ("bert-base/unpadded_graphs_compile_pdl",)),
    *((part, ("*",)) for part in PARTS),
)  # fmt: skip


def run_in_order(setting: Setting, seconds: float, together: bool = False) -> None:
    """Run every part's cases in `ORDER` until the time is up; a part's file names those that are left."""
    end = time.monotonic() + seconds
    for name, patterns in ORDER:
        run_part(name, setting, end - time.monotonic(), together, patterns)


def run_part(
    name: str, setting: Setting, seconds: float, together: bool = False, patterns: Sequence[str] = ("*",)
) -> dict[str, Any]:
    """Run the cases of a part that are not finished, each in a process, or `together` in one until it crashes; return
    what is in its file."""
    path = setting.out / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    if found.get("setting") != [setting.device, setting.quick]:
        found = {"part": name, "setting": [setting.device, setting.quick], "environment": environment(), "cases": {}}
    if found["environment"].get("packages") != (here := packages()):
        # What was missing may be there by now.
        found["environment"]["packages"] = here
        for entry in found["cases"].values():
            if entry["rows"].pop("missing", None) is not None:
                entry["finished"] = False

    def waiting() -> list[str]:
        known = PARTS[name].cases(setting.quick)
        chosen = [case for case in known if any(fnmatchcase(case, pattern) for pattern in patterns)]
        return [case for case in chosen if not found["cases"].get(case, {}).get("finished")]

    end = time.monotonic() + seconds
    while (left := waiting()) and end - time.monotonic() >= CASE_S:
        _run_group(name, left if together else left[:1], found, setting, path, end)
    found["unfinished"] = left
    _write(path, found)
    print(f"{name}: {f'{len(left)} cases are left: call again' if left else 'complete'}", file=sys.stderr)
    return found


def _run_group(name: str, group: list[str], found: dict[str, Any], setting: Setting, path: Path, end: float) -> None:
    done = {case: sorted(found["cases"].get(case, {}).get("rows", {})) for case in group}
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, "--device", setting.device, "--worker", json.dumps(done)]
    command += ["--out", str(setting.out.resolve())]
    command += ["--quick"] if setting.quick else []
    print(f"{name}: {', '.join(group)}", file=sys.stderr, flush=True)
    with (setting.out / f"{name}.log").open("a", encoding="utf-8") as log:
        # Tiny shapes gain nothing from threads, and waiting ones spin; processes that compile each import torch anew.
        few = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        variables = {**os.environ, **(few if setting.quick else {})}
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
        timer = threading.Timer(max(0.1, end - time.monotonic()), _kill, [process.pid])
        timer.start()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if not line.startswith(_ROW):
                    continue
                row = json.loads(line.removeprefix(_ROW))
                case = found["cases"].setdefault(row.pop("case"), {"rows": {}, "finished": False})
                if row.pop("finished", False):
                    case |= {"finished": True, **row}
                else:
                    case["rows"][row.pop("key")] = row
                _write(path, found)
            code = process.wait()
        finally:
            timer.cancel()
            _kill(process.pid)
    left = [case for case in group if not found["cases"].get(case, {}).get("finished")]
    if left and time.monotonic() < end:
        # The first that did not finish is the one that ran. It would end so again, and its rows so far count.
        entry = found["cases"].setdefault(left[0], {"rows": {}, "finished": False})
        entry["rows"]["crash"] = {"failure": f"the process ended with {code}; see {name}.log"}
        entry["finished"] = True


def _kill(session: int) -> None:
    """End a case's process and what it started, such as compilers that keep its output open."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)


def work(name: str, done: dict[str, list[str]], device: str, quick: bool, out: Path) -> None:
    """Run cases in this process and print every row as it comes."""

    def say(case: str, row: dict[str, Any]) -> None:
        print(_ROW + json.dumps({"case": case, **row}), flush=True)

    for case, keys in done.items():
        setting = Setting(device, quick, out, frozenset(keys))
        start = time.monotonic()
        try:
            for row in PARTS[name].run(case, setting):
                say(case, row)
        except Missing as error:
            say(case, {"key": "missing", "missing": str(error)})
        except ImportError as error:
            say(case, {"key": "missing", "missing": f"not installed: {error.name or error}"})
        except Exception as error:
            traceback.print_exc()
            say(case, {"key": "failure", "failure": f"{type(error).__name__}: {str(error)[:400]}"})
        say(case, {"finished": True, "seconds": round(time.monotonic() - start, 1)})
        shared.forget(device)


def packages() -> dict[str, str]:
    """Versions of what the parts run."""
    from importlib import metadata

    names = ("torch", "transformers", "onnx", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx", "sentence-transformers")
    found = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


@functools.cache
def environment() -> dict[str, Any]:
    """Versions and the GPU, as far as they can be asked."""
    found: dict[str, Any] = {"python": sys.version.split()[0], "packages": packages()}
    code = (
        "import json, torch; c = torch.cuda.is_available(); p = torch.cuda.get_device_properties(0) if c else None\n"
        "print(json.dumps({'cuda': torch.version.cuda, 'gpu': p and p.name, 'sms': p and p.multi_processor_count,"
        " 'memory_bytes': p and p.total_memory}))"
    )
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return found | (json.loads(asked.stdout) if asked.returncode == 0 else {"torch": asked.stderr.strip().splitlines()[-1:]})


def _write(path: Path, found: dict[str, Any]) -> None:
    atomic_write.write(path, json.dumps(found, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=tuple(PARTS), action="append")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: to see that it works")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu")
    parser.add_argument("--seconds", type=float, default=PART_S, help="of each part")
    parser.add_argument("--minutes", type=float, help="of all parts together, what is most wanted first; instead of --part and --case")
    parser.add_argument("--case", action="append", metavar="PATTERN", help="only such cases, as in 'bert-base/*'; repeatable")
    parser.add_argument("--together", action="store_true", help="the cases of a part in one process, which starts faster")
    parser.add_argument("--table", action="store_true", help="print the table of what was measured")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker is not None:
        work(asked.part[0], asked.worker, asked.device, asked.quick, asked.out)
        return 0
    if asked.minutes is not None and (asked.part or asked.case):
        parser.error("--minutes chooses parts and cases by itself; leave --part and --case out")
    asked.out.mkdir(parents=True, exist_ok=True)
    setting = Setting(asked.device, asked.quick, asked.out)
    # Quick cases are small: what a process takes to start would be most of their time.
    together = asked.together or asked.quick
    if asked.minutes is not None:
        run_in_order(setting, 60 * asked.minutes, together)
    elif not asked.table:
        for name in asked.part or PARTS:
            run_part(name, setting, asked.seconds, together, asked.case or ("*",))
    parts = {name: json.loads((asked.out / f"{name}.json").read_text("utf-8")) for name in PARTS if (asked.out / f"{name}.json").is_file()}
    text = table.markdown(parts)
    (asked.out / "gpu.md").write_text(text, "utf-8")
    print(text)
    failures = table.failures(parts)
    for line in failures:
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
