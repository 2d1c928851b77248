"""Half precision inside an ONNX graph; inputs and outputs keep their types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from bertopt.core import Context, Onnx, Pass, Result, RuntimeFacts
from bertopt.errors import Unsupported, missing_library

#: Operators that read angles: where the exporter fuses rotary positions to RotaryEmbedding nodes, it counts their cosines to the attention.
_OF_ANGLES = ("Cos", "Sin")
#: Operators whose float inputs or outputs have a fixed type, that compute shapes, or that read angles.
_FLOAT_ONLY = frozenset({"Range", "Resize", "CumSum", "TopK", "NonZero", "RandomNormalLike", "RandomUniformLike", *_OF_ANGLES})
_PRODUCTS = ("MatMul", "Gemm", "FusedMatMul", "Attention", "MultiHeadAttention")
#: Modules whose nodes stay float32, by parts of their class names. A rotary position times its frequency is an angle of up to
#: thousands, which float16 rounds by up to 2 and bfloat16 by up to 16; transformers computes it in float32 in every precision.
_MODULES = ("Pooling", "RotaryEmbedding")


class CastOnnxHalf(Pass[Onnx, Onnx]):
    """Cast the graph's float32 weights and operators to half precision. Counts initialisers cast and values clipped.

    Pooling, normalisation and the angles of rotary positions stay float32, as do the operators and nodes named in
    `keep_fp32`. Values beyond the type's range, such as a mask's -3.4e38, are clipped to it.
    """

    incompatible_with: ClassVar[dict[str, str]] = {
        "cast_half": "the graph is in half precision already",
        "cast_onnx_half": "the graph is in half precision already",
        "quantize_int8": "quantised products would be cast back and forth around float scales",
    }

    dtype: Literal["float16", "bfloat16"] = Field("float16", description="the half-precision type")
    keep_fp32: tuple[str, ...] = Field((), description="operator types or node names to leave in float32")

    def device_conflict(self, device: str, before: Sequence[Pass[Any, Any]]) -> str | None:
        if device == "cpu" and self.dtype == "bfloat16":
            return "ONNX Runtime has no bfloat16 kernels for a CPU; use dtype: float16, or say device: auto"
        return None

    def __call__(self, model: Onnx, ctx: Context) -> Result[Onnx]:
        from bertopt.quantization import onnx_files

        try:
            import onnx_ir as ir
        except ImportError as error:
            raise missing_library("half precision in ONNX needs onnx_ir", "'bertopt[cpu]'", failed=error) from error
        if model.precision != "float32":
            raise Unsupported(f"cast_onnx_half takes a float32 graph; got {model.precision}: put it before the pass that cast or quantised")
        graph = ir.load(model.path)
        unknown = set(self.keep_fp32) - {n.op_type for n in graph.graph} - {n.name for n in graph.graph}
        if unknown:
            raise Unsupported(
                f"keep_fp32 must name operator types or nodes of the graph; got {', '.join(sorted(unknown))}"
            )
        caster = _Caster(ir, graph.graph, ir.DataType[self.dtype.upper()], frozenset(self.keep_fp32))
        caster.cast()
        path = onnx_files.save(graph, ctx.workdir / "onnx")
        changes = {"initialisers": caster.cast_tensors, "nodes": caster.cast_nodes, "clipped": caster.clipped}
        return Result(Onnx(model.spec, self.dtype, path), changes)

    def effects(self, model: Onnx, facts: RuntimeFacts) -> dict[str, tuple[int, int]]:
        """No float32 weights or products but where a node is kept in float32."""
        import onnx_ir as ir

        graph, half, keep = ir.load(model.path).graph, ir.DataType[self.dtype.upper()], frozenset(self.keep_fp32)
        weights = [
            value.dtype
            for value in graph.initializers.values()
            if value.dtype in (half, ir.DataType.FLOAT) and not all(_kept(use.node, keep) for use in value.uses())
        ]
        products = [
            node.outputs[0].dtype for node in graph if node.op_type in _PRODUCTS and not _kept(node, keep)
        ]  # fmt: skip
        return {
            f"weights in {self.dtype}": (max(1, len(weights)), weights.count(half)),
            f"products in {self.dtype}": (max(1, len(products)), products.count(half)),
        }


def _kept(node: Any, keep: frozenset[str]) -> bool:
    """Whether a node stays in float32. The exporter recorded which module each node came from."""
    module = node.metadata_props.get("namespace", "")
    inside = any(name in module for name in _MODULES)
    return inside or node.op_type in _FLOAT_ONLY or node.op_type in keep or node.name in keep


class _Caster:
    """One walk over a graph in topological order, keeping track of which float values are now in half precision."""

    def __init__(self, ir: Any, graph: Any, half: Any, keep: frozenset[str]) -> None:
        self.ir, self.graph, self.half, self.keep = ir, graph, half, keep
        self.halves: set[Any] = set()
        self.casts: dict[tuple[Any, Any], Any] = {}
        self.cast_tensors = self.cast_nodes = self.clipped = 0

    def cast(self) -> None:
        for node in list(self.graph):
            if any(
                attr.type in (self.ir.AttributeType.GRAPH, self.ir.AttributeType.GRAPHS)
                for attr in node.attributes.values()
            ):
                raise Unsupported(f"node '{node.name}' ({node.op_type}) has a subgraph, which cast_onnx_half does not cast; leave it out")
            wanted = self.ir.DataType.FLOAT if _kept(node, self.keep) else self.half
            for index, value in enumerate(node.inputs):
                if value is not None and self._is_float(value):
                    node.replace_input_with(index, self._as(value, wanted, node))
            if wanted == self.half:
                self._convert(node)
            elif node.op_type in _OF_ANGLES:
                # Fused, they have no type yet, and what reads them would not be given a cast.
                node.outputs[0].dtype = wanted
        for index, value in enumerate(self.graph.outputs):
            if value in self.halves:
                self._keep_output(index, value)
        for name in [name for name, value in self.graph.initializers.items() if not value.uses()]:
            del self.graph.initializers[name]

    def _is_float(self, value: Any) -> bool:
        return bool(value.dtype == self.ir.DataType.FLOAT or value in self.halves)

    def _as(self, value: Any, wanted: Any, node: Any) -> Any:
        """`value` in the wanted type: itself, a cast made before, a converted initialiser, or a new Cast node."""
        if (value in self.halves) == (wanted == self.half):
            return value
        if (value, wanted) not in self.casts:
            if value.const_value is not None and value.is_initializer():
                self.casts[value, wanted] = self._half_initializer(value)
            else:
                made = self.ir.node("Cast", [value], {"to": wanted}, name=f"{value.name}_to_{wanted.name.lower()}")
                made.outputs[0].name = f"{value.name}_as_{wanted.name.lower()}"
                made.outputs[0].dtype, made.outputs[0].shape = wanted, value.shape
                node.prepend(made)
                if wanted == self.half:
                    self.halves.add(made.outputs[0])
                self.casts[value, wanted] = made.outputs[0]
        return self.casts[value, wanted]

    def _half_initializer(self, value: Any) -> Any:
        new = self.ir.val(f"{value.name}_{self.half.name.lower()}", const_value=self._tensor(value.const_value))
        self.graph.register_initializer(new)
        self.halves.add(new)
        self.cast_tensors += 1
        return new

    def _tensor(self, tensor: Any) -> Any:
        import numpy as np

        array = tensor.numpy()
        if self.half == self.ir.DataType.FLOAT16:
            largest = float(np.finfo(np.float16).max)
            self.clipped += int((np.abs(array) > largest).sum())
            array = np.clip(array, -largest, largest)
        return self.ir.tensor(array.astype(self.half.numpy()), dtype=self.half)

    def _convert(self, node: Any) -> None:
        for output in node.outputs:
            if output.dtype is None and any(value in self.halves for value in node.inputs):
                output.dtype = self.ir.DataType.FLOAT
        # The mean and deviation a normalisation can give besides stay float32 by its definition.
        outputs = [
            output
            for i, output in enumerate(node.outputs)
            if "LayerNormalization" not in node.op_type or i not in (1, 2)
        ]
        changed = [output for output in outputs if output.dtype == self.ir.DataType.FLOAT]
        if not changed:
            return
        for name, attribute in list(node.attributes.items()):
            if node.op_type == "Cast" and name == "to":
                node.attributes[name] = self.ir.AttrInt64("to", self.half)
            elif attribute.type == self.ir.AttributeType.TENSOR and attribute.value.dtype == self.ir.DataType.FLOAT:
                node.attributes[name] = self.ir.AttrTensor(name, self._tensor(attribute.value))
        for output in changed:
            output.dtype = self.half
            self.halves.add(output)
        self.cast_nodes += 1

    def _keep_output(self, index: int, value: Any) -> None:
        """A graph output stays float32 under its own name."""
        name, value.name = value.name, f"{value.name}_{self.half.name.lower()}"
        made = self.ir.node("Cast", [value], {"to": self.ir.DataType.FLOAT}, name=f"{name}_output_to_float")
        out = made.outputs[0]
        out.name, out.dtype, out.shape = name, self.ir.DataType.FLOAT, value.shape
        self.graph.append(made)
        self.graph.outputs[index] = out
