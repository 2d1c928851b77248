"""Recipes: what is read, what is refused, and that every mistake is named with its place at once."""

from __future__ import annotations

import datetime
import json
import re
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
from bertopt.results import Limits, Waiver

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "bertopt" / "recipes"
SHIPPED = sorted(RECIPES.rglob("*.yaml"))
HEAD = "schema_version: 1\nmodel: pkg://some_package/model\n"


def recipe(steps: str, head: str = "", overrides: tuple[str, ...] = ()) -> Recipe:
    return parse(f"{HEAD}{head}steps:\n{steps}", "r.yaml", overrides)


def problems(text: str, overrides: tuple[str, ...] = ()) -> tuple[str, ...]:
    with pytest.raises(UsageError) as caught:
        parse(text, "r.yaml", overrides)
    return caught.value.problems


def in_step(options: str, before: str = "", name: str = "export_onnx") -> tuple[str, ...]:
    """Problems of one step, whose first option stands on line 5 + the lines of `before`, column 5."""
    body = "".join(f"    {line}\n" for line in options.splitlines())
    return problems(f"{HEAD}steps:\n{before}  - pass: {name}\n{body}")


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
        "pass": "use_sdpa", "name": "use_sdpa", "after": "reference", "limits": {}, "on_fail": "stop",
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


# YAML traps


@pytest.mark.parametrize(
    ("written", "read"),
    [("1e-3", 1e-3), ("1.5e-4", 1.5e-4), ("1", 1.0), ("+1", 1.0), (".5", 0.5), ("0", 0.0), ("0.0", 0.0), ("2.", 2.0)],
)
def test_numbers(written: str, read: float) -> None:
    assert recipe(f"  - pass: use_sdpa\n    limits: {{max_abs: {written}}}\n").steps[0].limits.max_abs == read


@pytest.mark.parametrize("written", ["yes", "no", "on", "off", "True", "FALSE", "y", "'true'", "1", "0", "null"])
def test_only_true_and_false_are_booleans(written: str) -> None:
    got = written.strip("'")
    shown = got if written in ("1", "0", "null") else f"'{got}'"
    expected = f"r.yaml:5:14: step 'compile_torch': dynamic must be true or false; got {shown}"
    assert in_step(f"dynamic: {written}", name="compile_torch") == (expected,)


@pytest.mark.parametrize("written", ["no", "on", "2020-01-01", "1:30", "0x10", "1_000", "Null", "NO"])
def test_words_stay_text(written: str) -> None:
    assert recipe("  - pass: use_sdpa\n", f"revision: {written}\n").revision == written


@pytest.mark.parametrize("written", ["null", "~", ""])
def test_null(written: str) -> None:
    assert recipe("  - pass: use_sdpa\n", f"revision: {written}\n").revision is None


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("010", "a number must not start with 0; got 010; write 10 or 8, or '010' for text"),
        ("-010", "a number must not start with 0; got -010; write -10 or -8, or '-010' for text"),
        ("018", "a number must not start with 0; got 018; write 18, or '018' for text"),
        (".nan", "a number must be finite; got .nan"),
        (".inf", "a number must be finite; got .inf"),
        ("-.INF", "a number must be finite; got -.INF"),
        ("1e999", "a number must be finite; got 1e999"),
        ("nan", "step 'export_onnx': opset must be a whole number; got 'nan'"),
        ("0b11", "step 'export_onnx': opset must be a whole number; got '0b11'"),
        ("'18'", "step 'export_onnx': opset must be a whole number; got '18'"),
        ("18.0", "step 'export_onnx': opset must be a whole number; got 18.0"),
        ("18.5", "step 'export_onnx': opset must be a whole number; got 18.5"),
        ("true", "step 'export_onnx': opset must be a whole number; got true"),
        ("", "step 'export_onnx': opset must be a whole number; got null"),
        ("[18]", "step 'export_onnx': opset must be a whole number; got [18]"),
        ("17", "step 'export_onnx': opset must be at least 18; got 17"),
    ],
)
def test_bad_numbers(written: str, message: str) -> None:
    column = 11 if not written else 12
    assert in_step(f"opset: {written}") == (f"r.yaml:5:{column}: {message}",)


