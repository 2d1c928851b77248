"""A texts file with mistakes, from the command line: line number, what is wrong, exit 2. (What is read: test_stage.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from bertopt.cli import main
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
        f"inputs: {{texts: {tmp_path / 't.jsonl'}}}\nsteps: [{{pass: use_sdpa}}]\n"
    )
    with pytest.raises(SystemExit) as ended:
        main(["export", str(recipe), "--out", str(tmp_path / "out")])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert said in printed and "Traceback" not in printed
    assert not (tmp_path / "out" / "artifact").exists()
