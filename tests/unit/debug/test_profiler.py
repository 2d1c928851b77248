"""Profiles of tiny models: the rows sum to the call, layers and classes are told apart. Nothing here asserts a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bertopt.core import Compiled, Context, Engine, Model, Pass
from bertopt.debug import profiler, timed_calls
from bertopt.debug.attention_maps import MOST_TOKENS, attention
from bertopt.debug.graph_layers import Node, layers_of
from bertopt.errors import Unsupported, UsageError
from bertopt.modeling import checkpoint
from bertopt.passes import CompileTorch, ConvertOpenvino, ExportOnnx, FuseOrt, PackSequences, UseSdpa
from bertopt.report import profile_page
from bertopt.report.profile import AFTER, BEFORE, Attention, Profile, class_of
from tests.support.exports import Exports
from tests.support.tiny_models import NORM_FIRST_FAMILIES, Tiny, write_tiny

LAYERS = {BEFORE, "layer 0", "layer 1", AFTER}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_calls, "LEAST_RUNS", 2)
    monkeypatch.setattr(timed_calls, "MOST_RUNS", 3)


def context(folder: Path, name: str) -> Context:
    (folder / name).mkdir()
    return Context(folder / name, shapes=((2, 8),))


SDPA = UseSdpa()
LINES: dict[str, tuple[Pass[Any, Any], ...]] = {
    "eager": (), "packed": (PackSequences(),), "onnx": (SDPA, ExportOnnx()), "decomposed": (SDPA, ExportOnnx(opset=20)),
    "fused": (SDPA, ExportOnnx(), FuseOrt()), "openvino": (SDPA, ExportOnnx(), ConvertOpenvino()),
}  # fmt: skip


def profiled(model: Model, source: Path, folder: Path, shape: tuple[int, int] | None = (2, 8)) -> Profile:
    (folder / "scratch").mkdir()
    found = profiler.profile(model, source, "cpu", shape, [], folder / "scratch")
    assert sum(row.ms for row in found.rows) + found.between_ms == pytest.approx(found.wall_ms)
    assert sum(found.by_layer().values()) == pytest.approx(sum(found.by_class().values()))
    assert all(row.ms >= 0 and row.calls > 0 for row in found.rows)
    return found


@pytest.mark.parametrize("form", LINES)
def test_rows_sum_to_the_call_and_name_layers_and_classes(form: str, tiny: Tiny, export: Exports, tmp_path: Path) -> None:
    if form in ("fused", "openvino"):
        pytest.importorskip({"fused": "onnxruntime", "openvino": "openvino"}[form])
    model: Any = checkpoint.load(tiny())
    for step in LINES[form]:
        model = export.apply(step, model, context(tmp_path, step.name())).model
    found = profiled(model, tiny(), tmp_path)
    # OpenVINO counts whole microseconds: what is shorter is not seen.
    assert LAYERS - {BEFORE, AFTER} <= set(found.by_layer())
    assert form == "openvino" or set(found.by_layer()) >= LAYERS
    assert "matrix product" in found.by_class()
    assert form == "openvino" or {"attention", "normalisation", "embedding"} <= set(found.by_class())


def test_a_compiled_network_has_no_layers_but_kernels(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "model", extra={"num_hidden_layers": 1})
    model = CompileTorch()(checkpoint.load(source), context(tmp_path, "compiled")).model
    assert isinstance(model, Compiled)
    found = profiled(model, source, tmp_path)
    assert list(found.by_layer()) == ["other"]
    assert "compiled kernels" in found.by_class()


@pytest.mark.parametrize("family", ["albert", "distilbert", "modernbert", "deberta", "deberta-v2", "ernie", "rembert", *NORM_FIRST_FAMILIES])
def test_layers_of_other_families(family: str, tiny: Tiny, tmp_path: Path) -> None:
    found = profiled(checkpoint.load(tiny(family)), tiny(family), tmp_path)
    assert set(found.by_layer()) >= {BEFORE, "layer 0", "layer 1"}


def test_texts_are_one_batch(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    found = profiler.profile(checkpoint.load(tiny()), tiny(), "cpu", None, ["a cat", "the dog ran on"], tmp_path / "scratch")
    assert (found.batch, found.sequence) == (2, 6)


def test_what_cannot_be_profiled_says_so(tiny: Tiny, tmp_path: Path) -> None:
    model = checkpoint.load(tiny())
    with pytest.raises(Unsupported, match="on the CPU"):
        profiler.profile(model, tiny(), "cuda", None, [], tmp_path)
    with pytest.raises(UsageError, match="must fit the model's 64 tokens; got 1 × 65"):
        profiler.profile(model, tiny(), "cpu", (1, 65), [], tmp_path)
    with pytest.raises(Unsupported, match="profile the ONNX stage"):
        profiler._profiler(Engine(model.spec, "float16", tmp_path, "tensorrt", "11", (), (), ""), tmp_path)


def test_layers_follow_the_values() -> None:
    # Two layers: projections, attention with a mask of both, residual, norm; then a head.
    nodes = [
        Node("embedding", "Gather", ()), Node("mask", "Cast", ()),
        Node("q0", "MatMul", ("embedding",)), Node("a0", "Attention", ("q0", "mask")),
        Node("add0", "Add", ("a0", "embedding")), Node("norm0", "LayerNormalization", ("add0",)),
        Node("v1", "MatMul", ("norm0",)), Node("q1", "MatMul", ("norm0",)), Node("s1", "Softmax", ("q1", "mask")),
        Node("p1", "MatMul", ("s1", "v1")), Node("add1", "Add", ("p1", "norm0")),
        Node("norm1", "LayerNormalization", ("add1",)), Node("head", "Gemm", ("norm1",)),
    ]  # fmt: skip
    found = layers_of(nodes, 2)
    assert {name for name, layer in found.items() if layer == BEFORE} == {"embedding", "mask"}
    assert {name for name, layer in found.items() if layer == "layer 0"} == {"q0", "a0", "add0", "norm0"}
    assert {name for name, layer in found.items() if layer == "layer 1"} == {"v1", "q1", "s1", "p1", "add1", "norm1"}
    assert found["head"] == AFTER
    assert layers_of(nodes, 3) == {}


def test_classes() -> None:
    assert [class_of(name) for name in ("aten::addmm", "FusedMatMul", "FullyConnected")] == ["matrix product"] * 3
    assert class_of("aten::something_new") == "other"


@pytest.mark.parametrize("family", ["bert", "ernie", "data2vec-text", "rembert"])
def test_attention_is_the_references_and_sums_to_one(tiny: Tiny, family: str) -> None:
    found = attention(checkpoint.load(tiny(family)), tiny(family), "the cat sat on the mat")
    assert found.tokens == ["[CLS]", "the", "cat", "sat", "on", "the", "mat", "[SEP]"]
    assert (len(found.layers), len(found.layers[0]), len(found.layers[0][0])) == (2, 8, 8)
    assert all(sum(row) == pytest.approx(1, abs=1e-2) for layer in found.layers for row in layer)
    long = attention(checkpoint.load(tiny(family)), tiny(family), "the cat " * 60)
    assert len(long.tokens) == MOST_TOKENS


def test_the_page_shows_the_attention_as_the_references(tiny: Tiny, tmp_path: Path) -> None:
    found = profiled(checkpoint.load(tiny()), tiny(), tmp_path)
    bare = profile_page.page(found)
    assert "Attention" not in bare and bare.count("<svg") == 1
    evil = "<script>alert(1)</script>"
    found.attention = Attention(text=evil, tokens=["[CLS]", evil], layers=[[[0.9, 0.1], [0.5, 0.5]]])
    text = profile_page.page(found)
    assert "Attention of the fp32 reference" in text and "not of this artefact" in text
    assert text.count("<svg") == 2 and "<script" not in text
    # Four cells of three shades.
    assert text.count('class="cells"') == 3
