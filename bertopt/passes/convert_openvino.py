"""An OpenVINO IR from a float32 ONNX graph, optionally quantised to INT8 by NNCF."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from bertopt.core import Context, Onnx, OpenVino, Pass, Precision, Result, RuntimeFacts, Spec
from bertopt.errors import Unsupported
from bertopt.system import openvino_import

_PRECISIONS: dict[str, Precision] = {"f32": "float32", "bf16": "bfloat16", "int8": "int8"}
#: Of the calibration samples every so many is held out, to compare answers on: texts and odd ones, so no multiple of 3.
_HELD_OUT = 7
#: Rounds of quantising again, each with one more input of products left in float32.
_ROUNDS = 4
_KEPT = ["bertopt", "kept_float"]
#: Added to a masked score: far below any real one, and within float16 and bfloat16.
_MASKED = -3e4


class ConvertOpenvino(Pass[Onnx, OpenVino]):
    """Convert to OpenVINO's IR. Counts operators, matrix products, and products quantised.

    `int8` quantises weights (one scale an output channel) and activations (one static scale a tensor), measured on the
    recipe's texts and on odd inputs among them; attention itself stays float32. Static scales give a text the same
    answer beside any other texts. `bf16` writes the float32 IR and runs it in bfloat16.
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
    ranges: Literal["extreme", "mean"] = Field(
        "extreme", description="int8: an activation's range is the largest over all samples, or the mean of each one's"
    )
    smooth_quant: float | None = Field(
        0.7,
        ge=0,
        le=1,
        description="int8: how far outlying channels move from activations into weights; null: not at all",
    )
    bias_correction: bool = Field(False, description="int8: shift biases by the mean error of their products")
    keep_float: tuple[str, ...] = Field(
        (), description="int8: names of MatMul nodes of the ONNX graph to leave in float32"
    )
    cosine: float | None = Field(
        0.96,
        gt=0,
        lt=1,
        description="int8: least mean cosine with the float32 answers on any sample held out; while it is missed, "
        "products go back to float32, those that gain most first; null: never",
    )

    def device_conflict(self, device: str, before: Sequence[Pass[Any, Any]]) -> str | None:
        return "OpenVINO models run on a CPU here; say device: cpu" if device == "cuda" else None

    def __call__(self, model: Onnx, ctx: Context) -> Result[OpenVino]:
        ov = openvino_import.openvino()
        if model.precision != "float32":
            raise Unsupported(f"convert_openvino takes a float32 graph; got {model.precision}; branch from export_onnx")
        if self.precision == "bf16" and not openvino_import.runs_bfloat16():
            raise Unsupported(
                "this CPU has no bfloat16 arithmetic (avx512_bf16 or amx_bf16), and OpenVINO would run float32 instead; "
                "use precision: f32 or int8"
            )
        graph = _read(ov, model)
        guards = _drop_guards(ov, graph)
        changes: dict[str, int] = {}
        if self.precision == "int8":
            graph, kept = self._quantize(ov, graph, model.spec, ctx)
            graph.set_rt_info(" ".join(kept), _KEPT)
            changes = {"int8_products": _int8(graph), **{f"{name} kept in float32": 1 for name in kept}}
        path = ctx.workdir / "openvino" / "model.xml"
        path.parent.mkdir()
        ov.save_model(graph, path, compress_to_fp16=False)
        shape = {"operators": len(graph.get_ops()), "products": len(_products(graph)), "NaN_guards_dropped": guards}
        changes = {**shape, **changes}
        return Result(OpenVino(model.spec, _PRECISIONS[self.precision], path), changes)

    def effects(self, model: OpenVino, facts: RuntimeFacts) -> dict[str, tuple[int, int]]:
        """Every product but those kept in float32 has INT8 weights and a quantised input, and runs in INT8."""
        graph = openvino_import.openvino().Core().read_model(model.path)
        products = _products(graph)
        runs = facts.products or {}
        if self.precision != "int8":
            found = runs.get(self.precision, 0)
            return {f"products that run in {self.precision}": (max(1, sum(runs.values())), found)}
        kept = graph.get_rt_info(_KEPT).astype(str).split() if graph.has_rt_info(_KEPT) else []
        expected = max(1, len(products) - len(kept))
        return {
            "products with INT8 weights and input": (expected, _int8(graph)),
            "products that run in INT8": (expected, runs.get("i8", 0) + runs.get("u8", 0)),
        }

    def _quantize(self, ov: Any, graph: Any, spec: Spec, ctx: Context) -> tuple[Any, tuple[str, ...]]:
        """The graph quantised, and which of its products were left in float32. Raises Unsupported without texts."""
        from bertopt.quantization import calibration_inputs

        if ctx.encode is None or not ctx.texts:
            raise Unsupported(
                "precision: int8 measures ranges on texts; give inputs.texts, and a tokenizer to the context"
            )
        samples = [*calibration_inputs.samples(spec, ctx.encode, ctx.texts, self.samples, ctx.seed)]
        held = samples[::_HELD_OUT]
        used = [sample for number, sample in enumerate(samples) if number % _HELD_OUT] or samples
        names = {node.get_friendly_name() for node in _products(graph)}
        if unknown := [name for name in self.keep_float if name not in names]:
            raise Unsupported(f"keep_float: the graph has no product '{unknown[0]}'; it has {', '.join(sorted(names))}")
        truth = _answers(ov, graph, spec, held)
        kept = self.keep_float
        for _ in range(_ROUNDS):
            quantized = self._once(graph, used, kept)
            if self.cosine is None:
                break
            scores = _cosines(spec, held, truth, _answers(ov, quantized, spec, held))
            if min(scores) >= self.cosine:
                break
            worst = scores.index(min(scores))
            more = _most_to_gain(ov, quantized, spec, [held[worst]], [truth[worst]])
            if not more:
                break
            kept = (*kept, *more)
        else:
            quantized = self._once(graph, used, kept)
        return quantized, kept

    def _once(self, graph: Any, samples: list[Any], kept: tuple[str, ...]) -> Any:
        nncf = openvino_import.nncf()
        advanced = nncf.AdvancedQuantizationParameters(disable_bias_correction=not self.bias_correction)
        advanced.smooth_quant_alphas.matmul = -1 if self.smooth_quant is None else self.smooth_quant
        ranges = nncf.quantization.range_estimator.RangeEstimatorParametersSet
        advanced.activations_range_estimator_params = ranges.MINMAX if self.ranges == "extreme" else ranges.MEAN_MINMAX
        # Attention takes as long in INT8: softmax stays float32, and its inputs have to be quantised. Pooling of packed rows
        # is a product of two activations too.
        weighted = {node.get_friendly_name() for node in _products(graph)}
        others = [
            node.get_friendly_name()
            for node in graph.get_ops()
            if node.get_type_name() == "MatMul" and node.get_friendly_name() not in weighted
        ]
        ignored = nncf.IgnoredScope(names=[*kept, *others], types=["ScaledDotProductAttention"], validate=False)
        with contextlib.redirect_stdout(io.StringIO()):
            return nncf.quantize(
                graph, nncf.Dataset(samples), subset_size=len(samples), model_type=nncf.ModelType.TRANSFORMER,
                preset=nncf.QuantizationPreset(self.preset),
                ignored_scope=ignored, advanced_parameters=advanced,
            )  # fmt: skip


