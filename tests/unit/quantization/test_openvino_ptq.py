"""What static INT8 of OpenVINO counts as a product."""

from __future__ import annotations

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op

from bertopt.core import Spec
from bertopt.quantization import openvino_ptq

SPEC = Spec(family="bert", task="text-classification", inputs=("input_ids", "attention_mask"), outputs=("logits",),
            layers=1, heads=2, hidden=16, vocabulary=100, token_types=1, pad_id=0, max_length=32, text_length=32,
            parameters=1)  # fmt: skip


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


@pytest.mark.parametrize("scores", [[0.99, float("nan")], [float("nan"), 0.99], [0.99, 0.5]])
def test_a_held_out_answer_that_is_no_number_is_the_worst(monkeypatch: pytest.MonkeyPatch, scores: list[float]) -> None:
    """Wherever it stands among the others, its products go back to float32."""
    answers = iter([scores, [1.0, 1.0]])
    monkeypatch.setattr(openvino_ptq, "products", lambda graph: [])
    monkeypatch.setattr(openvino_ptq, "_answers", lambda graph, spec, samples: list(samples))
    monkeypatch.setattr(openvino_ptq, "_once", lambda graph, samples, kept, options: graph)
    monkeypatch.setattr(openvino_ptq, "_cosines", lambda truth, got: next(answers))
    monkeypatch.setattr(openvino_ptq, "_most_to_gain", lambda graph, spec, samples, truth: (f"of sample {samples[0]['row']}",))
    samples = [{"row": row} for row in range(openvino_ptq.HELD_OUT + 1)]  # rows 0 and 7 are held out
    options = openvino_ptq.Options("mixed", "mean_min_max", None, False, (), min_cosine=0.9)
    _, kept = openvino_ptq.quantize(None, SPEC, samples, options)
    assert kept == (f"of sample {0 if scores[0] != scores[0] else 7}",)


@pytest.mark.parametrize(("channels", "uneven"), [([1.0, 0.02], False), ([1.0, 0.0], False), ([1.0, 5e-3], True), ([4e-5, 3e-5], True)])
@pytest.mark.parametrize("transposed", [True, False])
def test_products_with_a_channel_of_small_weights_are_found(channels: list[float], uneven: bool, transposed: bool) -> None:
    """NNCF's least step is a hundredth of the matrix's: the smaller of two numbers 1 : 20,000 had two levels."""
    tokens = op.parameter([-1, 3], np.float32, name="tokens")
    matrix = np.outer(channels, [1.0, -0.5, 0.25]).astype(np.float32)
    product = op.matmul(tokens, op.constant(matrix if transposed else matrix.T.copy()), False, transposed)
    product.set_friendly_name("head")
    assert openvino_ptq.uneven_products(ov.Model([product], [tokens])) == ["head"] * uneven


def test_they_stay_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the options say."""
    monkeypatch.setattr(openvino_ptq, "products", lambda graph: [])
    monkeypatch.setattr(openvino_ptq, "uneven_products", lambda graph: ["head", "named"])
    monkeypatch.setattr(openvino_ptq, "_answers", lambda graph, spec, samples: [])
    monkeypatch.setattr(openvino_ptq, "_once", lambda graph, samples, kept, options: kept)
    options = openvino_ptq.Options("mixed", "minmax", None, False, (), min_cosine=None)
    assert openvino_ptq.quantize(None, SPEC, [{"row": 0}], options) == (("head", "named"), ("head", "named"))
