"""Measure how much of a committed model computes in the precision it claims, since reduced precision has looser limits.

The weights of all matrix products that the outputs depend on are counted. Not seen: whether the result of a product is multiplied by
zero, and how a runtime's kernels round inside.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from bertopt.core import Compiled, Eager, Engine, Model, Native, Onnx, OpenVino, RuntimeFacts

#: Products of an ONNX graph, and which input holds the weights. The standard Attention has none.
_WEIGHTS = {
    "MatMul": 1, "Gemm": 1, "FusedMatMul": 1, "MatMulInteger": 1, "MatMulIntegerToFloat": 1, "DynamicQuantizeMatMul": 1,
    "QGemm": 3, "QLinearMatMul": 3, "Attention": 1, "QAttention": 1, "MatMulNBits": 1,
}  # fmt: skip
#: Operators that may stand between a product and its constant weights.
_THROUGH = ("DequantizeLinear", "QuantizeLinear", "Cast", "Transpose", "Reshape", "Identity", "Unsqueeze")
#: torch's operators that multiply by weights: `aten::addmm`, …
_PRODUCTS = ("mm", "addmm", "linear", "_transformer_encoder_layer_fwd", "_linear_pointwise", "_int_mm")
#: How TensorRT's engine inspector and OpenVINO spell a precision.
_SPELLED = {"int8": "^(.*int8|[iu]8)", "float16": "half|fp16|f16$", "bfloat16": "bf16|bfloat16", "float8": "fp8|f8e|float8"}


def proven(model: Model, facts: RuntimeFacts) -> float | None:
    """Return the share of the products' weights that is in the claimed precision, from 0 to 1.

    For OpenVINO and engines, which report what they run, it is the share of products or of layers' outputs. None for float32, which claims
    nothing, and where a runtime does not say.
    """
    if model.precision == "float32":
        return None
    if isinstance(model, Eager | Compiled):
        return _share(_in_network(model.network), model.precision)
    if isinstance(model, Onnx):
        return _share(_in_graph(model), model.precision)
    told = facts.products if isinstance(model, OpenVino | Native) else facts.output_formats if isinstance(model, Engine) else None
    if not told:
        return None
    # An engine's masks and ids are integers of 32 and 64 bits, which do not count.
    told = {kind: count for kind, count in told.items() if not re.search("int32|int64|bool", kind, re.IGNORECASE)}
    return _share(
        ((model.precision if re.search(_SPELLED[model.precision], kind, re.IGNORECASE) else kind, n) for kind, n in told.items()),
        model.precision,
    )  # fmt: skip


def _share(weights: Iterable[tuple[str, int]], precision: str) -> float:
    total = counted = 0
    for kind, size in weights:
        total += size
        counted += size if kind == precision else 0
    return counted / total if total else 0.0


def _in_network(network: Any) -> list[tuple[str, int]]:
    """Return precision and size of every weight matrix of a product in one forward pass; compiled networks are run eagerly."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    found: list[tuple[str, int]] = []

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            if func.namespace == "quantized" and name.startswith("linear"):
                # torch's own INT8 layers multiply by weights that are packed into an object.
                weights = args[1].unpack()[0]
                found.append((_named(weights.dtype), weights.numel()))
            elif name in _PRODUCTS or name.startswith("_scaled_mm"):
                # Scales of fp8 products are matrices too, and follow the two that are multiplied.
                factors = args[:2] if name.startswith("_scaled_mm") else args
                matrices = [arg for arg in factors if isinstance(arg, torch.Tensor) and arg.dim() == 2]
                # The weights come last. The operator of a whole layer takes four weight matrices; its input is not two-dimensional.
                for matrix in matrices if name.startswith("_transformer") else matrices[-1:]:
                    found.append((_named(matrix.dtype), matrix.numel()))
            return func(*args, **(kwargs or {}))

    device = next(network.parameters()).device
    inputs = tuple(tensor.to(device) for tensor in network.example(2, 4))
    with torch.compiler.set_stance("force_eager"), torch.inference_mode(), Watch():  # type: ignore[no-untyped-call]
        network(*inputs)
    return found


def _named(dtype: Any) -> str:
    # float8 has several kinds: torch.float8_e4m3fn.
    name = str(dtype).removeprefix("torch.").partition("_")[0]
    return "int8" if name in ("int8", "uint8") or name.startswith(("qint8", "quint8")) else name


def _in_graph(model: Onnx) -> Iterator[tuple[str, int]]:
    """Yield precision and size of the weights of every product that an output of the spec depends on."""
    import onnx_ir as ir

    graph = ir.load(model.path).graph
    names = {ir.DataType.INT8: "int8", ir.DataType.UINT8: "int8"}
    for node in _used([value for value in graph.outputs if value.name in model.spec.outputs]):
        index = _WEIGHTS.get(node.op_type)
        if index is None or len(node.inputs) <= index or (node.op_type == "Attention" and not node.domain):
            continue
        taken = node.inputs[index]
        constant, dequantised = _constant(taken)
        if constant is None or len(constant.shape or ()) < 2:
            continue
        kind = constant.dtype if constant.dtype in names else taken.dtype or constant.dtype
        if dequantised and _floating(node.inputs[0]):
            kind = ir.DataType.FLOAT  # weights alone are quantised: floats are multiplied
        yield names.get(kind, kind.name.lower()), math.prod(map(int, constant.const_value.shape))


def _constant(value: Any) -> tuple[Any, bool]:
    """Return the initializer that `value` comes from, None where it is computed, and whether it is dequantised on the way."""
    dequantised = False
    while value is not None and not value.is_initializer():
        made = value.producer()
        if made is None or made.op_type not in _THROUGH:
            return None, dequantised
        dequantised |= made.op_type == "DequantizeLinear"
        value = made.inputs[0]
    return value, dequantised


def _floating(value: Any) -> bool:
    """Return whether a product reads activations that are not quantised."""
    made = None if value is None else value.producer()
    return made is None or made.op_type != "DequantizeLinear"


def _used(outputs: Iterable[Any]) -> list[Any]:
    """Return every node that one of the values in `outputs` depends on."""
    waiting, found, seen = list(outputs), [], set()
    while waiting:
        node = waiting.pop().producer()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        found.append(node)
        waiting += [value for value in node.inputs if value is not None]
    return found
