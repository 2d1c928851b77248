"""The GPU benchmark without a GPU: wheels in parts, cases that go on, the table, what is missing."""

from __future__ import annotations

import fnmatch
import json
import struct
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import (
    graph_runtimes,
    mix,
    models,
    package_stages,
    recipes,
    setting,
    smoke,
    table,
    torch_part,
    wheels,
)
from benchmarks.gpu.setting import Missing, Setting
from bertopt.commands.recipes import find
from bertopt.core import Context
from bertopt.passes import registry
from bertopt.recipe import parser

# Wheels


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    dice = np.random.default_rng(0)
    (tmp_path / "wheels").mkdir()
    for name, size in (("a-1-py3-none-any.whl", 2500), ("b-2-py3-none-any.whl", 1000), ("c-3-py3-none-any.whl", 0)):
        (tmp_path / "wheels" / name).write_bytes(dice.bytes(size))
    assert wheels.split(tmp_path / "wheels", tmp_path / "parts", 1000) == 4
    return tmp_path / "parts"


def test_wheels_are_the_same_after_split_and_join(parts: Path, tmp_path: Path) -> None:
    assert max(path.stat().st_size for path in parts.glob("*.bin")) == 1000
    assert wheels.join(parts, tmp_path / "joined") == []
    for wheel in (tmp_path / "wheels").iterdir():
        assert (tmp_path / "joined" / wheel.name).read_bytes() == wheel.read_bytes()


@pytest.mark.parametrize("harm", ["flip", "cut", "swap", "missing", "index", "escape"])
def test_damaged_parts_are_refused(parts: Path, tmp_path: Path, harm: str) -> None:
    first, second = parts / "part-0000.bin", parts / "part-0001.bin"
    index = json.loads((parts / wheels.INDEX).read_text())
    if harm == "flip":
        first.write_bytes(bytes([first.read_bytes()[0] ^ 1]) + first.read_bytes()[1:])
    elif harm == "cut":
        first.write_bytes(first.read_bytes()[:-1])
    elif harm == "swap":
        held = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(held)
    elif harm == "missing":
        first.unlink()
    elif harm == "index":
        index["a-1-py3-none-any.whl"]["parts"].pop()
    else:
        index["../evil.whl"] = index.pop("a-1-py3-none-any.whl")
    (parts / wheels.INDEX).write_text(json.dumps(index))
    with pytest.raises(wheels.Damaged):
        wheels.join(parts, tmp_path / "joined")
    assert not (tmp_path / "joined" / "a-1-py3-none-any.whl").exists() and not (tmp_path / "evil.whl").exists()


def test_parts_that_are_still_to_come_are_named(parts: Path, tmp_path: Path) -> None:
    (parts / "part-0000.bin").unlink()
    assert wheels.join(parts, tmp_path / "joined", partial=True) == ["a-1-py3-none-any.whl"]
    assert (tmp_path / "joined" / "b-2-py3-none-any.whl").is_file()


def _entry(kind: int, capability: int, code: bytes) -> bytes:
    return struct.pack("<HHIQIIHHI32x", kind, 0, 64, len(code), 0, 0, 0, 0, capability) + code


def test_machine_code_for_other_gpus_is_emptied(tmp_path: Path) -> None:
    """Everything stays where it is; what is no library, PTX, and code for the GPU stay as they are."""
    code = [bytes([number]) * 128 for number in range(1, 5)]
    entries = [_entry(2, 80, code[0]), _entry(2, 90, code[1]), _entry(1, 80, code[2]), _entry(2, 120, code[3])]
    bundles = [struct.pack("<IHHQ", 0xBA55ED50, 1, 16, sum(map(len, part))) + b"".join(part) for part in (entries[:2], entries[2:])]
    library = b"\x7fELF before" + bundles[0] + b"\0" * 8 + bundles[1] + b"behind"
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("a/a.so", library)
        wheel.writestr("a/data.bin", library)
    assert wheels.thin(tmp_path / "a.whl", 90) == 256
    with zipfile.ZipFile(tmp_path / "a.whl") as wheel:
        assert wheel.read("a/a.so") == library.replace(code[0], bytes(128)).replace(code[3], bytes(128))
        assert wheel.read("a/data.bin") == library
    assert [path.name for path in tmp_path.iterdir()] == ["a.whl"]


