"""A texts file with mistakes, from the command line: line number, what is wrong, exit 2. (What is read: test_stage.)"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bertopt.cli import main
from bertopt.commands.export import check_inputs
from bertopt.errors import UsageError
from bertopt.modeling.source import examine
from bertopt.recipe import Recipe, from_dict, texts
from tests.support.tiny_models import Tiny


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
        ("[" * 100_000, "expected a JSON object; maximum recursion depth exceeded"),
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


def test_a_very_long_line_is_cut(tmp_path: Path) -> None:
    long = "word " * 1_000_000
    for name, content in (("t.txt", long), ("t.jsonl", f'{{"text": "{long}"}}')):
        (text,) = texts.read(write(tmp_path, content, name)).texts
        assert len(text) == texts.LONGEST and long.startswith(text)