def test_numbers_of_any_length_are_no_crash() -> None:
    assert in_step(f"opset: {'9' * 5000}")[0].startswith("r.yaml:5:12: ")


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("a: [1, 2\nb: 3\n", "2:2", "expected ',' or ']', but got ':'"),
        ("a: 1\n  b: 2\n", "2:4", "mapping values are not allowed here; check indentation"),
        ("a: b: c\n", "1:5", "mapping values are not allowed"),
        ("a:\n\tb: 2\n", "2:1", "cannot start any token"),
        ("a: 'x\n", "2:1", "unexpected end of stream; check indentation, brackets and quotes"),
        ("a:\n  - 1\n b: 2\n", "3:2", "expected <block end>"),
        ("a: 1\n---\nb: 2\n", "2:1", "found another document"),
        ("a: \x07\n", "1:4", "character U+0007 is not allowed"),
        ("a: @x\n", "1:4", "found character '@' that cannot start any token"),
        ("a: !x!y 1\n", "1:4", "undefined tag handle"),
        ("a:\n  b\nc\n", "4:1", "expected ':'"),
    ],
)
def test_syntax_errors(text: str, place: str, words: str) -> None:
    (problem,) = problems(text)
    assert problem.startswith(f"r.yaml:{place}: not valid YAML: ")
    assert words in problem


def test_deep_nesting_is_no_crash() -> None:
    assert problems("a: " + "[" * 5000) == ("r.yaml:1:1: not valid YAML: nested too deeply",)


@pytest.mark.parametrize(
    ("text", "got"), [("", "null"), ("# nothing\n", "null"), ("- 1\n", "[1]"), ("recipe\n", "'recipe'"), ("3\n", "3")]
)
def test_not_a_mapping(text: str, got: str) -> None:
    (problem,) = problems(text)
    assert problem.endswith(f"a recipe is a mapping with schema_version, model and steps; got {got}")


@pytest.mark.parametrize(
    ("step", "found"),
    [
        ("{pass: use_sdpa, backend: !!str auto}", ["31: tag '!!str' is not supported; write the plain value"]),
        ("!!python/object/apply:os.system [echo]", ["5: tag '!!python/object/apply:os.system' is not supported; write the plain value"]),
        ("{pass: use_sdpa, backend: !mine auto}", ["31: tag '!mine' is not supported; write the plain value"]),
        ("{pass: use_sdpa, backend: &a auto}", ["31: anchor '&a' is not supported; leave it out"]),
        ("{pass: use_sdpa, backend: *a }", ["31: alias '*a' is not supported; write the value out"]),
        ("{pass: use_sdpa, <<: *a }", ["22: merge key '<<' is not supported; write the keys out"]),
        ("{pass: use_sdpa, [1]: 2}", ["22: a key must be plain text; got a list or mapping"]),
        ("{pass: use_sdpa, *a : 2}", ["22: alias '*a' is not supported; write the value out"]),
    ],
)  # fmt: skip
def test_refused_yaml(step: str, found: list[str]) -> None:
    assert problems(f"{HEAD}steps:\n  - {step}\n") == tuple(f"r.yaml:4:{problem}" for problem in found)


def test_duplicate_keys_name_both_lines() -> None:
    assert problems(
        f"{HEAD}device: cpu\nsteps:\n  - pass: use_sdpa\n    backend: math\n    backend: flash\ndevice: cuda\n"
    ) == (
        "r.yaml:7:5: key 'backend' is given twice, on lines 6 and 7; keep one",
        "r.yaml:8:1: key 'device' is given twice, on lines 3 and 8; keep one",
    )


# Mistakes


def test_known_keys_are_listed_once() -> None:
    (message,) = (text for text in problems(HEAD + "zzz: 1\nsteps: [{pass: use_sdpa}]\n") if "known: " in text)
    listed = message.partition("known: ")[2].splitlines()[0].split(", ")
    assert len(listed) == len(set(listed)) > 5


