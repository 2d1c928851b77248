"""Recipes: what is read, from text, files and dicts, and what is shipped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from bertopt import passes
from bertopt.core import RESERVED_KEYS, Eager, Onnx, Pass
from bertopt.errors import UsageError
from bertopt.passes import BuildTensorrt, CastHalf, ExportOnnx, registry
from bertopt.recipe import schema
from bertopt.recipe.parser import Recipe, from_dict, load, parse
from bertopt.results import Limits
from tests.support.recipes import HEAD, SDPA, recipe

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "bertopt" / "recipes"
SHIPPED = sorted(RECIPES.rglob("*.yaml"))


# What is read


def test_defaults() -> None:
    read = recipe("  - pass: use_sdpa\n  - pass: export_onnx\n")
    assert (read.schema_version, read.model, read.revision) == (1, "pkg://some_package/model", None)
    assert (read.task, read.device, read.limits, read.deliver) == ("auto", "auto", {}, "last")
    assert read.inputs.shapes == ((1, 16), (1, 128), (8, 128))
    assert read.inputs.texts is None
    first, second = read.steps
    assert (first.name, first.after, first.on_fail, first.allow_noop, first.timeout) == (
        "use_sdpa",
        None,
        "stop",
        False,
        1800.0,
    )
    assert (second.name, second.after, second.limits) == ("export_onnx", "use_sdpa", Limits())
    assert second.pass_ == ExportOnnx()
    assert [step.name for step in read.steps] == ["use_sdpa", "export_onnx"]


def test_everything_given() -> None:
    read = parse(
        """\
schema_version: 1
model: org/name
revision: v1.0
task: text-classification
device: cuda
inputs: {shapes: [[2, 3]], texts: null}
limits: {int8: {cosine_min: 0.98}, float16: {max_abs: 1e-3}}
steps:
  - {pass: use_sdpa, name: fast-attention, backend: math}
  - {pass: cast_half, name: bf16, dtype: bfloat16, mode: autocast, limits: {label_flips_max: 0.02}, on_fail: revert}
  - {pass: export_onnx, after: fast-attention, opset: 20, allow_noop: true, timeout: 60}
