"""Graphs on disk: weights inside or beside the file, each matrix once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from bertopt.core import Context
from bertopt.modeling import checkpoint
from bertopt.passes import ExportOnnx, UseSdpa
from bertopt.quantization import onnx_files
from tests.support.tiny_models import Tiny


def graph(*matrices: np.ndarray) -> Any:
    """x · W1 · W2 …"""
    value = given = ir.val("x", dtype=ir.DataType.FLOAT, shape=ir.Shape(["N", 16]))
    constants, nodes = [], []
    for number, matrix in enumerate(matrices):
        constants.append(ir.val(f"w{number}", const_value=ir.tensor(matrix, name=f"w{number}")))
        nodes.append(ir.node("MatMul", [value, constants[-1]], name=f"times{number}"))
        value = nodes[-1].outputs[0]
        value.name, value.dtype = f"y{number}", ir.DataType.FLOAT
    made = ir.Graph([given], [value], nodes=nodes, initializers=constants, opset_imports={"": 23}, name="g")
    return ir.Model(made, ir_version=10)


def matrix(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(16, 16)).astype(np.float32)


def test_equal_matrices_are_written_once(tmp_path: Path) -> None:
    path = onnx_files.save(graph(matrix(0), matrix(1), matrix(0), matrix(0)), tmp_path / "onnx")
    read = ir.load(path).graph
    assert len(read.initializers) == 2
    assert [node.inputs[1].name for node in read] == ["w0", "w1", "w0", "w0"]


def test_a_graph_saved_again_leaves_nothing_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_files, "INLINE_BYTES", 0)
    matrices = [matrix(seed) for seed in range(3)]
    onnx_files.save(graph(*matrices), tmp_path)
    assert (tmp_path / onnx_files.DATA).stat().st_size == 3 * matrices[0].nbytes
    # The second graph still reads its weights from the file that it replaces.
    path = onnx_files.save(ir.load(tmp_path / onnx_files.MODEL), tmp_path)
    assert (tmp_path / onnx_files.DATA).stat().st_size == 3 * matrices[0].nbytes
    assert np.array_equal(ir.load(path).graph.initializers["w2"].const_value.numpy(), matrices[2])
    monkeypatch.undo()
    onnx_files.save(ir.load(path), tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == [onnx_files.MODEL]


def test_layers_that_share_weights_are_exported_once(tiny: Tiny, tmp_path: Path) -> None:
    """ALBERT's two layers here are one: the graph holds each of its matrices once."""
    reference = checkpoint.load(tiny("albert"))
    model = UseSdpa()(reference, Context(tmp_path)).model
    exported = ExportOnnx()(model, Context(tmp_path)).model
    weights = sum(parameter.numel() * 4 for parameter in model.network.parameters())
    written = sum(v.const_value.nbytes for v in ir.load(exported.path).graph.initializers.values())
    assert written <= 1.02 * weights + 4096
