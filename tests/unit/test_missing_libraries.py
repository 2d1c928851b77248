"""A library that is not installed is something that the machine lacks: exit code 4, wherever it is noticed, with the install line."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bertopt import ray
from bertopt.commands import bulk_files
from bertopt.core import Onnx
from bertopt.errors import ResourceError, Unsupported, missing_library
from bertopt.passes import CastOnnxHalf, ExportOnnx, FuseOrt, QuantizeInt8
from bertopt.recipe.texts import Texts
from bertopt.sessions.onnxruntime import OnnxRuntimeSession
from bertopt.spec import Spec
from bertopt.system import openvino_import
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


def test_every_handler_tells_a_missing_library_from_a_broken_one() -> None:
    """A module that is not there is no other error of an import, unless the error itself is looked at or quoted."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for handler in (node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ExceptHandler)):
            if handler.type is not None and ast.unparse(handler.type) == "ImportError" and "missing_library" in ast.unparse(handler):
                found += [] if "failed=error" in ast.unparse(handler) or "({error})" in ast.unparse(handler) else [f"{path.relative_to(PACKAGE)}:{handler.lineno}"]
    assert found == []


LOADER = "libonnxruntime.so.1: cannot open shared object file: No such file or directory"


def broken(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, error: str = f"ImportError({LOADER!r})") -> None:
    """Put a package that cannot be imported in the place of `name`."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(f"raise {error}\n")
    monkeypatch.syspath_prepend(folder)
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)


def test_an_onnxruntime_that_cannot_be_loaded_is_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Onnx(Spec.model_construct(task="text-classification"), "float32", tmp_path / "model.onnx")
    broken("onnxruntime", tmp_path, monkeypatch)
    with pytest.raises(Unsupported, match=r"running ONNX needs onnxruntime; its import fails \(libonnxruntime\.so\.1: cannot open shared object file: .*bertopt doctor"):
        OnnxRuntimeSession(model, "cpu")
    (tmp_path / "onnxruntime" / "__init__.py").write_text("import onnxruntime.capi\n")
    with pytest.raises(Unsupported, match=r"its import fails \(No module named 'onnxruntime.capi'\)"):
        OnnxRuntimeSession(model, "cpu")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(Unsupported, match=r"running ONNX needs onnxruntime; pip install 'bertopt\[onnxruntime\]'$"):
        OnnxRuntimeSession(model, "cpu")


@pytest.mark.parametrize(("module", "call"), [("openvino", openvino_import.openvino), ("nncf", openvino_import.nncf)])
def test_an_openvino_that_cannot_be_loaded_is_not_missing(module: str, call: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(module, tmp_path, monkeypatch, "ImportError('numpy.core.multiarray failed to import\\nsee the log')")
    with pytest.raises(Unsupported, match=rf"need.* {module}; its import fails \(numpy\.core\.multiarray failed to import\): install it again"):
        call()


@pytest.mark.parametrize(("pass_", "module"), [(QuantizeInt8(), "onnxruntime"), (ExportOnnx(), "onnxscript"), (FuseOrt(), "onnxscript"), (CastOnnxHalf(dtype="float16"), "onnx_ir")])
def test_a_pass_names_the_library_that_cannot_be_loaded(pass_: Any, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(module, tmp_path, monkeypatch)
    model: Any = SimpleNamespace(precision="float32", path=tmp_path)
    with pytest.raises(Unsupported, match=rf"needs .*{module}.*; its import fails \(libonnxruntime"):
        pass_(model, None)


def test_it_is_the_machine_that_lacks_it() -> None:
    error = missing_library("signatures need cryptography", "'bertopt[sign]'", "leave them out")
    assert isinstance(error, Unsupported) and error.exit_code == 4
    assert str(error) == "signatures need cryptography; pip install 'bertopt[sign]', or leave them out"


@pytest.mark.parametrize("said", ["Exception caught: std::bad_alloc", "/x/y.so: failed to map segment from shared object", "/x/y.so: cannot allocate memory in static TLS block"])
def test_an_import_without_memory_is_no_broken_library(said: str) -> None:
    """Under `ulimit -v` it read: onnxruntime, install it again."""
    error = missing_library("running ONNX needs onnxruntime", "'bertopt[onnxruntime]'", failed=ImportError(said))
    assert isinstance(error, ResourceError) == ("TLS" not in said)
    assert "install it again" not in str(error) or "TLS" in said


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
