"""The command line in this process, and a recipe for it."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

from bertopt import cli

HEAD = """schema_version: 1
model: {model}
device: cpu
inputs: {{shapes: [[1, 8], [2, 8]], texts: {texts}}}
steps:
  - pass: use_sdpa
"""


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def last_line(result: Result) -> str:
    return result.stderr.strip().splitlines()[-1]


def write_recipe(folder: Path, model: Path) -> Path:
    """Write a recipe of one step and its texts."""
    (folder / "texts.txt").write_text("the cat sat on the mat\na very good film , not bad !\n")
    (folder / "tiny.yaml").write_text(HEAD.format(model=model, texts=folder / "texts.txt"))
    return folder / "tiny.yaml"
