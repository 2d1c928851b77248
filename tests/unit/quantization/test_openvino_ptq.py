"""What static INT8 of OpenVINO counts as a product."""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13 as op

from bertopt.quantization import openvino_ptq


def test_products_of_constants_alone_are_none() -> None:
    """DeBERTa projects its table of relative positions in every layer: the runtime computes that once, in float32."""
    tokens = op.parameter([-1, 4], np.float32, name="tokens")
    table, weights = (op.constant(np.full((4, 4), value, np.float32)) for value in (1.0, 2.0))
    position = op.matmul(op.add(table, op.constant(np.float32(1))), weights, False, True)
    position.set_friendly_name("of constants")
    projected = op.matmul(op.relu(tokens), weights, False, True)
    projected.set_friendly_name("of tokens")
    graph = ov.Model([op.matmul(projected, position, False, True)], [tokens])
    assert [node.get_friendly_name() for node in openvino_ptq.products(graph)] == ["of tokens"]