# Cases


def test_every_pass_and_option_of_a_variant_is_the_library_s_or_a_known_gap() -> None:
    """A misspelt option would read as a missing pass on the one day that there is a GPU."""
    for steps in (*torch_part.VARIANTS.values(), *graph_runtimes.ONNX.values(), *graph_runtimes.ENGINES.values()):
        before: list[Any] = []
        for name, options in steps:
            kind = registry.get(name)
            if kind is None or not set(options) <= set(kind.model_fields):
                assert name in ("capture_graphs", "quantize_fp8", "package_aot", "pack_sequences"), name
                break
            before.append(kind.model_validate(options))
            assert before[-1].conflict(before[:-1]) is None and before[-1].device_conflict("cuda", before[:-1]) is None
    for profiles in (graph_runtimes.PROFILES, graph_runtimes._QUICK_PROFILES):
        registry.require("build_tensorrt").model_validate({"profiles": profiles})
    assert set(mix.WANTED) <= set(torch_part.VARIANTS)


def test_every_shape_fits_a_profile() -> None:
    for quick, profiles in ((False, graph_runtimes.PROFILES), (True, graph_runtimes._QUICK_PROFILES)):
        build = registry.require("build_tensorrt").model_validate({"profiles": profiles})
        assert build.shape_conflict(torch_part.shapes(quick)) is None
    assert len(torch_part.shapes(False)) == 16 and torch_part.shapes(False)[0] == (128, 128)


def test_lengths_are_committed_and_texts_have_them(tmp_path: Path) -> None:
    known = models.lengths(3000)
    assert known[:1024] == known[1024:2048] and min(known) >= 3 and max(known) <= models.POSITIONS
    models.write_tokenizer(tmp_path)
    from tokenizers import Tokenizer

    fast = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [len(one.ids) for one in fast.encode_batch(models.texts(50))] == known[:50]


def test_operations_of_bert_base() -> None:
    """2 × 85 M weights a token, and the attention's own products."""
    assert models.flops("bert-base", 1, 128) == pytest.approx(128 * (2 * 84.9e6 + 12 * 4 * 128 * 768), rel=1e-3)


def test_a_pass_that_is_not_there_is_missing_by_name(tmp_path: Path) -> None:
    here = Setting("cpu", True, tmp_path)
    for steps, words in [
        ([("no_such_pass", {})], "pass 'no_such_pass' is not registered"),
        ([("use_sdpa", {"bakend": "x"})], "pass 'use_sdpa' does not take"),
        ([("cast_half", {}), ("cast_half", {})], "half precision already"),
        ([("use_sdpa", {"backend": "cudnn"})], "use_sdpa: "),
    ]:
        with pytest.raises(Missing, match=words):
            models.apply(models.eager("tiny", tmp_path), steps, here, tmp_path)
    with pytest.raises(Missing, match="not installed: no_such_module"):
        setting.need("json", "no_such_module")
    assert Context is not None


