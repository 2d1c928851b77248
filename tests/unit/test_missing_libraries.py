"""A library that is not installed is something that the machine lacks: exit code 4, wherever it is noticed, with the install line."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from bertopt import ray
from bertopt.commands import bulk_files
from bertopt.errors import Unsupported, missing_library
from bertopt.recipe.texts import Texts
from bertopt.spec import Spec
from tests.support.messages import ROOT

PACKAGE = ROOT / "bertopt"
ONE_FUNCTION = {"missing_library", "missing_module"}


def raised_without(path: Path) -> list[str]:
    """Return where a handler of an import that failed raises something else."""
    found = []
    for handler in (node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ExceptHandler)):
        caught = ast.unparse(handler.type) if handler.type else ""
        for node in (inner for line in handler.body for inner in ast.walk(line)):
            if caught in ("ImportError", "ModuleNotFoundError") and isinstance(node, ast.Raise) and node.exc:
                called = {name.attr if isinstance(name, ast.Attribute) else name.id for name in ast.walk(node.exc) if isinstance(name, ast.Name | ast.Attribute)}
                found += [] if called & ONE_FUNCTION else [f"{path.relative_to(PACKAGE)}:{node.lineno}"]
    return found


def test_all_places_use_one_function() -> None:
    assert [place for path in sorted(PACKAGE.rglob("*.py")) for place in raised_without(path)] == []


def test_it_is_the_machine_that_lacks_it() -> None:
    error = missing_library("signatures need cryptography", "'bertopt[sign]'", "leave them out")
    assert isinstance(error, Unsupported) and error.exit_code == 4
    assert str(error) == "signatures need cryptography; pip install 'bertopt[sign]', or leave them out"


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(Unsupported, match="Parquet needs pyarrow; pip install pyarrow, or give JSON Lines or CSV"):
        bulk_files.columns(tmp_path / "in.parquet")


@pytest.mark.parametrize("call", [lambda: ray.predict(None, "artifact"), lambda: ray.application("artifact"), lambda: next(ray.answers((), "artifact", "", 1))])
def test_rays_functions_without_ray(call: object, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ray", "ray.data", "ray.serve"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(Unsupported, match=r"pip install 'bertopt\[ray\]'"):
        call()  # type: ignore[operator]


def test_labels_without_scikit_learn_are_refused_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    classifier = Spec.model_construct(task="text-classification", labels=("bad", "good"), regression=False, multi_label=False)
    labelled = Texts(("a film",), ("good",), "texts.jsonl")
    with pytest.raises(Unsupported, match=r"labelled texts need scikit-learn; pip install 'bertopt\[metrics\]', or give texts without labels"):
        labelled.check_labels(classifier)
    Texts(("a film",)).check_labels(classifier)
    Texts(("a film",), ("4.5",), "texts.jsonl").check_labels(classifier.model_copy(update={"regression": True, "labels": ("stars",)}))
