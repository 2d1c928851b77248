"""INT8 of heads over a vocabulary so large that the export stores their matrix once, with the embeddings: it is read transposed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest
import torch

from bertopt.core import Context, Onnx
from bertopt.modeling import checkpoint
from bertopt.passes import ConvertOpenvino, ExportOnnx, FuseOrt, QuantizeInt8, UseSdpa
from bertopt.quantization import tied_heads
from bertopt.runtime.tokenization import Tokenizer
from bertopt.sessions import open_session
from bertopt.stages import onnx_certificate, openvino_certificate
from tests.support.tiny_models import write_tiny

#: As many numbers as the exporter transposes and stores twice, and many more.
VOCABULARY = 1000
#: 2 layers of 6 products, and the head's two.
PRODUCTS = 14
TEXTS = ("the cat sat on the mat .", "a very good film , not bad !", "they ran", "") * 4


class Exported:
    """A masked language model after the export, and after fusions; each in a separate folder."""

    def __init__(self, root: Path) -> None:
        self.source = write_tiny(root / "checkpoint", "bert", "fill-mask", extra={"vocab_size": VOCABULARY})
        with checkpoint.quiet():
            self.eager = checkpoint.load(self.source)
        self.tokenizer = Tokenizer(self.source, self.eager.spec)
        sdpa = UseSdpa()(self.eager, self.context(root / "sdpa")).model
        plain = ExportOnnx()(sdpa, self.context(root / "export")).model
        self.graphs = {"export": plain, "fused": FuseOrt()(plain, self.context(root / "fused")).model}

    def encode(self, texts: Any) -> Any:
        return self.tokenizer.batch(self.tokenizer.encode(texts))

    def context(self, folder: Path) -> Context:
        folder.mkdir()
        return Context(folder, shapes=((2, 8), (3, 16)), texts=TEXTS, encode=self.encode)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exported]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Exported(tmp_path_factory.mktemp("heads"))
    torch.set_num_threads(threads)


@pytest.mark.parametrize("graph", ["export", "fused"])
@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_the_head_is_quantised_too_and_the_embeddings_stay(exported: Exported, tmp_path: Path, graph: str, scheme: str) -> None:
    step, parent = QuantizeInt8(scheme=scheme), exported.graphs[graph]
    assert len(tied_heads.transposed(onnx_ir.load(parent.path).graph)) == 1
    model = step(parent, exported.context(tmp_path / "int8")).model
    session = open_session(model, threads=1)
    assert step.effects(model, session.facts()) == {
        "products with INT8 weights": (PRODUCTS, PRODUCTS), "products in integer kernels": (PRODUCTS, PRODUCTS),
    }  # fmt: skip
    shapes = [tuple(value.shape) for value in floats(model)]
    assert shapes.count((VOCABULARY, 32)) == 1 and (32, VOCABULARY) not in shapes
    assert onnx_certificate.rewritten(model, parent).status == "certified"
    inputs = exported.encode(["the cat sat", "a dog ran on a mat"])
    ours, theirs = session.run(inputs)["logits"], open_session(parent, threads=1).run(inputs)["logits"]
    assert np.linalg.norm(ours - theirs) < 0.1 * np.linalg.norm(theirs)


def floats(model: Onnx) -> list[Any]:
    found = onnx_ir.load(model.path).graph.initializers.values()
    return [value for value in found if value.dtype == onnx_ir.DataType.FLOAT and len(value.shape or ()) == 2]


@pytest.mark.parametrize("graph", ["export", "fused"])
@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_a_head_that_is_kept_in_float_keeps_sharing_its_matrix(exported: Exported, tmp_path: Path, graph: str, scheme: str) -> None:
    parent = exported.graphs[graph]
    (head,) = tied_heads.transposed(onnx_ir.load(parent.path).graph)
    step = QuantizeInt8(scheme=scheme, keep_fp32=(head.name,))
    model = step(parent, exported.context(tmp_path / "int8")).model
    session = open_session(model, threads=1)
    assert step.effects(model, session.facts())["products with INT8 weights"] == (PRODUCTS - 1, PRODUCTS - 1)
    assert [tuple(value.shape) for value in floats(model)].count((VOCABULARY, 32)) == 1
    assert onnx_certificate.rewritten(model, parent).status == "certified"


@pytest.mark.parametrize("graph", ["export", "fused"])
def test_a_head_left_in_float_shows(exported: Exported, graph: str) -> None:
    """A quantiser that passes by what is transposed leaves the largest product of all in float."""
    parent = exported.graphs[graph]
    assert QuantizeInt8().effects(parent, open_session(parent, threads=1).facts())["products with INT8 weights"] == (PRODUCTS, 0)


def test_of_another_row_of_the_head_there_is_no_certificate(exported: Exported, tmp_path: Path) -> None:
    parent = exported.graphs["fused"]
    model = QuantizeInt8()(parent, exported.context(tmp_path / "int8")).model
    whole = onnx_ir.load(model.path)
    head = next(value for value in whole.graph.initializers.values() if value.dtype == onnx_ir.DataType.INT8 and tuple(value.shape) == (32, VOCABULARY))
    other = head.const_value.numpy().copy()
    other[:, [7, 8]] = other[:, [8, 7]]
    head.const_value = onnx_ir.tensor(other, name=head.name)
    onnx_ir.save(whole, tmp_path / "model.onnx")
    assert onnx_certificate.rewritten(Onnx(model.spec, "int8", tmp_path / "model.onnx"), parent).status == "contradicted"


def test_openvino_runs_the_head_in_int8_too(exported: Exported, tmp_path: Path) -> None:
    step, parent = ConvertOpenvino(precision="int8"), exported.graphs["export"]
    model = step(parent, exported.context(tmp_path / "int8")).model
    session = open_session(model, threads=1)
    assert step.effects(model, session.facts()) == {
        "products with INT8 weights and input": (PRODUCTS, PRODUCTS), "products that run in INT8": (PRODUCTS, PRODUCTS),
    }  # fmt: skip
    assert openvino_certificate.certify(model, parent).status == "certified"
    inputs = exported.encode(["the cat sat", "a dog ran on a mat"])
    ours, theirs = session.run(inputs)["logits"], open_session(parent, threads=1).run(inputs)["logits"]
    assert np.linalg.norm(ours - theirs) < 0.1 * np.linalg.norm(theirs)


def test_openvino_keeps_a_head_in_float_that_is_named(exported: Exported, tmp_path: Path) -> None:
    parent = exported.graphs["export"]
    (head,) = tied_heads.transposed(onnx_ir.load(parent.path).graph)
    step = ConvertOpenvino(precision="int8", keep_fp32=(head.name,))
    model = step(parent, exported.context(tmp_path / "int8")).model
    found = step.effects(model, open_session(model, threads=1).facts())
    assert found["products with INT8 weights and input"] == (PRODUCTS - 1, PRODUCTS - 1)
    assert openvino_certificate.certify(model, parent).status == "certified"