@pytest.mark.parametrize("together", [False, True])
def test_a_part_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: bool) -> None:
    """A case that is cut off is begun again with the rows that it has; a finished one and a crash are not. In one process, too,
    a crash is that of the case that ran, and the others go on."""
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, os, sys\n"
        "for case, done in json.loads(sys.argv[-1]).items():\n"
        "    say = lambda **row: print('row ' + json.dumps({'case': case, **row}), flush=True)\n"
        "    if case == 'crash': say(key='first', p50_ms=1.0); os._exit(3)\n"
        "    say(key=f'after {len(done)}')\n"
        f"    if case == 'slow' and not done: open({str(tmp_path / 'late')!r}, 'w').close(); os.kill(os.getpid(), 9)\n"
        "    say(finished=True, seconds=1.5)\n"
    )
    original = gpu.subprocess.Popen
    monkeypatch.setattr(
        gpu.subprocess, "Popen", lambda command, **how: original([sys.executable, str(script), command[command.index("--worker") + 1]], **how)
    )
    monkeypatch.setattr(gpu, "environment", dict)
    monkeypatch.setattr(gpu, "packages", dict)
    monkeypatch.setattr(gpu, "CASE_S", 0.0)
    monkeypatch.setitem(gpu.PARTS, "smoke", gpu.Part(lambda quick: ["crash", "good", "slow"], smoke.run))
    # The time is up when the slow case says so, whatever else this machine does.
    monkeypatch.setattr(gpu, "time", types.SimpleNamespace(monotonic=lambda: 1e9 if (tmp_path / "late").exists() else 0.0))
    here = Setting("cuda", False, tmp_path)
    first = gpu.run_part("smoke", here, 600.0, together)
    assert first["unfinished"] == ["slow"] and first["cases"]["slow"]["rows"] == {"after 0": {}}
    assert "ended with 3" in first["cases"]["crash"]["rows"]["crash"]["failure"]
    (tmp_path / "late").unlink()
    second = gpu.run_part("smoke", here, 600.0, together)
    assert second["unfinished"] == [] and list(second["cases"]["slow"]["rows"]) == ["after 0", "after 1"]
    assert list(second["cases"]["good"]["rows"]) == ["after 0"] and second["cases"]["good"]["seconds"] == 1.5
    # What was missing is tried again where other packages are installed.
    missing = {"rows": {"missing": {"missing": "no"}}, "finished": True}
    monkeypatch.setitem(gpu.PARTS, "smoke", gpu.Part(lambda quick: ["crash", "good", "slow", "no"], smoke.run))
    (tmp_path / "smoke.json").write_text(json.dumps({**second, "cases": {**second["cases"], "no": missing}}))
    assert gpu.run_part("smoke", here, -1.0, together)["unfinished"] == []
    monkeypatch.setattr(gpu, "packages", lambda: {"onnxruntime-gpu": "1.30.0"})
    third = gpu.run_part("smoke", here, -1.0, together)
    assert third["unfinished"] == ["no"] and third["environment"]["packages"] == {"onnxruntime-gpu": "1.30.0"}
    second = gpu.run_part("smoke", here, 600.0, together)
    # Other cases are left as they are.
    assert gpu.run_part("smoke", here, 600.0, together, ["no/*"])["cases"] == second["cases"]
    # Another device or size is another measurement.
    assert list(gpu.run_part("smoke", Setting("cpu", False, tmp_path), -1.0)["cases"]) == []