deliver: fastest
"""
    )
    assert (read.model, read.revision, read.task, read.device) == ("org/name", "v1.0", "text-classification", "cuda")
    assert read.inputs.shapes == ((2, 3),)
    assert read.limits == {"int8": Limits(cosine_min=0.98), "float16": Limits(max_abs=1e-3)}
    attention, half, export = read.steps
    assert attention.pass_.model_dump() == {"backend": "math"}
    assert half.pass_ == CastHalf(dtype="bfloat16", mode="autocast")
    assert (half.limits, half.on_fail) == (Limits(label_flips_max=0.02), "revert")
    assert (export.after, export.allow_noop, export.timeout) == ("fast-attention", True, 60.0)
    assert read.deliver == "fastest"


def test_after_reference_is_the_checkpoint() -> None:
    assert recipe("  - pass: use_sdpa\n  - pass: use_better_transformer\n    after: reference\n").steps[1].after is None


def test_lists_serve_as_tuples_and_whole_numbers_as_floats() -> None:
    read = recipe(
        "  - pass: export_onnx\n"
        "  - pass: build_tensorrt\n    timeout: 7\n    targets: [sm86]\n"
        "    profiles: [{min: [1, 1], opt: [1, 8], max: [8, 128]}]\n"
    )
    engine = read.steps[1].pass_
    assert isinstance(engine, BuildTensorrt)
    assert engine.targets == ("sm86",)
    assert engine.profiles[0].max == (8, 128)
    assert isinstance(read.steps[1].timeout, float)


def test_mappings_whose_entries_are_commented_out() -> None:
    read = recipe("  - pass: use_sdpa\n    limits:\n", "limits:\n  # int8: {}\ninputs:\n")
    assert read.limits == {}
    assert len(read.inputs.shapes) == 3


def test_resolved_is_json_with_every_default_and_reads_back() -> None:
    read = load(RECIPES / "trt_fp16.yaml")
    resolved = read.resolved()
    assert list(resolved) == [
        "schema_version",
        "model",
        "revision",
        "task",
        "device",
        "inputs",
        "timing",
        "limits",
        "steps",
        "deliver",
        "waivers",
    ]
    assert resolved["timing"] == {"shape_s": 2.5, "mix_s": 4.0, "quick": False}
    assert resolved["steps"][0] == {
        "pass": "use_sdpa", "name": "use_sdpa", "after": "reference", "limits": {}, "on_fail": "revert",
        "allow_noop": False, "timeout": 1800.0, "backend": "auto",
    }  # fmt: skip
    assert resolved["steps"][3]["optimization_level"] == 3
    assert from_dict(json.loads(json.dumps(resolved))) == read


def test_a_recipe_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        recipe("  - pass: use_sdpa\n").device = "cpu"  # type: ignore[misc]


def test_registered_passes_are_found() -> None:
    class UseNothing(Pass[Eager, Eager]):
        amount: int = Field(1, ge=0)

        def __call__(self, model: Any, ctx: Any) -> Any:
            raise NotImplementedError

    passes.register(UseNothing)
    try:
        read = recipe("  - pass: use_nothing\n    amount: 2\n")
        assert read.steps[0].pass_ == UseNothing(amount=2)
        assert "use_nothing" in schema.recipe_schema()["properties"]["steps"]["items"]["properties"]["pass"]["enum"]
    finally:
        del registry._registered["use_nothing"]


# Files, folders and dicts


def test_paths_count_from_here_then_from_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there / "model"):
        folder.mkdir(parents=True)
    (there / "texts.txt").write_text("one\n")
    file = there / "r.yaml"
    file.write_text("schema_version: 1\nmodel: ./model\ninputs: {texts: texts.txt}\nsteps: [{pass: use_sdpa}]\n")
    monkeypatch.chdir(here)
    read = load(file)
    assert (read.model, read.inputs.texts) == (str(there / "model"), str(there / "texts.txt"))
    (here / "texts.txt").write_text("two\n")
    (here / "model").mkdir()
    read = load(Path("../there/r.yaml"))
    assert (Path(read.model), read.inputs.texts) == (Path("model"), "texts.txt")


@pytest.mark.parametrize("model", ["org/name", "bert-base-uncased", "pkg://a.b/c/d"])
def test_models_that_are_looked_up_later(model: str) -> None:
    assert from_dict({"schema_version": 1, "model": model, "steps": [{"pass": "use_sdpa"}]}).model == model


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.yaml: cannot be read \(No such file"):
        load(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match="cannot be read"):
        load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"model: caf\xe9\n")
    with pytest.raises(UsageError, match="must be UTF-8 text; byte 10 is not"):
        load(tmp_path / "latin.yaml")


def test_byte_order_marks_and_windows_lines(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_bytes(b"\xef\xbb\xbf" + f"{HEAD}steps:\n{SDPA}".replace("\n", "\r\n").encode())
    assert [step.name for step in load(file).steps] == ["use_sdpa"]


def test_dicts() -> None:
    data: dict[str, Any] = {
        "schema_version": 1,
        "model": Path("/"),
        "inputs": {"shapes": ((2, 4),)},
        "steps": ({"pass": "use_sdpa"},),
    }
    read = from_dict(data)
    assert (read.model, read.inputs.shapes) == ("/", ((2, 4),))
    data["steps"] = [{"pass": "use_sdpa", "bakend": "math"}]
    with pytest.raises(UsageError) as caught:
        from_dict(data, "mine")
    assert caught.value.problems == (
        "mine:steps.0.bakend: step 'use_sdpa': unknown option 'bakend'; did you mean 'backend'?",
    )


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, object()])
def test_dicts_of_other_things(value: Any) -> None:
    with pytest.raises(UsageError, match="<dict>: expected only text, finite numbers"):
        from_dict({"schema_version": 1, "model": value, "steps": []})


# What is shipped


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: str(file.relative_to(RECIPES)))
def test_shipped_recipes_are_valid(file: Path) -> None:
    assert file.read_text().startswith("# yaml-language-server: $schema=../recipe.schema.json\n")
    read = load(file)
    assert from_dict(read.resolved()) == read


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: str(file.relative_to(RECIPES)))
def test_families_without_sdpa_go_through_the_shipped_recipes(file: Path) -> None:
    assert all(step.on_fail == "revert" for step in load(file).steps if step.pass_.name() == "use_sdpa")


def test_the_shipped_recipes_have_every_built_in_pass() -> None:
    built_in = {name for name, cls in passes.all_passes().items() if cls.__module__.startswith("bertopt.")}
    steps = [step for path in RECIPES.glob("*.yaml") for step in load(path).steps]
    assert {step.pass_.name() for step in steps} >= built_in


def test_the_schema_file_is_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = schema.FILE.read_text()
    monkeypatch.setattr(schema, "FILE", tmp_path / "schema.json")
    schema.write()
    assert shipped == (tmp_path / "schema.json").read_text(), "run make schema"


def test_the_schema_knows_every_key() -> None:
    known = schema.recipe_schema({"cast_half": CastHalf, "build_tensorrt": BuildTensorrt})
    assert set(known["properties"]) == set(Recipe.model_fields)
    step = known["properties"]["steps"]["items"]
    assert set(step["properties"]) == set(RESERVED_KEYS)
    half, engine = (branch["then"] for branch in step["allOf"])
    assert set(half["properties"]) == {*RESERVED_KEYS, "dtype", "mode", "keep_fp32"}
    assert half["additionalProperties"] is False
    assert half["properties"]["dtype"]["enum"] == ["bfloat16", "float16"]
    assert half["properties"]["dtype"]["description"]
    reference = engine["properties"]["profiles"]["items"]["$ref"]
    assert known["$defs"][reference.removeprefix("#/$defs/")]["properties"].keys() == {"min", "opt", "max"}


def test_no_built_in_option_is_a_reserved_key() -> None:
    for name, cls in passes.all_passes().items():
        assert not set(cls.model_fields) & set(RESERVED_KEYS), name


def test_checking_a_recipe_imports_nothing_heavy() -> None:
    code = (
        "import sys; from pathlib import Path; from bertopt.recipe import load; import bertopt.recipe.schema;"
        f"load(Path({str(RECIPES / 'ladder.yaml')!r}));"
        "heavy = {'torch', 'transformers', 'numpy', 'onnx', 'onnxruntime', 'optimum', 'tensorrt'} & set(sys.modules);"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_forms_tell_what_fits() -> None:
    assert ExportOnnx.forms() == (Eager, Onnx)


def test_recipes_that_choose_the_fastest_go_on_after_any_failure() -> None:
    """A model whose ONNX export failed ended the run, though the native encoder was ready to be delivered."""
    chosen = {file.stem: read for file in SHIPPED if (read := load(file)).deliver == "fastest"}
    assert chosen.keys() >= {"cpu_exact", "cpu_fastest", "cpu_near_lossless", "gpu_fastest"}
    assert [(name, step.name) for name, read in chosen.items() for step in read.steps if step.on_fail == "stop"] == []
