"""Every mistake in a recipe is named with its place, at once."""

from __future__ import annotations

import datetime
import json
import re

import pytest

from bertopt.commands.recipes import FOLDER
from bertopt.core import RESERVED_KEYS
from bertopt.errors import UsageError
from bertopt.recipe.parser import from_dict, parse
from bertopt.results import Waiver
from tests.support.recipes import EXPORT, HALF, HEAD, SDPA, in_step, problems


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
        ("model: org/name\nsteps: [{pass: use_sdpa}]\n", ["1:1: missing key 'schema_version'; add schema_version: 1"]),
        ("schema_version: 1\nmodel: a/b\nsteps: [{pass: UseSDPA}]\n", ["3:16: unknown pass 'UseSDPA'; did you mean 'use_sdpa'?"]),
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
    bounded = parse(f"{WAIVED}{entry}    limit: 2e-5\n", "r.yaml")
    assert bounded.waivers[0].limit == 2e-5 and from_dict(json.loads(json.dumps(bounded.resolved()))) == bounded
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
  - {stage: use_sdpa, metric: cosine_min, reason: because, expires: 2026-12-30, limit: 1.5}
  - {stage: use_sdpa, metric: certified, reason: because, expires: 2026-12-30, limit: 0.5}
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
        "waiver 4: unknown key 'untl'; known: stage, metric, reason, expires, limit",
        "waiver 6: rel_l2 of 'use_sdpa' is waived above; keep one",
        "waiver 7: limit must be at most 1; got 1.5, as every limit of cosine_min",
        "waiver 8: certified is true or false; a waiver of it takes no limit: leave it out",
    ]
    assert found[0].startswith("r.yaml:6:12: ") and found[-3].startswith("r.yaml:14:5: ")
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
    text = (FOLDER / "trt_fp16.yaml").read_text()
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