def test_minutes_run_what_is_wanted_most_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And end when they are over: a part that was not reached says that all of it is left."""
    clock = types.SimpleNamespace(now=0.0)
    ran: list[tuple[str, str]] = []

    def case_of_100_s(name: str, group: list[str], found: dict[str, Any], *_: Any) -> None:
        ran.append((name, group[0]))
        clock.now += 100.0
        found["cases"][group[0]] = {"rows": {}, "finished": True}

    monkeypatch.setattr(gpu, "_run_group", case_of_100_s)
    monkeypatch.setattr(gpu, "environment", dict)
    monkeypatch.setattr(gpu, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
    gpu.run_in_order(Setting("cuda", False, tmp_path), 390.0)
    assert ran == [("smoke", "pytest"), ("recipes", "gpu_fastest"), ("smoke", "aa"), ("torch", "bert-base/bf16")]
    left = {name: json.loads((tmp_path / f"{name}.json").read_text())["unfinished"] for name in gpu.PARTS}
    assert left["smoke"] == ["peaks", "copies", "small_kernels", "masked_rows", "graphs", "package"] and "ort_cuda_fp16" in left["recipes"] and all(left.values())


def test_every_pattern_of_the_order_names_cases() -> None:
    for name, patterns in gpu.ORDER:
        cases = gpu.PARTS[name].cases(False)
        assert all(fnmatch.filter(cases, pattern) for pattern in patterns), (name, patterns)


def test_tests_are_rows_as_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are known are not run again."""
    (tmp_path / "test_x.py").write_text(
        "import pytest\n"
        "@pytest.mark.gpu\n@pytest.mark.parametrize('n', [1, 2, 3])\ndef test_it(n): assert n != 2, 'two'\n"
        "@pytest.mark.gpu\n@pytest.mark.skip\ndef test_no(): pass\n"
    )
    original = smoke.subprocess.Popen

    def started(command: list[str], **how: Any) -> Any:
        options = command[: command.index("-p", command.index("-p") + 1) + 2]
        return original([*options, *(word for word in command if word.startswith("--deselect")), "test_x.py"], **{**how, "cwd": tmp_path})

    monkeypatch.setattr(smoke.subprocess, "Popen", started)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    rows = {row["key"]: row for row in smoke.run("pytest", Setting("cuda", False, tmp_path, frozenset({"test_x.py::test_it[1]"})))}
    assert {key: row.get("outcome") for key, row in rows.items()} == {
        "test_x.py::test_it[2]": "failed", "test_x.py::test_it[3]": "passed", "test_x.py::test_no": "skipped", "pytest": None,
    }  # fmt: skip
    assert "two" in rows["test_x.py::test_it[2]"]["failure"] and rows["pytest"] == {"key": "pytest", "exit_code": 1}
    part = {"setting": ["cuda", False], "environment": {"packages": {}, "python": "3"}, "cases": {"pytest": {"rows": rows}}}
    assert "- pytest -m gpu: 1 failed, 1 passed, 1 skipped, exit code 1" in table.markdown({"smoke": part})
    assert len(table.failures({"smoke": part})) == 1


def test_the_table_names_figures_gaps_and_failures() -> None:
    about = {"environment": {"gpu": "H100", "cuda": "13.0", "packages": {"torch": "2.11"}, "python": "3.12"}, "setting": ["cuda", False], "unfinished": []}
    timed = {"p50_ms": 2.0, "tflops": 400.0, "peak_kind": "bfloat16", "torch_peak_bytes": 1 << 30, "process_bytes": 3 << 30}
    parts: Any = {
        "smoke": {**about, "cases": {"peaks": {"rows": {"x": {"kind": "bfloat16", "tflops": 800.0}}}, "aa": {"rows": {"0": {"verdict": "FASTER", "false_verdict": True}}}}},
        "torch": {**about, "unfinished": ["bert-large/fp8"], "cases": {
            "bert-base/bf16": {"rows": {"128x128": timed, "parity": {"rel_l2": 0.004, "cosine_min": 0.99998}, "largest": {"largest_batch": 2048}}},
            "bert-base/fp8": {"rows": {"missing": {"missing": "pass 'quantize_fp8' is not registered"}}},
            "bert-base/compile": {"rows": {"failure": {"failure": "RuntimeError: no"}}}}},
        "mix": {**about, "cases": {"bert-base/bf16": {"rows": {"offline": {"texts_per_s": 12345.6}}}}},
    }  # fmt: skip
    text = table.markdown(parts)
    for words in ("H100, CUDA 13.0", "| bfloat16 | 800 |", "| 2 (50%) |", "3.00 GiB | 2048 | 0.004 | 0.999980 |", "12,346",
                  "torch/bert-base/fp8: pass 'quantize_fp8' is not registered", "Unfinished: torch (1 cases)", "1 of 1 gave"):  # fmt: skip
        assert words in text, (words, text)
    assert table.failures(parts) == ["torch/bert-base/compile: RuntimeError: no"]


