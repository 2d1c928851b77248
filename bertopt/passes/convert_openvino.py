"""An OpenVINO IR from a float32 ONNX graph, optionally quantised to INT8 by NNCF."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from bertopt.core import Context, Int8Rounding, Onnx, OpenVino, Pass, Precision, Result, RuntimeFacts
from bertopt.errors import Unsupported
from bertopt.system import environment, openvino_import, temporary_directory

_PRECISIONS: dict[str, Precision] = {"f32": "float32", "bf16": "bfloat16", "int8": "int8"}
_RENAMED = {"keep_float": "keep_fp32", "ranges": "range_estimator", "cosine": "min_cosine"}
_RANGES = {"extreme": "minmax", "mean": "mean_minmax", None: "minmax"}
_KEPT = ["bertopt", "kept_float"]
#: Added to a masked score: far below any real one, and within float16 and bfloat16.
_MASKED = -3e4


def _old(new: str, default: Any, **bounds: float) -> Any:
    """A field under its old name: accepted, never recorded."""
    extra = {"deprecated": True}
    return Field(default, exclude=True, description=f"old name of {new}", json_schema_extra=extra, **bounds)  # type: ignore[call-overload]


class ConvertOpenvino(Pass[Onnx, OpenVino]):
    """Convert to OpenVINO's IR. Counts operators, matrix products, and products quantised.

    `int8` quantises weights (one scale for each output channel), embedding tables (one for each id) and activations (one
    static scale for each tensor, measured on the recipe's texts and on unusual inputs); attention itself stays float32.
    A product with a channel whose weights are below a hundredth of the others' stays float32 too: NNCF would round them away.
    With static scales a text's output does not depend on the other texts. `bf16` writes the float32 IR and runs it in bfloat16.
    """

    incompatible_with: ClassVar[dict[str, str]] = {
        "fuse_ort": "OpenVINO does not know ONNX Runtime's own operators; branch from export_onnx",
        "quantize_int8": "OpenVINO would not run ONNX Runtime's INT8 products; branch from the float graph and say precision: int8",
        "cast_onnx_half": "convert the float32 graph and say precision: bf16",
        "cast_half": "convert the float32 graph and say precision: bf16",
    }

    precision: Literal["f32", "bf16", "int8"] = Field("f32", description="what the matrix products run in")
    samples: int = Field(96, ge=2, description="int8: texts to measure ranges on, chosen by the seed")
    preset: Literal["mixed", "performance"] = Field(
        "mixed", description="int8: mixed has a zero point for each activation, performance has none"
    )
    range_estimator: Literal["minmax", "mean_minmax"] = Field(
        "minmax", description="int8: an activation's range is the largest over all samples, or the mean of each one's"
    )
    smooth_quant: float | None = Field(
        0.7,
        ge=0,
        le=1,
        description="int8: how far outlying channels move from activations into weights; null: not at all",
    )
    bias_correction: bool = Field(False, description="int8: shift biases by the mean error of their products")
    keep_fp32: tuple[str, ...] = Field((), description="int8: names of MatMul nodes of the ONNX graph to leave in float32")
    min_cosine: float | None = Field(
        0.96,
        gt=0,
        lt=1,
        description="int8: least mean cosine with the float32 answers on any sample held out; while it is missed, "
        "products go back to float32, those that gain most first; null: never",
    )
    keep_float: tuple[str, ...] = _old("keep_fp32", ())
    ranges: Literal["extreme", "mean"] | None = _old("range_estimator", None)
    cosine: float | None = _old("min_cosine", None, gt=0, lt=1)

    @model_validator(mode="after")
    def _renamed(self) -> ConvertOpenvino:
        """Take options by the names that they had until 0.1. Their old names go with the next release."""
        for old, new in _RENAMED.items():
            if old in self.model_fields_set:
                warnings.warn(f"convert_openvino: option '{old}' is now '{new}'", FutureWarning, stacklevel=2)
                value = getattr(self, old)
                # Frozen for everybody else. Equal to the same options under their new names.
                self.__dict__[new] = _RANGES[value] if old == "ranges" else value
                self.__dict__[old] = type(self).model_fields[old].default
        return self

    def int8_rounding(self) -> Int8Rounding:
        # NNCF leaves weights that several places share as they are.
        return Int8Rounding("static", embeddings=True, smooth_quant=self.smooth_quant, smooth_shared=False, weight_bits=None)

    def device_conflict(self, device: str, before: Sequence[Pass[Any, Any]]) -> str | None:
        return "OpenVINO models run on a CPU here; say device: cpu" if device == "cuda" else None

    def __call__(self, model: Onnx, ctx: Context) -> Result[OpenVino]:
        from bertopt.quantization import calibration_inputs, openvino_ptq, tied_heads

        ov = openvino_import.openvino()
        if model.precision != "float32":
            raise Unsupported(f"convert_openvino takes a float32 graph; got {model.precision}; branch from export_onnx")
        if self.precision == "bf16" and not openvino_import.runs_bfloat16():
            raise Unsupported(
                "OpenVINO has no bfloat16 kernels for this CPU (they need avx512_bf16 or amx_bf16) and would run float32 instead; "
                "use precision: f32 or int8"
            )
        if self.precision == "int8":
            _check_matrices(model)
            with temporary_directory.make() as folder:
                graph = _read(ov, tied_heads.untied(model, self.keep_fp32, Path(folder)))
        else:
            graph = _read(ov, model)
        guards = _drop_guards(ov, graph)
        changes: dict[str, int] = {}
        if self.precision == "int8":
            samples = calibration_inputs.samples(model.spec, ctx, self.samples)
            kept = (*self.keep_fp32, *_after_pooling(model, openvino_ptq.products(graph)))
            bits: Literal[7, 8] = 7 if environment.saturates_int8() else 8
            options = openvino_ptq.Options(self.preset, self.range_estimator, self.smooth_quant, self.bias_correction, kept, self.min_cosine, bits)
            graph, kept = openvino_ptq.quantize(graph, model.spec, samples, options)
            graph.set_rt_info(" ".join(kept), _KEPT)
            changes = {"int8_products": openvino_ptq.int8_products(graph), **{f"{name} kept in float32": 1 for name in kept}}
        path = ctx.workdir / "openvino" / "openvino_model.xml"
        path.parent.mkdir()
        ov.save_model(graph, path, compress_to_fp16=False)
        shape = {"operators": len(graph.get_ops()), "products": len(openvino_ptq.products(graph)), "NaN_guards_dropped": guards}
        changes = {**shape, **changes}
        return Result(OpenVino(model.spec, _PRECISIONS[self.precision], path), changes)

    def effects(self, model: OpenVino, facts: RuntimeFacts) -> dict[str, tuple[int, int]]:
        """Every product but those kept in float32 has INT8 weights and a quantised input, and runs in INT8."""
        from bertopt.quantization import openvino_ptq

        graph = openvino_import.openvino().Core().read_model(model.path)
        products = openvino_ptq.products(graph)
        runs = facts.products or {}
        if self.precision != "int8":
            found = runs.get(self.precision, 0)
            return {f"products that run in {self.precision}": (max(1, sum(runs.values())), found)}
        kept = graph.get_rt_info(_KEPT).astype(str).split() if graph.has_rt_info(_KEPT) else []
        expected = max(1, len(products) - len(kept))
        return {
            "products with INT8 weights and input": (expected, openvino_ptq.int8_products(graph)),
            # OpenVINO may run one product twice rather than keep its result in two types.
            "products that run in INT8": (expected, min(expected, runs.get("i8", 0) + runs.get("u8", 0))),
        }


def _check_matrices(model: Onnx) -> None:
    import onnx_ir as ir

    from bertopt.quantization import qdq

    qdq.check_matrices(ir.load(model.path).graph, model.spec.family)


def _after_pooling(model: Onnx, products: Sequence[Any]) -> list[str]:
    """Names of the products after pooling: one a text, they stay float32. OpenVINO makes two operators of a Gemm, `name/…`."""
    import onnx_ir as ir

    from bertopt.quantization import qdq

    pooling = {node.name for node in ir.load(model.path).graph if qdq.pools(node)}
    names = [node.get_friendly_name() for node in products]
    return [name for name in names if name.partition("/")[0] in pooling]


def _read(ov: Any, model: Onnx) -> Any:
    """The graph with its own names, and no outputs but the spec's and `token_output`, which others' loaders read."""
    try:
        graph = ov.Core().read_model(model.path)
    except RuntimeError as error:
        raise Unsupported(f"OpenVINO cannot read the graph: {str(error).strip().splitlines()[-1][:300]}") from error
    wanted = {*model.spec.outputs, model.spec.token_output}
    for result in graph.get_results():
        if not wanted & result.output(0).get_names():
            graph.remove_result(result)
    for kind, names, ports in (
        ("input", model.spec.network_inputs, graph.inputs),
        ("output", model.spec.outputs, graph.outputs),
    ):
        there = {name for port in ports for name in port.get_names()}
        if missing := [name for name in names if name not in there]:
            raise Unsupported(f"expected {kind} '{missing[0]}'; the graph has {', '.join(sorted(there))}")
    return graph


def _drop_guards(ov: Any, graph: Any) -> int:
    """Mask attention with a finite number instead of infinity, and drop the search for NaN behind it; how often.

    The exporter looks through every layer's answer [B, heads, S, H / heads] for the NaN of rows that are masked whole,
    4 % of the time at 8 × 128 in INT8. With a finite number there are none, and `exp` of it is 0 all the same.
    """
    op: Any = ov.opset13
    masks: dict[str, Any] = {}
    dropped = 0
    for node in graph.get_ops():
        inputs = [node.input_value(port) for port in range(len(node.inputs()))]
        users = [user.get_node() for user in node.output(0).get_target_inputs()]
        guard = next((user for user in users if user.get_type_name() == "Select"), None)
        if (
            node.get_type_name() != "ScaledDotProductAttention" or len(inputs) < 4 or guard is None
            or inputs[3].get_element_type() != ov.Type.boolean
            or guard.input_value(0).get_node().get_type_name() != "IsNaN"
            or guard.input_value(0).get_node().input_value(0).get_node() != node
            or guard.input_value(2).get_node() != node
        ):  # fmt: skip
            continue
        name = inputs[3].get_node().get_friendly_name()
        if name not in masks:
            zero, masked = op.constant(0.0, ov.Type.f32), op.constant(_MASKED, ov.Type.f32)
            masks[name] = op.select(inputs[3], zero, masked)
        causal = node.get_attributes()["causal"]
        inputs[3] = masks[name].output(0)
        plain = op.scaled_dot_product_attention(*inputs, causal=causal)
        plain.set_friendly_name(node.get_friendly_name())
        guard.output(0).replace(plain.output(0))
        dropped += 1
    graph.validate_nodes_and_infer_types()
    return dropped
