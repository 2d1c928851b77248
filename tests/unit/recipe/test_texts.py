"""Texts files: what is read, and what is said of mistakes, from the command line too: line number, what is wrong, exit 2."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from bertopt.cli import main
from bertopt.commands.export import check_inputs
from bertopt.errors import UsageError
from bertopt.modeling.source import examine
from bertopt.recipe import Recipe, from_dict, texts
from bertopt.recipe.texts import Texts
from tests.support.specs import TWO_LABELS as SPEC
from tests.support.tiny_models import Tiny

#: What Python says of JSON that is nested too deeply.
TOO_DEEP = "maximum recursion depth exceeded" if sys.version_info < (3, 14) else "Stack overflow"


def write(folder: Path, content: str | bytes, name: str = "t.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"text": "a"}\n\n', "t.jsonl:2: the line is empty; remove it"),
        ('{"text": "a"}\n{"text" "b"}\n', "t.jsonl:2: expected a JSON object; Expecting ':' delimiter at column 9"),
        ('{"text": "a", "label": "good"}\n{"text": "b"}\n', "t.jsonl:2: no label, but other lines have one"),
        ('{"text": "a", "label": "good"}\n{"text": "b", "label": "fine"}\n',
         "t.jsonl:2: label must be one of bad, good, mixed; got 'fine'"),
    ],
)  # fmt: skip
def test_the_command_line_says_so_and_exits_2(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, said: str
) -> None:
    write(tmp_path, content)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"schema_version: 1\nmodel: {tiny('bert')}\ndevice: cpu\n"
        f"inputs: {{shapes: [[1, 8]], texts: {tmp_path / 't.jsonl'}}}\nsteps: [{{pass: use_sdpa}}]\n"
    )
    for asked in ("--fresh", "--dry-run"):
        with pytest.raises(SystemExit) as ended:
            main(["export", str(recipe), "--out", str(tmp_path / "out"), asked])
        assert ended.value.code == 2
        printed = capsys.readouterr().err
        assert said in printed and "Traceback" not in printed
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("task", ["token-classification", "fill-mask"])
def test_a_second_text_that_the_task_does_not_take_is_refused(task: str, tiny: Tiny, tmp_path: Path) -> None:
    """It was left out, and nothing said so."""
    path = write(tmp_path, '{"text": "a b", "text_pair": "c"}\n')
    said = f"t.jsonl: text_pair must be left out, since a model for {task} takes single texts"
    with pytest.raises(UsageError, match=said):
        check(recipe(tiny("bert", task), path))
    with pytest.raises(UsageError, match=said):
        texts.read(path).asked(task)


def check(given: Recipe) -> None:
    check_inputs(given, examine(Path(given.model)))


def recipe(model: Path, path: Path) -> Recipe:
    steps = [{"pass": "use_sdpa"}]
    return from_dict({"schema_version": 1, "model": str(model), "inputs": {"shapes": [[1, 8]], "texts": str(path)}, "steps": steps})


@pytest.mark.parametrize(
    ("task", "changed", "label", "said"),
    [
        ("text-classification", {}, "fine", "label must be one of bad, good, mixed; got 'fine'"),
        ("text-classification", {"id2label": {"0": "good", "1": "bad", "2": "mixed"}}, 0, "got '0': give names; 0 is the number of 'good'"),
        ("text-classification", {}, 3, "label must be one of bad, good, mixed; got '3'"),
        ("text-classification", {"id2label": None, "num_labels": 2}, "LABEL_2", "label must be one of LABEL_0, LABEL_1; got 'LABEL_2'"),
        ("text-classification", {"problem_type": "multi_label_classification"}, ["good", "fine"], "got 'fine'"),
        ("text-classification", {"problem_type": "regression", "id2label": {"0": "score"}}, "good", "label must be a number; got 'good'"),
        ("token-classification", {}, ["good"], "a list of one tag for each of the text's 2 words; got a list of 1"),
        # What config.json does not tell is left to the run.
        ("text-classification", {"architectures": None}, "fine", None),
        ("feature-extraction", {}, "fine", None),
    ],
    ids=["unknown", "number", "no number", "unnamed", "several", "a number", "tags", "no task", "no labels"],
)  # fmt: skip
def test_labels_are_held_against_config_json(
    task: str, changed: dict[str, Any], label: Any, said: str | None, tiny: Tiny, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(tiny("bert", task), tmp_path / "model"))
    fields = json.loads((model / "config.json").read_text()) | changed
    (model / "config.json").write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))
    path = write(tmp_path, json.dumps({"text": "a b", "label": label}) + "\n")
    if said is None:
        check(recipe(model, path))
    else:
        with pytest.raises(UsageError, match=said):
            check(recipe(model, path))


def lines(folder: Path, content: str | bytes, name: str = "t.jsonl") -> list[str]:
    """What is wrong with a file, a line each, without the file's folder."""
    with pytest.raises(UsageError) as caught:
        texts.read(write(folder, content, name))
    return [problem.removeprefix(f"{folder}/") for problem in caught.value.problems]