def test_wrong_answers_are_a_failure_and_memory_that_ended_is_named() -> None:
    """A case that answers nonsense fast, or ended at a shape, would read as measured."""
    about = {"environment": {"packages": {}, "python": "3.12"}, "setting": ["cuda", False]}
    rows = {"parity": {"rel_l2": 0.4, "cosine_min": 0.91}, "128x128": {"missing": "out of memory"}, "1x128": {"missing": "out of memory"}}
    void = {"parity": {"rel_l2": float("inf"), "cosine_min": -1.0}}
    right = {"parity": {"rel_l2": 0.2, "cosine_min": 0.98}}
    parts: Any = {"onnxruntime": {**about, "cases": {"a": {"rows": rows}, "b": {"rows": void}, "c": {"rows": right}}}}
    assert table.failures(parts) == [
        "onnxruntime/a: wrong answers: rel_l2 0.4, least cosine 0.91 to float32", "onnxruntime/b: wrong answers: rel_l2 inf, least cosine -1 to float32",
    ]  # fmt: skip
    assert "onnxruntime/a: out of memory at 1x128, 128x128" in table.markdown(parts)


def test_shares_are_of_the_peak_of_what_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 graph runs without TF32: of the float16 peak it can reach a twelfth. The int8 peak is not measured."""
    monkeypatch.setattr(models, "open_model", lambda model, device: types.SimpleNamespace(
        run=lambda probe: {"sentence_embedding": np.ones((4, 2))}, facts=lambda: types.SimpleNamespace(model_dump=lambda **_: {}),
        load=lambda inputs: None, step=lambda: None,
    ))  # fmt: skip
    for kind, peak in {"fp32": "float32", "fp16_fused": "float16", "fp16_opset23": "float16", "fp16": "float16", "int8": "int8"}.items():
        rows = graph_runtimes._measured("tiny", kind, None, np.ones((4, 2)), Setting("cpu", True, Path()))
        assert {row["peak_kind"] for row in rows if "tflops" in row} == {peak}


_WITHOUT = """
import pathlib, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"pydantic", "optimum", "onnx", "onnxscript", "onnxruntime", "psutil", "scipy", "yaml", "sentence_transformers"}:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
sys.meta_path.insert(0, Blocker())
from benchmarks.gpu import __main__ as gpu
for part, case in (("torch", "tiny/bf16"), ("torch", "tiny/sentence_transformers_bf16"), ("mix", "tiny/bf16"), ("smoke", "masked_rows"),
                   ("smoke", "graphs"), ("smoke", "aa"), ("onnxruntime", "tiny/fp32"), ("tensorrt", "tiny/tensorrt/fp16"), ("recipes", "ort_cuda_fp16")):
    gpu.work(part, {case: []}, "cpu", True, pathlib.Path())
