"""Buckets of distances in graphs: the same as transformers', and whole numbers from the beginning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bertopt.core import Context
from bertopt.modeling import checkpoint
from bertopt.passes import ExportOnnx
from tests.support.tiny_models import write_tiny

#: Families with buckets, and configurations that differ in them.
MODELS = [
    ("mpnet", {}), ("mpnet", {"max_position_embeddings": 402}), ("deberta-v2", {}), ("deberta-v2", {"max_relative_positions": 20}),
    ("deberta-v2", {"position_buckets": 32, "max_position_embeddings": 400}), ("deberta-v2", {"position_buckets": -1}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "extra"), MODELS, ids=str)
def test_a_graph_has_transformers_buckets_at_every_length(family: str, extra: dict[str, Any], tmp_path: Path) -> None:
    model = checkpoint.load(write_tiny(tmp_path / "model", family, "token-classification", extra=extra))
    network, longest = model.network, model.spec.max_length
    example = network.example(2, 16)
    batch, sequence = torch.export.Dim("batch"), torch.export.Dim("sequence", max=longest)
    graph = torch.export.export(network, example, dynamic_shapes={"tensors": tuple({0: batch, 1: sequence} for _ in example)}).module()
    for rows, tokens in ((1, 1), (1, 2), (3, 17), (1, longest)):
        inputs = network.example(rows, tokens)
        with torch.inference_mode():
            expected, got = network(*inputs)[0], graph(*inputs)[0]
        assert torch.allclose(got, expected, atol=1e-6 * float(expected.abs().max())), (rows, tokens)


@pytest.mark.parametrize("family", ["mpnet", "deberta-v2"])
def test_no_graph_computes_a_logarithm(family: str, tmp_path: Path) -> None:
    """In OpenVINO's bfloat16 and in float16 it was rounded, and many distances fell into the bucket beside theirs."""
    import onnx_ir

    model = checkpoint.load(write_tiny(tmp_path / "model", family))
    (folder := tmp_path / "graph").mkdir()
    graph = onnx_ir.load(ExportOnnx()(model, Context(folder)).model.path).graph
    assert not {"Log", "Ceil", "Floor"} & {node.op_type for node in graph}


def test_run_eagerly_it_is_transformers_own_code(tmp_path: Path) -> None:
    import transformers

    for family in ("mpnet", "deberta-v2"):
        model = checkpoint.load(write_tiny(tmp_path / family, family))
        plain = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / family).eval()
        inputs = dict(zip(model.spec.inputs, model.network.example(2, 40), strict=True))
        with torch.inference_mode():
            assert torch.equal(model.network(*inputs.values())[0], plain(**inputs).logits), family