@pytest.mark.parametrize("name", ["t.txt", "t.jsonl"])
def test_a_byte_order_mark_and_windows_lines_are_no_text(tmp_path: Path, name: str) -> None:
    content = 'one\r\ntwo\r\n' if name == "t.txt" else '{"text": "one"}\r\n{"text": "two"}\r\n'
    assert texts.read(write(tmp_path, b"\xef\xbb\xbf" + content.encode(), name)).texts == ("one", "two")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[" * 100_000, f"expected a JSON object; {TOO_DEEP}"),
        ('{"text": "a", "label": ' + "9" * 5000 + "}", "expected a JSON object; Exceeds the limit"),
        ('{"text": "a", "label": NaN}', "expected a JSON object; NaN is not a JSON number"),
        ('{"text": "a", "label": {"a": 1}}', "label must be text or a number"),
        ('{"text": "\\ud800"}', "half a surrogate pair"),
        ('{"text": "a", "label": "\\udfff"}', "half a surrogate pair"),
        (b'{"text": "caf\xe9"}', "expected UTF-8; byte 14 of the line is not"),
    ],
    ids=["deep", "huge number", "NaN", "label", "surrogate", "surrogate label", "latin-1"],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str | bytes, said: str) -> None:
    bad = line if isinstance(line, bytes) else line.encode()
    (problem,) = lines(tmp_path, b'{"text": "fine", "label": "x"}\n' + bad + b"\n")
    assert problem.startswith(f"t.jsonl:2: {said}")


def test_a_bad_line_of_plain_text_is_named_by_its_number(tmp_path: Path) -> None:
    assert lines(tmp_path, b"fine\ncaf\xe9\n\nfine\n", "t.txt") == [
        "t.txt:2: expected UTF-8; byte 4 of the line is not; save the file as UTF-8",
        "t.txt:3: the line is empty; remove it",
    ]


@pytest.mark.parametrize("kind", ["utf-16-le", "utf-16-be", "utf-32-le"])
def test_utf16_without_a_mark_is_not_read_as_utf8(kind: str, tmp_path: Path) -> None:
    """Tokenizers drop NUL, so that the outputs looked right; the last line was one more text of NUL alone."""
    problem, *_ = lines(tmp_path, "a cat\nthe dog\n".encode(kind), "t.txt")
    assert problem == "t.txt:1: expected UTF-8; got NUL in every other byte, as in UTF-16; save the file as UTF-8"
    assert texts.read(write(tmp_path, b"a cat\0\n", "t.txt")).texts == ("a cat\0",)


def test_a_very_long_line_is_cut(tmp_path: Path) -> None:
    long = "word " * 1_000_000
    for name, content in (("t.txt", long), ("t.jsonl", f'{{"text": "{long}"}}')):
        (text,) = texts.read(write(tmp_path, content, name)).texts
        assert len(text) == texts.LONGEST and long.startswith(text)


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_plain_texts(tmp_path: Path) -> None:
    found = texts.read(written(tmp_path / "a.txt", "one\n  two \nथ्री\n"))
    assert found.texts == ("one", "  two ", "थ्री")
    assert found.labels is None
    assert found.source == str(tmp_path / "a.txt")