@pytest.mark.parametrize(
    ("options", "place", "message"),
    [
        ("dtpye: float16", "5:5", "unknown option 'dtpye'; did you mean 'dtype'?"),
        ("timeuot: 3", "5:5", "unknown option 'timeuot'; did you mean 'timeout'?"),
        ("zzz: 3", "5:5", f"unknown option 'zzz'; known: dtype, mode, keep_fp32, {', '.join(RESERVED_KEYS)}"),
        ("dtype: fp16", "5:12", "dtype must be 'bfloat16' or 'float16'; got 'fp16'"),
        ("dtype: 16", "5:12", "dtype must be 'bfloat16' or 'float16'; got 16"),
        ("timeout: 0", "5:14", "timeout must be greater than 0; got 0"),
        ("timeout: 10m", "5:14", "timeout must be a number; got '10m'"),
        ("timeout: '5'", "5:14", "timeout must be a number; got '5'"),
        ("on_fail: retry", "5:14", "on_fail must be 'stop', 'revert' or 'skip'; got 'retry'"),
        ("allow_noop: 1", "5:17", "allow_noop must be true or false; got 1"),
        ("limits: 0.9", "5:13", "limits must be a mapping (key: value); got 0.9"),
        ("limits: {cosine: 0.9}", "5:14", "unknown key 'cosine' in limits; did you mean 'cosine_min'?"),
        ("limits: {cosine_min: 9}", "5:26", "limits.cosine_min must be at most 1; got 9"),
        ("after: [a]", "5:12", "after must be a step's name or 'reference'; got [\"a\"]"),
        ("after:", "5:11", "after must be a step's name or 'reference'; got null"),
        ("after: cast_half", "5:12", "after must name an earlier step; got 'cast_half', which is this step itself; move it up"),
        ("after: referense", "5:12", "after must name an earlier step; got 'referense'; did you mean 'reference'?"),
    ],
)  # fmt: skip
def test_mistakes_in_a_step(options: str, place: str, message: str) -> None:
    assert in_step(options, name="cast_half") == (f"r.yaml:{place}: step 'cast_half': {message}",)


@pytest.mark.parametrize(
    "name", ["a/b", "../x", "1st", "a.b", "''", "reference", "last", "fastest", "x y", "é", "x" * 65, "5", '"a\\n"']
)
def test_step_names_are_plain(name: str) -> None:
    (problem,) = in_step(f"name: {name}")
    assert problem.startswith("r.yaml:5:11: step '")
    assert "name must be letters, digits, '_' and '-' (64 at most), start with a letter" in problem


