"""Rules that hold for every file of bertopt; the arrows between its folders are import-linter's, in pyproject.toml."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "bertopt"
FILES = sorted(PACKAGE.rglob("*.py"))
HEAVY = ("torch", "transformers", "onnx", "onnxruntime", "openvino", "tensorrt")


def module_name(file: Path) -> str:
    parts = [*file.relative_to(PACKAGE.parent).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file) for file in FILES}


def imported(file: Path) -> Iterator[tuple[str, int]]:
    """Every module that `file` imports anywhere, and the line."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{file}:{node.lineno}: imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module, node.lineno


def ids(file: Path) -> str:
    return str(file.relative_to(PACKAGE))


def test_imports_run_one_way() -> None:
    """The contracts of import-linter in pyproject.toml hold: layers, and passes that do not know each other."""
    tool = Path(sys.executable).with_name("lint-imports")
    if not tool.exists():
        pytest.skip("import-linter is not installed, as in `make lowest`; `make check` runs it")
    found = subprocess.run([tool], capture_output=True, text=True, cwd=PACKAGE.parent, check=False)
    assert found.returncode == 0, found.stdout


def test_the_root_is_small() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 9


@pytest.mark.parametrize("file", sorted((PACKAGE / "checks").glob("*.py")), ids=ids)
def test_checks_know_no_runtime(file: Path) -> None:
    assert not {name.split(".")[0] for name, _ in imported(file)} & set(HEAVY)


@pytest.mark.parametrize("file", FILES, ids=ids)
def test_rules_of_every_file(file: Path) -> None:
    text = file.read_text("utf-8")
    assert len(text.splitlines()) <= 300
    assert not [
        name for name, _ in imported(file) if name.split(".")[0] in ("pickle", "cPickle", "dill", "shelve", "joblib")
    ]
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    printing = [node.lineno for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"]
    assert not printing or file.parent.name == "cli"


@pytest.mark.parametrize(
    "statement", ["import bertopt", "import bertopt.recipe", "import bertopt.cli", "import bertopt.pipeline"]
)
def test_nothing_heavy_is_imported(statement: str) -> None:
    script = f"import sys; {statement}; print(*({set(HEAVY)!r} & set(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=PACKAGE.parent, check=True
    )
    assert found.stdout.strip() == ""


def test_importing_bertopt_is_almost_nothing() -> None:
    script = "import sys; import bertopt; print(*(name for name in sys.modules if name.startswith('bertopt')))"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=PACKAGE.parent, check=True
    )
    assert found.stdout.split() == ["bertopt._version", "bertopt"]


@pytest.mark.parametrize("file", FILES, ids=ids)
def test_openvino_is_imported_by_one_module_alone(file: Path) -> None:
    """Imported plainly, it and NNCF phone home."""
    found = {name.split(".")[0] for name, _ in imported(file)} & {"openvino", "nncf"}
    assert not found or file.name == "openvino_import.py"


@pytest.mark.parametrize("file", FILES, ids=ids)
def test_onnx_runtime_is_imported_by_one_module_alone(file: Path) -> None:
    """Imported plainly, it phones home; `onnxruntime_import` imports it by its name."""
    assert "onnxruntime" not in {name.split(".")[0] for name, _ in imported(file)}
