"""README says what the result files say, and its examples are valid."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.readme import updated
from bertopt import recipe

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def test_tables_are_generated_from_the_result_files() -> None:
    assert updated(README) == README


def test_the_recipe_is_valid(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", README, re.S)
    (tmp_path / "mine.jsonl").write_text('{"text": "a", "label": "b"}\n')
    (tmp_path / "recipe.yaml").write_text(block)
    assert recipe.load(tmp_path / "recipe.yaml").deliver == "fastest"


def test_python_blocks_compile() -> None:
    for block in re.findall(r"```python\n(.*?)```", README, re.S):
        compile(block, "README.md", "exec")


def test_files_it_names_exist() -> None:
    for name in re.findall(r"\]\(([\w./]+)\)", README):
        assert (ROOT / name).exists(), name
