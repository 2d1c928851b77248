"""Ranges of static INT8 that come from few texts are warned of: such stages failed by error_ratio, and nothing said why."""

from __future__ import annotations

from typing import Any

import pytest

from bertopt.pipeline import calibration_texts
from bertopt.recipe import from_dict
from bertopt.results import Stage

STEPS: list[dict[str, Any]] = [
    {"pass": "export_onnx"},
    {"pass": "quantize_int8", "name": "dynamic"},
    {"pass": "quantize_int8", "name": "static", "scheme": "static", "after": "export_onnx"},
    {"pass": "convert_openvino", "name": "plain", "after": "export_onnx"},
    {"pass": "convert_openvino", "name": "openvino", "precision": "int8", "after": "export_onnx"},
    {"pass": "convert_openvino", "name": "not_built", "precision": "int8", "after": "export_onnx"},
]
PRECISIONS = {"export_onnx": "float32", "dynamic": "int8", "static": "int8", "plain": "float32", "openvino": "int8", "not_built": None}


@pytest.mark.parametrize(("texts", "warned"), [(1, ["static", "openvino"]), (7, ["static", "openvino"]), (8, [])])
def test_calibrated_stages_are_named(texts: int, warned: list[str]) -> None:
    recipe = from_dict({"schema_version": 1, "model": "org/name", "device": "cpu", "steps": STEPS})
    rows = [Stage(index=i, name=name, status="failed", precision=kind) for i, (name, kind) in enumerate(PRECISIONS.items())]
    found = calibration_texts.warnings(recipe.steps, rows, texts)
    assert [line.split("'")[1] for line in found] == warned
    count = "1 text" if texts == 1 else f"{texts} texts"
    assert all(f"come from {count} of inputs.texts" in line and "error_ratio; give at least 8" in line for line in found)
