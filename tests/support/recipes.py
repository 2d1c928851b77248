"""Recipes as text, and the mistakes that are found in one."""

from __future__ import annotations

import pytest

from bertopt.errors import UsageError
from bertopt.recipe.parser import Recipe, parse

HEAD = "schema_version: 1\nmodel: pkg://some_package/model\n"
SDPA, EXPORT, HALF = "  - pass: use_sdpa\n", "  - pass: export_onnx\n", "  - pass: cast_half\n"


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
