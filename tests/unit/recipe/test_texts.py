"""A texts file with mistakes, from the command line: line number, what is wrong, exit 2. (What is read: test_stage.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from bertopt.cli import main
from bertopt.errors import UsageError
from bertopt.recipe import texts
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
    with pytest.raises(SystemExit) as ended:
        main(["export", str(recipe), "--out", str(tmp_path / "out")])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert said in printed and "Traceback" not in printed
    assert not (tmp_path / "out" / "artifact").exists()


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
