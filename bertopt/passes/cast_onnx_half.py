"""Half precision inside an ONNX graph; inputs and outputs keep their types."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from bertopt.core import Context, Onnx, Pass, Result
from bertopt.errors import Unsupported

_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38}


class CastOnnxHalf(Pass[Onnx, Onnx]):
    """Cast the graph's float32 weights and operators to half precision. Counts initialisers cast and values clipped.

    Pooling and normalisation stay float32, as do the operators and nodes named in `keep_fp32`.
    """

    dtype: Literal["float16", "bfloat16"] = Field("float16", description="the half-precision type")
    keep_fp32: tuple[str, ...] = Field((), description="operator types or node names to leave in float32")

    def conflict(self, before: Any) -> str | None:
        for step in before:
            if step.name() in ("cast_half", "cast_onnx_half"):
                return "the graph is in half precision already"
            if step.name() == "quantize_int8":
                return "quantised products would be cast back and forth around float scales"
        return None

    def __call__(self, model: Onnx, ctx: Context) -> Result[Onnx]:
        try:
            import onnx
            from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16
        except ImportError as error:
            raise Unsupported(f"half precision in ONNX needs {error.name}; pip install 'bertopt[cpu]'") from error
        import logging

        if model.precision != "float32":
            raise Unsupported(f"cast_onnx_half takes a float32 graph; got {model.precision}")
        graph = onnx.load(model.path)
        weights = _floats(graph)
        clipped = sum(int((abs(value) > _LARGEST[self.dtype]).sum()) for value in weights.values())
        types = {node.op_type for node in graph.graph.node} & set(self.keep_fp32)
        names = set(self.keep_fp32) - types
        unknown = names - {node.name for node in graph.graph.node}
        if unknown:
            raise Unsupported(f"keep_fp32 must name operator types or nodes of the graph; got {', '.join(sorted(unknown))}")
        logging.getLogger("onnxruntime.transformers.float16").setLevel(logging.ERROR)
        graph = convert_float_to_float16(
            graph, keep_io_types=True, op_block_list=[*DEFAULT_OP_BLOCK_LIST, *types],
            node_block_list=[node.name for node in graph.graph.node if _pooling(node)] + sorted(names),
        )  # fmt: skip
        # What follows reads types from the operators; the converter leaves both kinds in value_info.
        del graph.graph.value_info[:]
        cast = {init.name for init in graph.graph.initializer if init.data_type == onnx.TensorProto.FLOAT16}
        if self.dtype == "bfloat16":
            _to_bfloat16(graph, weights)
        path = ctx.workdir / "onnx" / "model.onnx"
        path.parent.mkdir()
        big = (model.path.parent / "model.onnx_data").exists()
        onnx.save(graph, path, save_as_external_data=big, location="model.onnx_data", size_threshold=1024)
        changes = {"initialisers": len(cast & set(weights)), "clipped": clipped}
        return Result(Onnx(model.spec, self.dtype, path), changes)


def _floats(graph: Any) -> dict[str, Any]:
    import onnx

    return {i.name: onnx.numpy_helper.to_array(i) for i in graph.graph.initializer if i.data_type == onnx.TensorProto.FLOAT}


def _pooling(node: Any) -> bool:
    """Whether the exporter recorded that this node came from the network's pooling module."""
    return any(item.key == "namespace" and "Pooling" in item.value for item in node.metadata_props)


def _to_bfloat16(graph: Any, weights: dict[str, Any]) -> None:
    """ONNX Runtime's converter writes fp16 only; the same places take bfloat16, rounded from the float32 weights."""
    import ml_dtypes
    import numpy as np
    import onnx

    half, brain = onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16

    def retype(tensor: Any) -> None:
        if tensor.data_type == half:
            value = weights.get(tensor.name, onnx.numpy_helper.to_array(tensor).astype(np.float32))
            tensor.CopyFrom(onnx.numpy_helper.from_array(value.astype(ml_dtypes.bfloat16), tensor.name))

    for initializer in graph.graph.initializer:
        retype(initializer)
    for node in graph.graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                retype(attribute.t)
            elif node.op_type == "Cast" and attribute.name == "to" and attribute.i == half:
                attribute.i = brain