def test_mistakes_inside_lists() -> None:
    options = "profiles: [{mx: [1, 1]}, {max: [a, 1]}, {opt: [1]}, {opt: [1, 2, 3]}, 5]\ntargets: sm86\ntiming_cache: 3"
    who = "step 'build_tensorrt': "
    assert in_step(options, "  - pass: export_onnx\n", "build_tensorrt") == (
        f"r.yaml:6:17: {who}unknown key 'mx' in profiles.0; did you mean 'max'?",
        f"r.yaml:6:37: {who}profiles.1.max.0 must be a whole number; got 'a'",
        f"r.yaml:6:51: {who}profiles.2.opt has too few items; got [1]",
        f"r.yaml:6:63: {who}profiles.3.opt must have at most 2 items; got [1, 2, 3]",
        f"r.yaml:6:75: {who}profiles.4 must be a mapping (key: value); got 5",
        f"r.yaml:7:14: {who}targets must be a list; got 'sm86'",
        f"r.yaml:8:19: {who}timing_cache must be text in quotes; got 3",
    )


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("devcie: cpu", "3:1: unknown key 'devcie'; did you mean 'device'?"),
        ("device: gpu", "3:9: device must be 'auto', 'cpu' or 'cuda'; got 'gpu'"),
        ("task: translation", "3:7: task must be 'auto', 'feature-extraction', "),
        ("revision: 12345", "3:11: revision must be text in quotes; got 12345"),
        ("deliver: [1]", "3:10: deliver must be text in quotes; got [1]"),
        ("deliver: use_spda", "3:10: deliver must be last, fastest or a step's name; got 'use_spda'; did you mean 'use_sdpa'?"),
        ("deliver: reference", "3:10: deliver must be last, fastest or a step's name; got 'reference'"),
        ("limits: {fp16: {}}", "3:10: unknown key 'fp16' in limits; known: float32, float16, bfloat16, int8"),
        ("limits: {int8: {cosine_mn: 1}}", "3:17: unknown key 'cosine_mn' in limits.int8; did you mean 'cosine_min'?"),
        ("limits: {int8: {max_abs: -1}}", "3:26: limits.int8.max_abs must be at least 0; got -1"),
        ("limits: {int8: 3}", "3:16: limits.int8 must be a mapping (key: value); got 3"),
        ("limits: [int8]", "3:9: limits must be a mapping (key: value); got [\"int8\"]"),
        ("inputs: {shape: []}", "3:10: unknown key 'shape' in inputs; did you mean 'shapes'?"),
        ("inputs: {shapes: []}", "3:18: inputs.shapes must have at least 1 item; got []"),
        ("inputs: {shapes: [8, 128]}", "3:19: inputs.shapes.0 must be a list; got 8"),
        ("inputs: {shapes: [[0, 8]]}", "3:20: inputs.shapes.0.0 must be at least 1; got 0"),
        ("inputs: {shapes: [[8]]}", "3:19: inputs.shapes.0 has too few items; got [8]"),
        ("inputs: {texts: 3}", "3:17: inputs.texts must be text in quotes; got 3"),
        ("inputs: {texts: x.csv}", "3:17: inputs.texts must be a .txt or .jsonl file; got 'x.csv'"),
        ("inputs: {texts: nope.txt}", "3:17: inputs.texts: no file 'nope.txt' here or beside the recipe; check the path"),
    ],
)  # fmt: skip
def test_mistakes_outside_steps(head: str, message: str) -> None:
    found = problems(f"{HEAD}{head}\nsteps:\n  - pass: use_sdpa\n")
    assert found[0].startswith(f"r.yaml:{message}")
    assert len(found) == (2 if head.startswith("inputs: {shapes: [8") else 1)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("model: org/name\nsteps: [{pass: use_sdpa}]\n", ["1:1: missing key 'schema_version'; add it"]),
        ("schema_version: 1\nsteps: [{pass: use_sdpa}]\n", ["1:1: missing key 'model'; add it"]),
        ("schema_version: 1\nmodle: a/b\nsteps: [{pass: use_sdpa}]\n", ["2:1: unknown key 'modle'; did you mean 'model'?"]),
        ("schema_version: 2\nmodel: a/b\nsteps: [{pass: use_sdpa}]\n", ["1:17: schema_version must be 1; got 2"]),
        ("schema_version: '1'\nmodel: a/b\nsteps: [{pass: use_sdpa}]\n", ["1:17: schema_version must be 1; got '1'"]),
        (HEAD, ["1:1: steps must be a list with at least one '- pass: NAME'; got null"]),
        (HEAD + "steps: []\n", ["3:8: steps must be a list with at least one '- pass: NAME'; got []"]),
        (HEAD + "steps: use_sdpa\n", ["3:8: steps must be a list with at least one '- pass: NAME'; got 'use_sdpa'"]),
        (HEAD + "step: [{pass: use_sdpa}]\n", ["3:1: unknown key 'step'; did you mean 'steps'?"]),
        (HEAD + "steps: [use_sdpa]\n", ["3:9: a step must be a mapping such as '- pass: use_sdpa'; got 'use_sdpa'"]),
        (HEAD + "steps: [{name: x}]\n", ["3:9: a step must name its pass; add pass: NAME"]),
        (HEAD + "steps: [{pas: use_sdpa}]\n", ["3:10: unknown key 'pas'; did you mean 'pass'?"]),
        (HEAD + "steps: [{pass: use_spda, timeout: 0}]\n", [
            "3:16: unknown pass 'use_spda'; did you mean 'use_sdpa'?", "3:35: step 'use_spda': timeout must be greater than 0; got 0",
        ]),
        (HEAD + "steps: [{pass: [1]}]\n", ["3:16: unknown pass [1]; known: use_sdpa, "]),
    ],
)  # fmt: skip
def test_missing_and_misshapen(text: str, found: list[str]) -> None:
    got = problems(text)
    assert len(got) == len(found)
    for problem, expected in zip(got, found, strict=True):
        assert problem.startswith(f"r.yaml:{expected}")


@pytest.mark.parametrize(
    "model",
    ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c", "s3://bucket/x", "a b", "''", "'\\0'", "x" * 300 + "/a/b"],
)
def test_models_that_are_nothing(model: str) -> None:
    (problem,) = problems(f"schema_version: 1\nmodel: {model}\nsteps:\n  - pass: use_sdpa\n")
    assert problem.startswith("r.yaml:2:8: model must ")


