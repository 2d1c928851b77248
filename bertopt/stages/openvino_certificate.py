"""Certify an OpenVINO graph: its weights are the ONNX graph's, bit for bit or within half a step of INT8."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from bertopt.core import Onnx, OpenVino
from bertopt.results.fidelity import Certificate
from bertopt.stages.onnx_certificate import _SMALL, _content
from bertopt.system import openvino_import

if TYPE_CHECKING:
    from bertopt.core import Array


def certify(model: OpenVino, parent: Onnx) -> Certificate:
    """Return `certified` where every large floating constant is one of the ONNX graph's, transposed or not.

    The operators between them are not compared. INT8 weights that SmoothQuant changed have no certificate.
    """
    import onnx_ir as ir

    known: set[Any] = set()
    for value in ir.load(parent.path).graph.initializers.values():
        array: Array = value.const_value.numpy()
        if value.dtype.is_floating_point():
            array = array.astype(np.float32)
            known |= {_content(array), *([_content(array.T)] if array.ndim == 2 else [])}
    graph = openvino_import.openvino().Core().read_model(model.path)
    compared = 0
    for node in graph.get_ops():
        if node.get_type_name() != "Constant":
            continue
        kind = node.get_output_element_type(0).to_string()
        if kind in ("i8", "u8", "boolean") or not kind.startswith(("f", "bf")):
            if kind in ("i8", "u8"):
                return Certificate(
                    status="none", reason="INT8 weights, moved and scaled by NNCF, cannot be compared with the float graph's"
                )
            continue
        array = node.get_data() if hasattr(node, "get_data") else node.data
        if array.size <= _SMALL:
            continue
        compared += 1
        if _content(np.asarray(array, np.float32)) not in known:
            return Certificate(
                status="none", reason=f"the constant '{node.get_friendly_name()}' is none of the ONNX graph's", weights=compared
            )
    return Certificate(status="certified", reason="every weight is the ONNX graph's, bit for bit; operators are not compared", weights=compared)
