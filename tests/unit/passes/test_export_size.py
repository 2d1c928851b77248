"""An exported graph holds every weight once, as products read it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bertopt.core import Context
from bertopt.errors import Unsupported
from bertopt.modeling import checkpoint
from bertopt.passes import ExportOnnx, QuantizeInt8
from bertopt.passes.export_onnx import _check_size
from bertopt.quantization import qdq
from bertopt.stages import certificates
from tests.support.tiny_models import write_tiny


def graph(*sizes: int) -> Any:
    values = {str(i): SimpleNamespace(const_value=SimpleNamespace(nbytes=size)) for i, size in enumerate(sizes)}
    return SimpleNamespace(graph=SimpleNamespace(initializers=values))


def test_a_layer_that_is_written_many_times_is_refused_and_shared_embeddings_are_not() -> None:
    network = torch.nn.Module()
    network.embeddings, network.layer = torch.nn.Linear(1024, 4096, bias=False), torch.nn.Linear(1024, 1024, bias=False)
    network.again = network.layer
    embeddings, layer = 16 * 2**20, 4 * 2**20
    _check_size(graph(embeddings, layer), network)
    _check_size(graph(embeddings, embeddings, layer), network)
    with pytest.raises(Unsupported, match="wrote 64 MiB of weights where the network has 20: it stored some of them several times"):
        _check_size(graph(embeddings, *[layer] * 12), network)


@pytest.mark.parametrize("family", ["deberta-v2", "deberta", "albert", "mpnet"])
def test_weights_that_several_products_share_are_quantised_too(family: str, tmp_path: Path) -> None:
    """Weights of 9,216 elements: smaller ones the exporter transposes itself, whatever reads them."""
    onnx_ir = pytest.importorskip("onnx_ir")
    reference = checkpoint.load(write_tiny(tmp_path / "checkpoint", family, extra={"hidden_size": 96, "intermediate_size": 128}))
    for name in ("graph", "int8"):
        (tmp_path / name).mkdir()
    exported = ExportOnnx()(reference, Context(tmp_path / "graph")).model
    graph = onnx_ir.load(exported.path).graph
    assert [node.name for node in graph if node.op_type == "Transpose" and node.inputs[0].is_initializer()] == []
    assert certificates.certify(exported, reference).status == "certified"
    if family.startswith("deberta"):
        # Those of the table of distances are of constants alone: nothing that a text is has a part in them.
        assert len(qdq.products(graph)) == (4 if family == "deberta" else 6) * reference.spec.layers + 2
    found = QuantizeInt8()(exported, Context(tmp_path / "int8")).changes
    # Six products a layer, or four where one is of query, key and value, and the head's.
    assert found["MatMulInteger"] >= (4 if family == "deberta" else 6) * reference.spec.layers, found