# Order


SDPA, EXPORT, HALF = "  - pass: use_sdpa\n", "  - pass: export_onnx\n", "  - pass: cast_half\n"
COMPILE, FUSE, INT8 = "  - pass: compile_torch\n", "  - pass: fuse_ort\n", "  - pass: quantize_int8\n"


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (SDPA + COMPILE + EXPORT, "6:5: step 'export_onnx' takes an eager model, but 'compile_torch' gives a compiled one; add after: use_sdpa"),
        (COMPILE + EXPORT, "5:5: step 'export_onnx' takes an eager model, but 'compile_torch' gives a compiled one; add after: reference"),
        (FUSE, "4:5: step 'fuse_ort' takes an onnx model, but the checkpoint is an eager one; put export_onnx before it"),
        (SDPA + EXPORT + "  - pass: fuse_ort\n    name: fused\n    after: use_sdpa\n",
         "8:12: step 'fused' (fuse_ort) takes an onnx model, but 'use_sdpa' gives an eager one; use after: export_onnx"),
        # The nearest eager step would conflict with the export.
        (SDPA + "  - pass: use_better_transformer\n    after: reference\n" + COMPILE + EXPORT,
         "8:5: step 'export_onnx' takes an eager model, but 'compile_torch' gives a compiled one; add after: use_sdpa"),
        (HALF + "  - pass: cast_half\n    name: again\n", "5:5: step 'again' (cast_half): the network is in half precision already"),
        (SDPA + EXPORT + INT8 + FUSE, "7:5: step 'fuse_ort': fusions look for float products; fuse before quantize_int8"),
        (HALF + EXPORT + INT8, "6:5: step 'quantize_int8': ONNX Runtime cannot load a graph quantised after half precision"),
        ("  - pass: cast_half\n    after: use_sdpa\n" + SDPA,
         "5:12: step 'cast_half': after must name an earlier step; got 'use_sdpa', which comes later; move it up"),
        (SDPA + "  - pass: cast_half\n    name: use_sdpa\n", "6:11: step name 'use_sdpa' is taken by an earlier step; add name:"),
    ],
)  # fmt: skip
def test_order(steps: str, message: str) -> None:
    (problem,) = problems(f"{HEAD}steps:\n{steps}")
    assert problem.startswith(f"r.yaml:{message}")


def test_shapes_an_engine_could_not_run() -> None:
    head = f"{HEAD}inputs: {{shapes: [[1, 16], [64, 16]]}}\nsteps:\n{EXPORT}"
    profile = "    profiles: [{max: [8, 128]}, {min: [8, 1], opt: [8, 8], max: [64, 8]}]\n"
    (problem,) = problems(f"{head}  - pass: build_tensorrt\n{profile}")
    assert problem.startswith("r.yaml:6:5: step 'build_tensorrt': shape [64, 16] is outside every profile")


# Waivers


WAIVED = f"{HEAD}steps:\n  - pass: use_sdpa\nwaivers:\n"


def test_waivers_are_read_and_written() -> None:
    entry = "  - stage: use_sdpa\n    metric: rel_l2\n    reason: known since May\n    expires: 2026-12-31\n"
    read = parse(WAIVED + entry, "r.yaml")
    day = datetime.date(2026, 12, 31)
    assert read.waivers == (Waiver(stage="use_sdpa", metric="rel_l2", reason="known since May", expires=day),)
    assert from_dict(json.loads(json.dumps(read.resolved()))) == read
    assert parse(f"{HEAD}waivers:\n  # none yet\nsteps:\n  - pass: use_sdpa\n", "r.yaml").waivers == ()