"""


def test_what_is_not_installed_is_named_and_nothing_fails() -> None:
    """A GPU machine may have torch and little else."""
    done = subprocess.run([sys.executable, "-c", _WITHOUT], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    rows = [json.loads(line.removeprefix("row ")) for line in done.stdout.splitlines() if line.startswith("row ")]
    assert done.returncode == 0 and sum("finished" in row for row in rows) == 9, done.stderr
    assert not [row for row in rows if "failure" in row]
    said = {row["case"]: row["missing"] for row in rows if row.get("key") == "missing"}
    assert "pydantic" in said["tiny/bf16"] and "onnxruntime" in said["tiny/fp32"] and "optimum" in said["aa"]


def test_peaks_and_copies_need_torch_alone(tmp_path: Path) -> None:
    here = Setting("cpu", True, tmp_path, frozenset({"bfloat16-256x256x256"}))
    rows = list(smoke.run("peaks", here))
    assert [row["kind"] for row in rows] == ["float32", "tf32", "float16", "float8", "float8_fast"]
    assert all("tflops" in row or "missing" in row for row in rows)
    assert {row["key"] for row in smoke.run("copies", here)} == {"device", "pageable"}


def test_what_short_texts_hang_on_is_measured(tmp_path: Path) -> None:
    rows = {row["key"]: row for row in smoke.run("small_kernels", Setting("cpu", True, tmp_path))}
    assert [*rows] == [f"bag of {tokens}" for tokens in smoke.BAGS]
    part = {"setting": ["cpu", True], "environment": {"packages": {}, "python": "3"}, "cases": {"small_kernels": {"rows": rows}}}
    assert "- bag of 8192: " in table.markdown({"smoke": part})


def test_a_package_that_crashes_says_where_and_the_others_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if "unpadded" not in command:
            return subprocess.CompletedProcess(command, 0, 'stage build\nstage end\n{"rel_l2": 0.01, "cosine_min": 0.999}\n', "a warning")
        crash = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n  File runner.py, line 1 in boxed_run\n"
        return subprocess.CompletedProcess(command, -11, "stage build\nstage export\nstage load\n", f"a warning\n{crash}")

    monkeypatch.setattr(package_stages.subprocess, "run", ended)
    monkeypatch.setattr(package_stages, "on", lambda device: None)
    rows = {row["key"]: row for row in smoke.run("package", Setting("cuda", False, tmp_path))}
    assert [*rows] == [*package_stages.VARIANTS] and rows["sdpa"] == {"key": "sdpa", "exit_code": 0, "stage": "end", "rel_l2": 0.01, "cosine_min": 0.999}
    assert rows["unpadded"]["failure"].startswith("ended with -11 in stage 'load': Fatal Python error: Segmentation fault")
    assert "boxed_run" in rows["unpadded"]["failure"] and "a warning" not in rows["unpadded"]["failure"]
    part = {"setting": ["cuda", False], "environment": {"packages": {}, "python": "3"}, "cases": {"package": {"rows": rows}}}
    assert "- package, unpadded: exit code -11, in stage 'load'" in table.markdown({"smoke": part})
    assert len(table.failures({"smoke": part})) == 1
    rows.pop("unpadded")
    monkeypatch.setattr(package_stages, "VARIANTS", {name: [] for name in package_stages.VARIANTS if name != "unpadded"})
    assert [row["key"] for row in smoke.run("package", Setting("cuda", False, tmp_path))] == ["sdpa"]


def test_settings_of_inductor_hold_for_their_variant_alone() -> None:
    from torch._inductor import config

    assert {*torch_part.SETTINGS} < {*torch_part.VARIANTS}
    for variant, settings in torch_part.SETTINGS.items():
        with torch_part.inductor(variant):
            assert all(config.shallow_copy_dict()[name] == value for name, value in settings.items())
        assert not any(config.shallow_copy_dict()[name] == value for name, value in settings.items())


# Recipes


REPORT: dict[str, Any] = {
    "delivered": {"stage": "cast_onnx_half", "path": "artifact"}, "reason": None, "wall_s": 24.0,
    "stages": [
        {"name": "reference", "status": "ok", "reason": None, "build_s": None, "peak_gpu_bytes": None, "latency": None},
        {"name": "cast_onnx_half", "status": "ok", "reason": None, "build_s": 1.0, "peak_gpu_bytes": 7, "facts": {"log": "Fatal Python error"},
         "latency": [{"kind": "shape"}, {"kind": "mix", "texts_per_s": 4082.4, "vs_reference": None}]},
    ],
}  # fmt: skip


class _Export:
    """A run of `export` that has reported one stage when it is first looked at, and then ends."""

    def __init__(self, out: Path, code: int, looks: int = 1) -> None:
        self.path, self.code, self.looks = out / "report.json", code, looks

    def poll(self) -> int | None:
        self.looks -= 1
        report = REPORT
        if self.looks >= 0:
            report = REPORT | {"delivered": None, "reason": "this run has not ended", "stages": REPORT["stages"][:1]}
        elif self.code:
            report = REPORT | {"delivered": None, "reason": "build_tensorrt failed: no"}
        self.path.write_text(json.dumps(report))
        return None if self.looks >= 0 else self.code


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The commands that a case runs. Each ends with 0, but `export` of `trt_fp16` ends with 3."""
    seen: list[tuple[str, ...]] = []

    def start(log: Any, *words: str) -> _Export:
        seen.append(words)
        return _Export(Path(words[words.index("--out") + 1]), 3 if "trt_fp16" in words else 0)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        seen.append(words)
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(recipes, "_start", start)
    monkeypatch.setattr(recipes, "_python", run)
    monkeypatch.setattr(recipes, "LOOK_S", 0.0)
    monkeypatch.setattr(setting, "need", lambda *modules: None)
    monkeypatch.setattr(setting, "found", lambda module: True)
    monkeypatch.setattr(recipes.environment, "version", lambda package: "1.30.0")
    return seen


