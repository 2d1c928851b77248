"""Shipped recipes: what they are called, and what wins where a name is ambiguous."""

from __future__ import annotations

from pathlib import Path

import pytest

import bertopt
from bertopt.commands import recipes
from bertopt.errors import UsageError
from bertopt.recipe import load


def test_every_recipe_has_one_plain_sentence() -> None:
    rows = recipes.shipped()
    assert [row.name for row in rows] == sorted(path.stem for path in recipes.FOLDER.iterdir())
    assert all(20 < len(row.summary) < 120 and row.summary.endswith(".") for row in rows)


@pytest.mark.parametrize("name", ["cpu_fastest", "recipes/cpu_fastest.yaml"])
def test_a_shipped_recipe_is_found_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert recipes.find(name) == recipes.FOLDER / "cpu_fastest.yaml"
    assert load(recipes.find(name)).deliver == "fastest"


@pytest.mark.parametrize("name", ["cpu_fastest", "cpu_fastest.yaml", "recipes/cpu_fastest.yaml"])
def test_a_local_file_of_that_name_wins(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipes").mkdir()
    Path(name).write_text("mine")
    assert recipes.find(name) == Path(name)


@pytest.mark.parametrize("name", ["cpu_fastest.yaml", "cpu_fastest.yml", "mine/cpu_fastest.yaml", "recipes/cpu_fastest", "/recipes/cpu_fastest.yaml"])
def test_a_file_that_is_not_there_is_no_shipped_recipe(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another recipe than the one that somebody meant would run for an hour, and pass."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"there is no file '{name}'; check the path, or call the shipped recipe by its name: cpu_fastest$"):
        recipes.find(name)


def test_unknown_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="'cpu_fastes' is neither a file here nor a shipped recipe; did you mean 'cpu_fastest'"):
        recipes.find("cpu_fastes")
    with pytest.raises(UsageError, match="or a name that `bertopt recipes` lists"):
        recipes.find("qwertz")
    # What looks like a path is left to the reader of recipes, which names the path and the reason.
    for path in ("mine.yaml", "there/mine.yaml", "mine.json", "x" * 5000):
        assert recipes.find(path) == Path(path)


def test_what_is_no_recipe_is_named() -> None:
    with pytest.raises(UsageError, match="a recipe must be a path, the name of a shipped one, a dict or a Recipe; got NoneType"):
        bertopt.run(None)  # type: ignore[arg-type]