def test_every_mistake_in_waivers_is_named() -> None:
    entries = """\
  - stage: use_sdp
    metric: rel_l3
    reason: ''
    expires: 2026-02-30
  - {stage: use_sdpa, metric: max_abs, expires: 2026}
  - use_sdpa
  - {stage: reference, metric: rel_l2, reason: ' ', expires: 2026-12-31, untl: soon}
  - {stage: use_sdpa, metric: rel_l2, reason: because, expires: 2026-12-31}
  - {stage: use_sdpa, metric: rel_l2, reason: because, expires: 2026-12-30}
"""
    found = problems(WAIVED + entries)
    assert [line.partition(" ")[2] for line in found] == [
        "waiver 1: stage must be a step's name; got 'use_sdp'; did you mean 'use_sdpa'?",
        "waiver 1: metric must be a limit; got 'rel_l3'; did you mean 'rel_l2'?",
        "waiver 1: reason must have at least 1 character; got ''",
        "waiver 1: expires must be a valid date in the format YYYY-MM-DD, day value is outside expected range; got '2026-02-30'",
        "waiver 2: missing key 'reason'; add it",
        "waiver 2: expires must be a valid date; got 2026",
        "waiver 3: expected a mapping with stage, metric, reason and expires; got 'use_sdpa'",
        "waiver 4: stage must be a step's name; got 'reference'; known: use_sdpa",
        "waiver 4: reason must say why; got only spaces",
        "waiver 4: unknown key 'untl'; known: stage, metric, reason, expires",
        "waiver 6: rel_l2 of 'use_sdpa' is waived above; keep one",
    ]
    assert found[0].startswith("r.yaml:6:12: ") and found[-1].startswith("r.yaml:14:5: ")
    assert problems(WAIVED.replace("waivers:", "waivers: 3")) == (
        "r.yaml:5:10: waivers must be a list of '- stage: NAME'; got 3",
    )


def test_one_mistake_does_not_cascade() -> None:
    """Steps after an unknown pass, an unreadable one or a wrong `after` are not judged by their order."""
    assert (
        len(problems(f"{HEAD}steps:\n  - pass: exprot_onnx\n    name: exported\n{FUSE}{INT8}deliver: exported\n")) == 1
    )
    assert len(problems(f"{HEAD}steps:\n  - export_onnx\n  - pass: fuse_ort\n    after: export_onnx\n")) == 1
    assert len(problems(f"{HEAD}steps:\n{SDPA}  - pass: fuse_ort\n    after: nowhere\n{INT8}")) == 1
    assert len(problems(f"{HEAD}steps:\n{SDPA}  - pass: fuse_ort\n    after: *x\n{INT8}")) == 1
    assert len(problems(f"{HEAD}steps:\n{SDPA}  - pass: fuse_ort\n    after:\n{INT8}")) == 1
    assert (
        len(problems(f"{HEAD}steps:\n  - pass: export_onnx\n    opset: 3\n  - pass: build_tensorrt\n    name: &a e\n"))
        == 2
    )


def test_one_mistake_does_not_hide_others() -> None:
    """A step with a wrong option still stands in the order, as its pass's defaults."""
    steps = "  - pass: cast_half\n    dtype: fp16\n  - pass: cast_half\n    name: twice\n    nope: 1\n"
    assert [problem.split(": ", 1)[1] for problem in problems(f"{HEAD}device: gpu\nsteps:\n{steps}")] == [
        "device must be 'auto', 'cpu' or 'cuda'; got 'gpu'",
        "step 'cast_half': dtype must be 'bfloat16' or 'float16'; got 'fp16'",
        "step 'twice' (cast_half): the network is in half precision already",
        f"step 'twice' (cast_half): unknown option 'nope'; known: dtype, mode, keep_fp32, {', '.join(RESERVED_KEYS)}",
    ]


def test_seven_mistakes_are_seven_problems() -> None:
    text = """\
schema_version: 1
modle: pkg://some_package/model
inputs:
  shapes: [[1, 010]]
steps:
  - pass: use_sdpa
  - pass: cast_half
    dtpye: float16
  - pass: compile_torch
    dynamic: no
  - pass: export_onnx
  - pass: quantise_int8
  - pass: fuse_ort
deliver: fuse_rot
"""
    found = problems(text)
    assert found == (
        "r.yaml:2:1: unknown key 'modle'; did you mean 'model'?",
        "r.yaml:4:16: a number must not start with 0; got 010; write 10 or 8, or '010' for text",
        "r.yaml:8:5: step 'cast_half': unknown option 'dtpye'; did you mean 'dtype'?",
        "r.yaml:10:14: step 'compile_torch': dynamic must be true or false; got 'no'",
        "r.yaml:11:5: step 'export_onnx' takes an eager model, but 'compile_torch' gives a compiled one; add after: cast_half",
        "r.yaml:12:11: unknown pass 'quantise_int8'; did you mean 'quantize_int8'?",
        "r.yaml:14:10: deliver must be last, fastest or a step's name; got 'fuse_rot'; did you mean 'fuse_ort'?",
    )