def _read(ov: Any, model: Onnx) -> Any:
    """The graph with its own names, and no outputs but the spec's and `last_hidden_state`, which others' loaders read."""
    try:
        graph = ov.Core().read_model(model.path)
    except RuntimeError as error:
        raise Unsupported(f"OpenVINO cannot read the graph: {str(error).strip().splitlines()[-1][:300]}") from error
    wanted = {*model.spec.outputs, "last_hidden_state"}
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


def _products(graph: Any) -> list[Any]:
    """Matrix products with constant weights."""
    return [node for node in graph.get_ops() if node.get_type_name() == "MatMul" and _source(node, 1, "Constant")]


def _source(node: Any, port: int, kind: str) -> Any:
    """The node of `kind` that an input comes from by way of nothing but scales, types and shapes, or None."""
    through = {"Convert", "Multiply", "Subtract", "Transpose", "Reshape", "FakeQuantize"} - {kind}
    found = node.input_value(port).get_node()
    while found.get_type_name() in through:
        found = found.input_value(0).get_node()
    return found if found.get_type_name() == kind else None


def _int8(graph: Any) -> int:
    """Products whose weights are stored in 8 bits and whose other input is quantised."""
    stored = ("i8", "u8")
    return sum(
        _source(node, 1, "Constant").get_output_element_type(0).to_string() in stored
        and _source(node, 0, "FakeQuantize") is not None
        for node in _products(graph)
    )


def _answers(ov: Any, graph: Any, spec: Spec, samples: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The first answer to each sample, its vectors that count, [N, D]."""
    from bertopt.quantization import calibration_inputs

    request = ov.Core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
    found = []
    for sample in samples:
        request.infer(dict(sample))
        found.append(calibration_inputs.counting(spec, sample, request.get_tensor(spec.outputs[0]).data))
    return found


def _cosines(spec: Spec, samples: Sequence[Any], truth: Sequence[Any], got: Sequence[Any]) -> list[float]:
    """Mean cosine of each sample's vectors."""
    import numpy as np

    def cosine(a: Any, b: Any) -> float:
        norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
        return float(((a * b).sum(axis=-1) / np.maximum(norms, 1e-12)).mean())

    return [cosine(a, b) for a, b in zip(truth, got, strict=True)]


def _most_to_gain(ov: Any, graph: Any, spec: Spec, samples: Sequence[Any], truth: Sequence[Any]) -> tuple[str, ...]:
    """The products fed by the quantised input that costs most on these samples: the names of its consumers."""
    best: tuple[float, tuple[str, ...]] = (-1.0, ())
    quantized = [node.get_friendly_name() for node in graph.get_ops() if node.get_type_name() == "FakeQuantize"]
    for name in quantized:
        trial = graph.clone()
        (node,) = [op for op in trial.get_ops() if op.get_friendly_name() == name]
        fed = tuple(op.get_friendly_name() for op in _products(trial) if _source(op, 0, "FakeQuantize") == node)
        if not fed:
            continue
        node.output(0).replace(node.input_value(0))
        score = min(_cosines(spec, samples, truth, _answers(ov, trial, spec, samples)))
        best = max(best, (score, fed))
    return best[1]
