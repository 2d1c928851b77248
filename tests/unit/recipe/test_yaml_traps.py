"""What YAML reads as something else, and values that are meant to break a reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertopt.errors import UsageError
from bertopt.recipe.parser import from_dict, load
from tests.support.recipes import HEAD, SDPA, in_step, problems, recipe

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
