"""INT8 weights and activations for the matrix products of an ONNX graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from bertopt.core import Context, Onnx, Pass, Result
from bertopt.errors import Unsupported


class QuantizeInt8(Pass[Onnx, Onnx]):
    """Quantise MatMul and Gemm to INT8 with ONNX Runtime. Counts quantised products.

    `dynamic` measures activation scales while it runs, one for the whole padded batch: the same text may answer
    slightly differently beside other neighbours. `Attention` nodes stay in float, and with them the Q, K and V
    projections that `fuse_ort` puts inside them below opset 23: quantise an opset-23 graph.
    """

    scheme: Literal["dynamic"] = Field("dynamic", description="dynamic: activation scales at run time")
    per_channel: bool = Field(True, description="one weight scale an output channel instead of one a tensor")
    reduce_range: bool = Field(False, description="7-bit weights, for CPUs with AVX2 or AVX512 but no VNNI")

    def conflict(self, before: Sequence[Pass[Any, Any]]) -> str | None:
        for step in before:
            if step.name() == "quantize_int8":
                return "the graph is quantised already"
            if step.name() in ("cast_onnx_half", "cast_half"):
                return "ONNX Runtime cannot load a graph quantised after half precision; quantise the float32 graph"
        return None

    def __call__(self, model: Onnx, ctx: Context) -> Result[Onnx]:
        try:
            import onnx
            from onnxruntime.quantization import QuantType, quantize_dynamic
        except ImportError as error:
            raise Unsupported(f"INT8 needs {error.name}; pip install 'bertopt[cpu]'") from error
        if model.precision != "float32":
            raise Unsupported(
                f"quantize_int8 takes a float32 graph; got {model.precision}: ONNX Runtime could not load the result"
            )

        graph = onnx.load(model.path)
        # The exporter's value_info can be stale, which kills the quantiser's shape inference.
        del graph.graph.value_info[:]
        before = _products(graph)
        path = ctx.workdir / "onnx" / "model.onnx"
        path.parent.mkdir()
        big = (model.path.parent / "model.onnx_data").exists()
        quantize_dynamic(
            graph, path, weight_type=QuantType.QInt8, per_channel=self.per_channel, reduce_range=self.reduce_range,
            # An Attention node would become a QAttention: invalid for the standard one, without its mask for a fused one.
            op_types_to_quantize=["MatMul", "Gemm"],
            use_external_data_format=big,
            extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT, "MatMulConstBOnly": True},
        )  # fmt: skip
        if big and not (path.parent / "model.onnx_data").exists():
            _rename_external(path)
        after = _products(onnx.load(path, load_external_data=False))
        return Result(
            Onnx(model.spec, "int8", path), {kind: after[kind] - before.get(kind, 0) for kind in sorted(after)}
        )

    def effects(self, model: Onnx, facts: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
        """Every product with constant weights has INT8 weights; those inside a fused attention node are no products."""
        import onnx_ir

        graph = onnx_ir.load(model.path).graph
        products = [node for node in graph if node.op_type in _PRODUCTS and _weights(node) is not None]
        int8 = sum(_weights(node) == onnx_ir.DataType.INT8 for node in products)
        return {"products with INT8 weights": (max(1, len(products)), int8)}


_PRODUCTS = ("MatMul", "Gemm", "FusedMatMul", "MatMulInteger")


def _weights(node: Any) -> Any:
    """The type of a product's constant second factor, or None where it has none."""
    value = node.inputs[1]
    return value.dtype if value is not None and value.is_initializer() else None


def _products(graph: Any) -> dict[str, int]:
    kinds = ("MatMulInteger", "QAttention", "DynamicQuantizeMatMul", "QGemm")
    counts: dict[str, int] = {}
    for node in graph.graph.node:
        if node.op_type in kinds:
            counts[node.op_type] = counts.get(node.op_type, 0) + 1
    return counts


def _rename_external(path: Any) -> None:
    """ONNX Runtime names external data after the model; the artefact's name is `model.onnx_data`."""
    import onnx_ir

    graph = onnx_ir.load(path)
    onnx_ir.external_data.load_to_model(graph)
    for stale in path.parent.iterdir():
        stale.unlink()
    onnx_ir.save(graph, path, external_data="model.onnx_data")