def test_a_recipe_is_exported_verified_and_opened_on_the_device(commands: list[tuple[str, ...]], tmp_path: Path) -> None:
    ran = list(recipes.run("ort_cuda_fp16", Setting("cuda", False, tmp_path)))
    # What a run that is cut off has done is known, too.
    assert (ran[0]["key"], ran[0]["exit_code"], [stage["name"] for stage in ran[0]["stages"]]) == ("export", None, ["reference"])
    rows = {row["key"]: row for row in ran}
    assert [rows[key]["exit_code"] for key in ("export", "verify", "open")] == [0, 0, 0]
    artifact = str(tmp_path / "recipes" / "ort_cuda_fp16" / "artifact")
    assert "device=cuda" in commands[0] and commands[1][-2:] == ("verify", artifact) and commands[2][-2:] == (artifact, "cuda")
    part = {"setting": ["cuda", False], "environment": {"packages": {}, "python": "3"}, "cases": {"ort_cuda_fp16": {"rows": rows}}}
    text = table.markdown({"recipes": part})
    assert "export 0, verify 0, open 0" in text and "  - cast_onnx_half: ok, 4,082 texts/s, delivered" in text
    cut_off = {**part, "cases": {"ort_cuda_fp16": {"rows": {"export": ran[0]}}}}
    assert "export –, verify –, open –" in table.markdown({"recipes": cut_off}) and not table.failures({"recipes": cut_off})


def test_a_recipe_that_fails_fails_the_benchmark(commands: list[tuple[str, ...]], tmp_path: Path) -> None:
    _, row = recipes.run("trt_fp16", Setting("cuda", False, tmp_path))
    assert [stage.get("log") for stage in row["stages"]] == [None, "Fatal Python error"]
    assert row["failure"] == "exit code 3: build_tensorrt failed: no" and len(commands) == 1


def test_the_recipe_of_onnxruntime_waits_for_its_gpu_build(commands: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes.environment, "version", lambda package: None)
    with pytest.raises(Missing, match="onnxruntime-gpu"):
        list(recipes.run("ort_cuda_fp16", Setting("cuda", False, tmp_path)))
    assert commands == []


def test_random_weights_stand_in_for_a_checkpoint_that_is_not_installed(
    commands: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setting, "found", lambda module: module != recipes.CHECKPOINT)
    monkeypatch.setattr(recipes, "RANDOM", "tiny")
    rows = list(recipes.run("gpu_fastest", Setting("cuda", False, tmp_path)))
    assert f"model={tmp_path / 'recipes' / 'tiny'}" in commands[0] and rows[-1]["exit_code"] == 0
    from bertopt.modeling import checkpoint

    assert checkpoint.load(str(tmp_path / "recipes" / "tiny")).spec.pooling == "mean"
    part = {"setting": ["cuda", False], "environment": {"packages": {}, "python": "3"}, "cases": {"gpu_fastest": {"rows": {"export": rows[0]}}}}
    assert "weights are random" in table.markdown({"recipes": part})


def test_every_recipe_of_the_part_is_shipped_and_runs_on_a_gpu() -> None:
    for name in recipes.RECIPES:
        before: list[Any] = []
        for step in parser.load(find(name), ["device=cuda"]).steps:
            assert step.pass_.device_conflict("cuda", before) is None
            before.append(step.pass_)
