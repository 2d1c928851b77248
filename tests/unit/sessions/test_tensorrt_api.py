"""Every TensorRT name and number of arguments that bertopt uses is in the stubs of 10, the bindings of 11, and RTX's."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

import bertopt
from tests.support import tensorrt_api
from tests.support.tensorrt_api import OPTIONAL, RTX_ONLY, USED

PACKAGE = Path(bertopt.__file__).parent
FILES = ("passes/build_tensorrt.py", "sessions/tensorrt.py", "sessions/tensorrt_rtx.py", "system/tensorrt_import.py")
#: Names in those files that hold objects of TensorRT.
OBJECTS = {"trt", "builder", "network", "config", "parser", "profile", "layer", "cache", "flags", "context", "engine"}
RECORD = json.loads(tensorrt_api.RECORD.read_text("utf-8"))


@pytest.mark.parametrize("version", RECORD)
def test_a_recorded_version_has_all_that_is_used(version: str) -> None:
    assert tensorrt_api.problems(RECORD[version], USED) == []
    assert sum(map(len, RECORD[version].values())) > 40


def test_both_major_versions_are_recorded() -> None:
    assert [name.split("-")[-1].split(".")[0] for name in sorted(RECORD, key=lambda one: one.split("-")[-1])] == ["10", "11"]


def test_rtx_has_all_that_is_used() -> None:
    rtx = pytest.importorskip("tensorrt_rtx")
    api = tensorrt_api.of_module(rtx)
    assert tensorrt_api.problems(api, USED) == tensorrt_api.problems(api, RTX_ONLY) == []


def test_what_the_code_uses_is_in_the_table() -> None:
    """Attributes of variables that hold TensorRT's objects; what is reached through other expressions is not seen here."""
    known = {name for table in (USED, RTX_ONLY) for kind, members in table.items() for name in (kind, *members)}
    used = set()
    for file in FILES:
        for node in ast.walk(ast.parse((PACKAGE / file).read_text("utf-8"))):
            if not isinstance(node, ast.Attribute):
                continue
            of = node.value.id if isinstance(node.value, ast.Name) else node.value.attr if isinstance(node.value, ast.Attribute) else ""
            if of.lstrip("_") in OBJECTS and not node.attr.startswith("_"):
                used.add(node.attr)
    # bertopt's own: profiles, the kernel cache, a layer of the inspector's JSON.
    ours = {"get", "context", "keep", "runtime_graphs", "max", "min", "opt", "accepts", "name", "layer", "last"}
    assert used - known - ours == set()


def test_a_change_of_the_api_would_be_seen() -> None:
    name, api = next(iter(RECORD.items()))
    broken = json.loads(json.dumps(api))
    del broken["IExecutionContext"]["set_tensor_address"]
    broken["IOptimizationProfile"]["set_shape"] = "set_shape(self, input: str, shape: Dims)"
    assert tensorrt_api.problems(broken, USED) == [
        "IExecutionContext.set_tensor_address is not there",
        "IOptimizationProfile.set_shape takes [(2, 2)] arguments, bertopt passes 4: set_shape(self, input: str, shape: Dims)",
    ], name
    assert {f"{kind}.{member}" for kind, members in USED.items() for member in members} >= OPTIONAL
