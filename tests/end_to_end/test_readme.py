"""README says what the result files say, and its examples are valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.readme import matrix, updated
from bertopt import recipe as recipes

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")


def test_tables_are_generated_from_the_result_files() -> None:
    assert updated(README) == README


def test_the_recipe_and_its_waiver_are_valid(tmp_path: Path) -> None:
    block, waivers = re.findall(r"```yaml\n(.*?)```", README, re.S)
    (tmp_path / "mine.jsonl").write_text('{"text": "a", "label": "b"}\n')
    (tmp_path / "recipe.yaml").write_text(block + waivers)
    found = recipes.load(tmp_path / "recipe.yaml")
    assert found.deliver == "fastest" and [waiver.stage for waiver in found.waivers] == ["quantize_int8"]


def test_python_blocks_compile() -> None:
    for block in re.findall(r"```python\n(.*?)```", README, re.S):
        compile(block, "README.md", "exec")


def test_files_it_names_exist() -> None:
    for name in re.findall(r"\]\(([\w./]+)\)", README):
        assert (ROOT / name).exists(), name


def cell(family: str, pass_: str, task: str, outcome: str) -> dict[str, str]:
    return {"family": family, "pass_": pass_, "task": task, "outcome": outcome}


def test_the_matrix_s_table() -> None:
    no = "unsupported: MPNetForTokens has no SDPA; leave it out\nand more"
    cells = [
        cell("bert", "use_sdpa", "tags", "ok"), cell("bert", "use_sdpa", "spans", "ok"),
        cell("bert", "build", "tags", "built (needs GPU)"), cell("bert", "build", "spans", "ok"),
        cell("mpnet", "use_sdpa", "tags", no), cell("mpnet", "use_sdpa", "spans", no.replace("Tokens", "Spans")),
        cell("mpnet", "build", "tags", "ok"), cell("mpnet", "build", "spans", no),
    ]  # fmt: skip
    table = matrix({"cells": cells}).splitlines()
    assert table[0] == "| | `use_sdpa` | `build` |"
    assert table[2:4] == [
        "| bert | ok | built (needs GPU) 1/2, ok 1/2 |",
        "| mpnet | unsupported | ok 1/2, unsupported 1/2 |",
    ]
    assert "- `use_sdpa`, mpnet: … has no SDPA; leave it out" in table
    for broken in (cells[:-1], [*cells[:-1], cells[-1] | {"outcome": "FAILED: x"}]):
        with pytest.raises(ValueError, match="1 cells failed or are missing, first mpnet · build · spans"):
            matrix({"cells": broken})