def test_problems_never_show_pydantic() -> None:
    text = (
        f"{HEAD}inputs: 3\nlimits: [1]\nsteps:\n  - {{pass: use_sdpa, limits: x, timeout: {{}}, backend: [1]}}\n  - 5\n"
    )
    assert not re.search("pydantic|https?:|Input should|valid (string|integer|dict)", "\n".join(problems(text)))


@pytest.mark.parametrize("cut", ["prefix", "line", "character"])
def test_damaged_recipes_are_usage_errors_at_most(cut: str) -> None:
    text = (RECIPES / "trt_fp16.yaml").read_text()
    lines = text.splitlines(keepends=True)
    damaged = {
        "prefix": [text[:end] for end in range(0, len(text), 7)],
        "line": ["".join(lines[:i] + lines[i + 1 :]) for i in range(len(lines))],
        "character": [text[:i] + odd + text[i + 1 :] for i in range(0, len(text), 31) for odd in "\t:[{&*!'\0-"],
    }
    for broken in damaged[cut]:
        try:
            parse(broken, "r.yaml")
        except UsageError as error:
            assert all(problem.startswith("r.yaml:") for problem in error.problems)


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


# --set


def test_overrides() -> None:
    steps = SDPA + "  - pass: cast_half\n    name: bf16\n"
    settings = (
        "steps.1.dtype=float16", "steps.bf16.mode=autocast", "steps.use_sdpa.limits.cosine_min=0.5", "device=cuda",
        "inputs.shapes=[[1, 8]]", "limits.int8={max_abs: 1e-2}", "revision=no", "inputs.shapes.0.1=9",
    )  # fmt: skip
    read = recipe(steps, overrides=settings)
    assert read.steps[1].pass_ == CastHalf(dtype="float16", mode="autocast")
    assert read.steps[0].limits.cosine_min == 0.5
    assert (read.device, read.revision, read.inputs.shapes) == ("cuda", "no", ((1, 9),))
    assert read.limits == {"int8": Limits(max_abs=0.01)}


def test_an_override_repairs_a_mistake_in_the_file() -> None:
    text = f"{HEAD}steps:\n  - pass: export_onnx\n    opset: 018\n"
    assert parse(text, overrides=["steps.0.opset=20"]).steps[0].pass_ == ExportOnnx(opset=20)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("steps.0.opset=x", "step 'export_onnx': opset must be a whole number; got 'x'"),
        ("steps.export_onnx.opest=20", "step 'export_onnx': unknown option 'opest'; did you mean 'opset'?"),
        ("steps.0.opset=010", "a number must not start with 0; got 010; write 10 or 8, or '010' for text"),
        ("steps.7.opset=20", "there is no item 7; expected 0 to 0"),
        ("steps.exprot_onnx.opset=20", "there is no step 'exprot_onnx'; did you mean 'export_onnx'?"),
        ("device.x=1", "'device' is a single value and has no 'x'"),
        ("devcie=cpu", "unknown key 'devcie'; did you mean 'device'?"),
        ("device", "expected KEY=VALUE, such as steps.1.dtype=float16"),
        ("=cpu", "expected KEY=VALUE, such as steps.1.dtype=float16"),
        ("steps..x=1", "expected KEY=VALUE, such as steps.1.dtype=float16"),
        ("device=[", "the value is not valid YAML: while parsing a flow node expected the node content"),
        ("device=!!str cpu", "tag '!!str' is not supported; write the plain value"),
        ("device=", "device must be 'auto', 'cpu' or 'cuda'; got null"),
        ("steps.0.limits={max_abs: 1, max_abs: 2}", "key 'max_abs' is given twice"),
        ("steps.0.after=later", "step 'export_onnx': after must name an earlier step; got 'later'; known: reference"),
    ],
)
def test_mistaken_overrides(setting: str, message: str) -> None:
    (problem,) = problems(f"{HEAD}device: cpu\nsteps:\n{EXPORT}", (setting,))
    assert problem.startswith(f"--set {setting}: {message}")


