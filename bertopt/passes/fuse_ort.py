"""Transformer fusions for ONNX Runtime."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

from pydantic import Field

from bertopt.core import Context, Onnx, Pass, Result, RuntimeFacts
from bertopt.errors import Unsupported, missing_library


class FuseOrt(Pass[Onnx, Onnx]):
    """Fuse to ONNX Runtime's own operators: attention (below opset 23), skip-LayerNorm, bias-GELU.

    The attention mask stays as it is, added to the scores, so every padding pattern survives. Counts fused nodes.
    """

    incompatible_with: ClassVar[dict[str, str]] = {
        "fuse_ort": "the graph is fused already",
        "quantize_int8": "fusions look for float products; fuse before quantize_int8",
        "cast_onnx_half": "fuse before cast_onnx_half, which knows the fused operators",
    }

    attention: bool = Field(True, description="insist that every layer's attention is one node, native or fused")

    def __call__(self, model: Onnx, ctx: Context) -> Result[Onnx]:
        try:
            import onnx_ir
            from onnxscript.rewriter.ort_fusions import optimize_for_ort
        except ImportError as error:
            raise missing_library("fusion needs onnx_ir and onnxscript", "'bertopt[cpu]'", failed=error) from error
        from bertopt.quantization import onnx_files

        graph = onnx_ir.load(model.path)
        before = _fused(graph)
        graph, _ = optimize_for_ort(graph)
        fused = _fused(graph)
        attention = _attention(graph)
        if self.attention and attention != model.spec.layers:
            raise Unsupported(
                f"expected {model.spec.layers} attention nodes, one a layer; got {attention}; "
                "export after use_sdpa, or set attention: false to fuse only the rest"
            )
        if not fused:
            raise Unsupported(
                f"none of ONNX Runtime's fused operators fits this {model.spec.family} graph; leave fuse_ort out"
            )
        path = onnx_files.save(graph, ctx.workdir / "onnx")
        changes = {kind: fused[kind] - before[kind] for kind in sorted(fused)}
        return Result(Onnx(model.spec, model.precision, path), changes)

    def effects(self, model: Onnx, facts: RuntimeFacts) -> dict[str, tuple[int, int]]:
        import onnx_ir

        graph = onnx_ir.load(model.path)
        found = {"fused node, or more": (1, min(1, sum(_fused(graph).values())))}
        return found | ({"attention nodes": (model.spec.layers, _attention(graph))} if self.attention else {})


def _attention(graph: Any) -> int:
    """Nodes that are a whole layer's attention: the standard's, or ONNX Runtime's."""
    return sum(node.op_type in ("Attention", "MultiHeadAttention") for node in graph.graph)


def _fused(graph: Any) -> Counter[str]:
    return Counter(node.op_type for node in graph.graph if node.domain == "com.microsoft")