def test_labelled_texts(tmp_path: Path) -> None:
    lines = ['{"text": "one", "label": "good"}', '{"text": "", "label": 0, "other": [1]}']
    found = texts.read(written(tmp_path / "a.jsonl", "\n".join(lines)))
    assert (found.texts, found.labels) == (("one", ""), ("good", "0"))
    assert found.digest == Texts(("one", ""), ("good", "0"), "elsewhere").digest
    assert found.digest != Texts(("one", "")).digest


def test_a_text_may_hold_any_character_but_a_newline(tmp_path: Path) -> None:
    line = "one\u2028two\x0bthree\x85four"
    assert texts.read(written(tmp_path / "a.txt", line + "\n")).texts == (line,)
    entry = json.dumps({"text": line}, ensure_ascii=False)
    assert texts.read(written(tmp_path / "a.jsonl", entry + "\r\n")).texts == (line,)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", "one\n\nthree\n  \n", ["a.txt:2: the line is empty; remove it", "a.txt:4: the line is empty"]),
        ("a.txt", "", ["a.txt: expected at least one text; the file is empty"]),
        ("a.jsonl", '{"text": "a"}\n{"text": \n', ["a.jsonl:2: expected a JSON object; Expecting value at column 10"]),
        ("a.jsonl", '["a"]\n"b"\n{}\n', ["a.jsonl:1: expected", "a.jsonl:2: expected", "a.jsonl:3: expected"]),
        ("a.jsonl", '{"text": 3}\n{"text": null}', ["a.jsonl:1: text must be text in quotes; got 3", "a.jsonl:2: text must be text in quotes; got null"]),
        ("a.jsonl", '{"text": "a", "label": "x"}\n{"text": "b"}', ["a.jsonl:2: no label, but other lines have one"]),
        ("a.jsonl", '{"text": "a"}\n{"text": "b", "label": "x"}', ["a.jsonl:1: no label, but other lines have one"]),
    ],
)
def test_bad_lines_are_all_named(tmp_path: Path, name: str, content: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        texts.read(written(tmp_path / name, content))
    assert len(caught.value.problems) == len(words)
    for problem, expected in zip(caught.value.problems, words, strict=True):
        assert problem.startswith(f"{tmp_path}/{expected}")


def test_a_file_of_another_kind_is_named_as_such(tmp_path: Path) -> None:
    """A table was said to hold no JSON objects, line by line. What comes from a pipe has no suffix."""
    path = write(tmp_path, "text,label\na cat,good\n", "texts.csv")
    with pytest.raises(UsageError) as error:
        texts.read(path)
    assert error.value.problems == (f"texts must be a .txt or .jsonl file; got '{path}'",)
    assert texts.read(write(tmp_path, '{"text": "a"}\n', "63")).texts == ("a",)


def test_ten_bad_lines_are_enough(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        texts.read(written(tmp_path / "a.jsonl", "x\n" * 25))
    assert len(caught.value.problems) == 11
    assert caught.value.problems[-1] == "and 15 more"


@pytest.mark.parametrize("content", [b"caf\xe9\n", None])
def test_unreadable_texts(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "a.txt"
    if content is not None:
        written(path, content)
    with pytest.raises(UsageError, match=r"cannot be read|expected UTF-8"):
        texts.read(path)


def test_labels_must_be_the_models() -> None:
    wrong = Texts(("a", "b", "c"), ("good", "ugly", "Bad"), "t.jsonl")
    with pytest.raises(UsageError) as caught:
        wrong.check_labels(SPEC)
    assert caught.value.problems == (
        "t.jsonl:2: label must be one of bad, good; got 'ugly'",
        "t.jsonl:3: label must be one of bad, good; got 'Bad'",
    )
    Texts(("a",), ("good",)).check_labels(SPEC)
    Texts(("a",)).check_labels(SPEC)
    wrong.check_labels(SPEC.model_copy(update={"task": "feature-extraction"}))
    with pytest.raises(UsageError, match="and 10 more"):
        Texts(("a",) * 20, ("x",) * 20, "t").check_labels(SPEC)