def test_overrides_come_after_the_file_in_the_list() -> None:
    found = problems(f"{HEAD}device: gpu\nsteps:\n{EXPORT}    zzz: 1\n", ("task=x", "steps.0.opset=1"))
    assert [problem.split(": ")[0] for problem in found] == [
        "r.yaml:3:9",
        "r.yaml:6:5",
        "--set task=x",
        "--set steps.0.opset=1",
    ]


# What is shipped


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: str(file.relative_to(RECIPES)))
def test_shipped_recipes_are_valid(file: Path) -> None:
    assert file.read_text().startswith("# yaml-language-server: $schema=../recipe.schema.json\n")
    read = load(file)
    assert from_dict(read.resolved()) == read


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


# Hostile values


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('schema_version: 1\nmodel: "\\ud800"\nsteps: [{pass: use_sdpa}]\n', "2:8"),
        ('schema_version: 1\nmodel: a/b\n"\\ud800": 1\nsteps: [{pass: use_sdpa}]\n', "3:1"),
        ('schema_version: 1\nmodel: a/b\nsteps: [{pass: use_sdpa, backend: "\\udfff"}]\n', "3:35"),
    ],
)
def test_halves_of_surrogate_pairs_are_refused(text: str, place: str) -> None:
    (problem,) = problems(text)
    assert problem.startswith(f"r.yaml:{place}: ") and "\\ud" in problem and problem.isascii()


def test_halves_of_surrogate_pairs_are_refused_elsewhere() -> None:
    assert "surrogate" in problems(f"{HEAD}steps:\n{SDPA}", ('inputs.shapes="\\ud800"',))[0]
    with pytest.raises(UsageError, match="<dict>: expected only text"):
        from_dict({"schema_version": 1, "model": "\ud800", "steps": [{"pass": "use_sdpa"}]})


def test_the_home_of_nobody() -> None:
    (problem,) = problems(f"schema_version: 1\nmodel: ~nosuchuser/x\nsteps:\n{SDPA}")
    assert "there is no such directory" in problem
    (problem,) = problems(f"{HEAD}inputs: {{texts: ~nosuchuser/x.txt}}\nsteps:\n{SDPA}")
    assert "no file '~nosuchuser/x.txt' here" in problem


@pytest.mark.parametrize(
    "line", ["model: {0}/x/y", "{0}: 1", "device: {0}", "deliver: {0}", "limits: {{{0}: 1}}", "revision: &{0} a", "model: !{0} a"]
)  # fmt: skip
def test_a_huge_value_is_not_repeated_whole(line: str) -> None:
    for huge in ("x" * 50_000, "word " * 10_000 + "x"):
        text = f"schema_version: 1\n{line.format(huge)}\nsteps:\n{SDPA}"
        assert all(len(problem) < 1000 for problem in problems(text if line.startswith("model") else f"model: a/b\n{text}"))
    assert all(len(problem) < 1000 for problem in problems(f"{HEAD}steps:\n{SDPA}", ("device=" + "x" * 50_000,)))
    assert all(len(problem) < 1000 for problem in in_step(f"opset: {'9' * 50_000}"))


def test_a_recipe_of_megabytes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("a: 1\n" * 300_000)
    with pytest.raises(UsageError, match="a recipe must be at most 1048576 bytes; got 1500000"):
        load(file)


def test_a_hundred_mistakes_are_enough() -> None:
    found = problems(HEAD + "".join(f"key{number}: 1\n" for number in range(150)) + f"steps:\n{SDPA}")
    assert len(found) == 101 and found[-1] == "r.yaml: and 50 more"


def test_removed_timing_keys_are_accepted_with_a_warning_for_one_release() -> None:
    data = {"schema_version": 1, "model": "org/name", "steps": [{"pass": "use_sdpa"}]}
    with pytest.warns(FutureWarning, match=r"timing\.processes has no effect any more .*; remove it"):
        recipe = from_dict(data | {"timing": {"shape_s": 2, "narrow": 0.004, "processes": 1}})
    assert recipe.timing.shape_s == 2 and "processes" not in recipe.resolved()["timing"]
    with pytest.raises(UsageError, match=r"unknown key 'process' in timing"):
        from_dict(data | {"timing": {"process": 1}})
