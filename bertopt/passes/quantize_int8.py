"""INT8 weights and activations for the matrix products of an ONNX graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from bertopt.core import Context, Int8Rounding, Onnx, Pass, Result, RuntimeFacts
from bertopt.errors import Unsupported, missing_library
from bertopt.system import environment, onnxruntime_import, temporary_directory

#: What `quantize_dynamic` adds to the name of a Gemm, which it makes a MatMul and an Add, quantised or not.
_SPLIT = "_MatMul"
#: ONNX Runtime's kernels that multiply integers by constant weights.
_KERNELS = ("MatMulIntegerToFloat", "DynamicQuantizeMatMul", "MatMulInteger", "QLinearMatMul", "QGemm")
#: Operators that multiply by a matrix, quantised or not.
_PRODUCTS = ("MatMul", "Gemm", "FusedMatMul", "MatMulInteger")


class QuantizeInt8(Pass[Onnx, Onnx]):
    """Quantise MatMul and Gemm to INT8 for ONNX Runtime. Counts quantised products.

    `dynamic` computes activation scales at run time, one for the whole padded batch: a text's output may differ
    slightly beside other texts. `static` measures them once, on the recipe's texts: outputs do not depend on the batch,
    and nothing is measured at run time. Only inputs of products are quantised; attention, GELU, normalisation, residual
    sums and layers after pooling stay in float and fuse as before. So do the Q, K and V projections that `fuse_ort`
    puts inside attention below opset 23: quantise an opset-23 graph. A head over the vocabulary that shares its matrix
    with the embeddings gets a separate one; the embeddings stay as they are.
    """

    depends_on_cpu: ClassVar[bool] = True
    incompatible_with: ClassVar[dict[str, str]] = {
        "quantize_int8": "the graph is quantised already",
        "cast_onnx_half": "ONNX Runtime cannot load a graph quantised after half precision; quantise the float32 graph",
        "cast_half": "ONNX Runtime cannot load a graph quantised after half precision; quantise the float32 graph",
    }

    scheme: Literal["dynamic", "static"] = Field(
        "dynamic", description="dynamic: activation scales at run time; static: calibrated on the recipe's texts"
    )
    per_channel: bool = Field(True, description="one weight scale per output channel instead of one per tensor")
    reduce_range: bool | None = Field(
        None, description="7-bit weights; by default where this CPU would saturate with 8 bits (AVX2 or AVX512 without VNNI)"
    )
    keep_fp32: tuple[str, ...] = Field((), description="names of products, or patterns (*), to leave in float32")
    calibration: Literal["minmax", "percentile", "entropy"] | None = Field(
        None, description="static: what range of an activation is kept (default: minmax)"
    )
    samples: int | None = Field(None, ge=8, description="static: texts calibrated on (default: 128)")
    symmetric: bool = Field(False, description="static: zero points of 0, which build_tensorrt needs; slower in ONNX Runtime")
    smooth_quant: float | None = Field(
        None, gt=0, lt=1, description="static: alpha of SmoothQuant, which moves large channels into the weights"
    )

    def conflict(self, before: Sequence[Pass[Any, Any]]) -> str | None:
        if self.scheme == "dynamic":
            for name in ("calibration", "samples", "smooth_quant"):
                if getattr(self, name) is not None:
                    return f"{name} goes with scheme: static; dynamic measures no texts"
            if self.symmetric:
                return "symmetric goes with scheme: static; dynamic chooses its zero points while it runs"
        return super().conflict(before)

    def int8_rounding(self) -> Int8Rounding:
        bits: Literal[7, 8] | None = None if self.reduce_range is None else 7 if self.reduce_range else 8
        return Int8Rounding("static" if self.scheme == "static" else "batch", smooth_quant=self.smooth_quant, weight_bits=bits)

    def device_conflict(self, device: str, before: Sequence[Pass[Any, Any]]) -> str | None:
        if device == "cuda" and self.scheme == "static" and not self.symmetric:
            return (
                "ONNX Runtime has no static INT8 products for CUDA and would run them in float; say device: cpu, or "
                "symmetric: true for build_tensorrt"
            )
        return None

    def __call__(self, model: Onnx, ctx: Context) -> Result[Onnx]:
        try:
            import onnx_ir

            onnxruntime_import.module()
        except ImportError as error:
            raise missing_library("INT8 needs onnx_ir and onnxruntime", "'bertopt[cpu]'", failed=error) from error
        if model.precision != "float32":
            raise Unsupported(
                f"quantize_int8 takes a float32 graph; got {model.precision}, of which ONNX Runtime could not load the result: "
                "put it before the pass that cast or quantised"
            )
        from bertopt.quantization import qdq, tied_heads

        graph = onnx_ir.load(model.path).graph
        qdq.check_matrices(graph, model.spec.family)
        kept = {node.name for node in qdq.excluded([*qdq.products(graph), *tied_heads.transposed(graph)], self.keep_fp32)}
        with temporary_directory.make() as folder:
            model = tied_heads.untied(model, self.keep_fp32, Path(folder))
            if self.scheme == "static":
                return self._static(model, ctx, kept)
            return self._dynamic(model, ctx, kept | {node.name for node in graph if qdq.pools(node)})

    def _static(self, model: Onnx, ctx: Context, kept: set[str]) -> Result[Onnx]:
        import onnx_ir

        from bertopt.quantization import activation_ranges, calibration_inputs, onnx_files, qdq

        given = [
            activation_ranges.Sample(inputs, calibration_inputs.valid_tokens(model.spec, inputs))
            for inputs in calibration_inputs.samples(model.spec, ctx, self.samples or 128)
        ]
        graph = onnx_ir.load(model.path)
        nodes = [node for node in qdq.products(graph.graph) if node.name not in kept]
        names = list(dict.fromkeys(node.inputs[0].name for node in nodes))
        folder, path, changes = ctx.workdir / "onnx", model.path, {}
        if self.smooth_quant is not None:
            seen = activation_ranges.measure(path, names, given, "minmax")
            changes["smoothed"] = qdq.smooth(graph.graph, nodes, seen, self.smooth_quant)
            path = onnx_files.save(graph, folder)
        ranges = activation_ranges.measure(path, names, given, self.calibration or "minmax")
        qdq.quantize(graph.graph, nodes, ranges, self.per_channel, self._seven_bits(ctx), self.symmetric)
        return Result(Onnx(model.spec, "int8", onnx_files.save(graph, folder)), {"products": len(nodes), **changes})

    def _dynamic(self, model: Onnx, ctx: Context, kept: set[str]) -> Result[Onnx]:
        import onnx
        import onnx_ir

        from bertopt.quantization import onnx_files, qdq

        quantization = onnxruntime_import.module("onnxruntime.quantization")
        graph = onnx.load(model.path)
        # The exporter's value_info can be stale, which kills the quantiser's shape inference.
        del graph.graph.value_info[:]
        before = _quantised_products(graph)
        quantised = ctx.workdir / "quantised.onnx"
        quantization.quantize_dynamic(
            graph, quantised, weight_type=quantization.QuantType.QInt8, per_channel=self.per_channel, reduce_range=self._seven_bits(ctx),
            # An Attention node would become a QAttention: invalid for the standard one, without its mask for a fused one.
            op_types_to_quantize=["MatMul", "Gemm"], nodes_to_exclude=[*kept, *(f"{name}{_SPLIT}" for name in kept)],
            use_external_data_format=graph.ByteSize() > onnx_files.INLINE_BYTES,
            extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT, "MatMulConstBOnly": True},
        )  # fmt: skip
        # ONNX Runtime names external data after the model; the artefact's name is another. What it split has no namespace.
        made, split = onnx_ir.load(quantised), {f"{node.name}{_SPLIT}": node for node in onnx_ir.load(model.path).graph if qdq.pools(node)}
        for node in made.graph:
            if node.name in split:
                node.metadata_props.update(split[node.name].metadata_props)
        path = onnx_files.save(made, ctx.workdir / "onnx")
        for written in ctx.workdir.glob("quantised.onnx*"):
            written.unlink()
        after = _quantised_products(onnx.load(path, load_external_data=False))
        return Result(Onnx(model.spec, "int8", path), {kind: after[kind] - before[kind] for kind in sorted(after)})

    def _seven_bits(self, ctx: Context) -> bool:
        """Whether weights have 7 bits: asked for, or not said and the sum of two products of 8 bits would saturate here."""
        return (ctx.device == "cpu" and environment.saturates_int8()) if self.reduce_range is None else self.reduce_range

    def effects(self, model: Onnx, facts: RuntimeFacts) -> dict[str, tuple[int, int]]:
        """Every product with constant weights has INT8 weights but those kept and those after pooling, and the session multiplies integers there.

        What is inside a fused attention node is no product. A runtime may dequantise weights and multiply floats: it is
        asked for the kernels that it runs.
        """
        import onnx_ir

        from bertopt.quantization import qdq

        graph = onnx_ir.load(model.path).graph
        products = [
            node for node in qdq.fed(graph)
            if node.op_type in _PRODUCTS and _weights(node) is not None
            and not qdq.named((node.name or "").removesuffix(_SPLIT), self.keep_fp32)
            and not (model.spec.dense and qdq.pools(node))
        ]  # fmt: skip
        int8 = sum(_weights(node) == onnx_ir.DataType.INT8 for node in products)
        found = {"products with INT8 weights": (max(1, len(products)), int8)}
        # A symmetric graph is on its way to an engine. ONNX Runtime multiplies its Gemms in floats.
        if facts.kernels is not None and not self.symmetric:
            integer = sum(facts.kernels.get(kind, 0) for kind in _KERNELS)
            found["products in integer kernels"] = (max(1, len(products)), min(len(products), integer))
        return found


def _weights(node: Any) -> Any:
    """The type in which a product multiplies by its constant second factor, transposed or not, or None where it has none.

    With quantised weights alone, and activations that are not, floats are multiplied.
    """
    value, read = node.inputs[1], _quantised(node.inputs[0])
    if value is not None and (made := value.producer()) is not None and made.op_type == "Transpose":
        value = made.inputs[0]
    if value is not None and (source := _quantised(value)) is not None:
        if not source.is_initializer():
            return None
        quantised = read is not None and read.producer() is not None and read.producer().op_type == "QuantizeLinear"
        return source.dtype if quantised else value.dtype
    return value.dtype if value is not None and value.is_initializer() else None


def _quantised(value: Any) -> Any:
    """What a value was dequantised from, or None."""
    made = value.producer()
    return made.inputs[0] if made is not None and made.op_type == "DequantizeLinear" else None


def _quantised_products(graph: Any) -> Counter[str]:
    kinds = ("MatMulInteger", "QAttention", "DynamicQuantizeMatMul", "QGemm")
    return Counter(node.op_type for node in graph.graph.node if node.op_type in kinds)
