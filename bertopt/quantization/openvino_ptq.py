"""NNCF's post-training quantisation of an OpenVINO graph, repeated until held-out answers agree with float32."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from bertopt.core import Spec
from bertopt.errors import Unsupported
from bertopt.quantization import calibration_inputs
from bertopt.system import openvino_import

#: Every seventh calibration sample is held out to compare answers on: texts and odd ones, so no multiple of 3.
HELD_OUT = 7
#: Rounds of quantising again, each with one more input of products left in float32.
ROUNDS = 4
#: NNCF takes no channel's largest weight for less than this share of the matrix's largest, nor for less than this
#: (nncf/quantization/fake_quantize.py, fix_zero_filters_symmetric).
_LEAST_SHARE, _LEAST_WEIGHT = 0.01, 8e-5
#: ConvBERT's are over neighbouring tokens, each channel by itself: they stay float32, as they do in ONNX Runtime.
_CONVOLUTIONS = ("Convolution", "GroupConvolution")


@dataclass(frozen=True)
class Options:
    """The options of `convert_openvino` that say how to quantise."""

    preset: str
    range_estimator: str
    smooth_quant: float | None
    bias_correction: bool
    keep_fp32: tuple[str, ...]
    min_cosine: float | None
    weight_bits: Literal[7, 8] = 8


def quantize(
    graph: Any, spec: Spec, samples: Sequence[Mapping[str, Any]], options: Options
) -> tuple[Any, tuple[str, ...]]:
    """Return the quantised graph and the names of the products left in float32.

    Those that NNCF cannot round well are left at once. While the worst held-out sample misses `min_cosine`, the products that gain most on it go back to float32. Raises
    Unsupported where `keep_fp32` names no product.
    """
    held = samples[::HELD_OUT]
    used = [sample for number, sample in enumerate(samples) if number % HELD_OUT] or list(samples)
    names = {node.get_friendly_name() for node in products(graph)}
    if unknown := [name for name in options.keep_fp32 if name not in names]:
        raise Unsupported(f"keep_fp32: the graph has no product '{unknown[0]}'; it has {', '.join(sorted(names))}")
    truth = _answers(graph, spec, held)
    kept = tuple(dict.fromkeys((*options.keep_fp32, *uneven_products(graph))))
    for _ in range(ROUNDS):
        quantized = _once(graph, used, kept, options)
        if options.min_cosine is None:
            break
        scores = _cosines(truth, _answers(quantized, spec, held))
        worst = int(np.argmin(scores))  # of NaN the first NaN
        if scores[worst] >= options.min_cosine:
            break
        more = _most_to_gain(quantized, spec, [held[worst]], [truth[worst]])
        if not more:
            break
        kept = (*kept, *more)
    else:
        quantized = _once(graph, used, kept, options)
    return quantized, kept


def products(graph: Any) -> list[Any]:
    """Matrix products with constant weights. Those of constants alone, DeBERTa's relative positions, are computed once."""
    live = set[str]()
    for node in graph.get_ordered_ops():
        if node.get_type_name() == "Parameter" or any(value.get_node().get_friendly_name() in live for value in node.input_values()):
            live.add(node.get_friendly_name())
    return [
        node
        for node in graph.get_ops()
        if node.get_type_name() == "MatMul" and node.input_value(0).get_node().get_friendly_name() in live
        and _source(node, 1, "Constant")
    ]  # fmt: skip


def uneven_products(graph: Any) -> list[str]:
    """Return the names of the products with a channel whose weights are so small beside the others' that NNCF rounds them too coarsely.

    So is the head of a regression whose numbers are of unlike size. A channel of zeros is none.
    """
    return [node.get_friendly_name() for node in products(graph) if _uneven(node)]


def _uneven(product: Any) -> bool:
    source, transposed = product.input_value(1).get_node(), bool(product.get_attributes()["transpose_b"])
    while source.get_type_name() != "Constant":
        transposed ^= source.get_type_name() == "Transpose"
        source = source.input_value(0).get_node()
    matrix = np.abs(source.get_data())
    if matrix.ndim != 2:
        return False
    channels = matrix.max(axis=1 if transposed else 0)
    least = max(_LEAST_SHARE * float(channels.max()), _LEAST_WEIGHT)
    return bool(((channels > 0) & (channels < least)).any())


def int8_products(graph: Any) -> int:
    """Count the products whose weights are stored in 8 bits and whose other input is quantised."""
    stored = ("i8", "u8")
    return sum(
        _source(node, 1, "Constant").get_output_element_type(0).to_string() in stored
        and _source(node, 0, "FakeQuantize") is not None
        for node in products(graph)
    )


def _once(graph: Any, samples: list[Any], kept: tuple[str, ...], options: Options) -> Any:
    nncf = openvino_import.nncf()
    advanced = nncf.AdvancedQuantizationParameters(disable_bias_correction=not options.bias_correction)
    # By default NNCF would halve the range of the first convolution alone, and sums would saturate everywhere else.
    advanced.overflow_fix = nncf.OverflowFix.ENABLE if options.weight_bits == 7 else nncf.OverflowFix.DISABLE
    advanced.smooth_quant_alphas.matmul = -1 if options.smooth_quant is None else options.smooth_quant
    ranges = nncf.quantization.range_estimator.RangeEstimatorParametersSet
    advanced.activations_range_estimator_params = getattr(ranges, options.range_estimator.upper())
    # Attention takes as long in INT8: softmax stays float32, and its inputs have to be quantised. Pooling of packed rows
    # is a product of two activations too.
    weighted = {node.get_friendly_name() for node in products(graph)}
    others = [
        node.get_friendly_name()
        for node in graph.get_ops()
        if node.get_type_name() == "MatMul" and node.get_friendly_name() not in weighted
    ]
    ignored = nncf.IgnoredScope(names=[*kept, *others], types=["ScaledDotProductAttention", *_CONVOLUTIONS], validate=False)
    with contextlib.redirect_stdout(io.StringIO()):
        return nncf.quantize(
            graph, nncf.Dataset(samples), subset_size=len(samples), model_type=nncf.ModelType.TRANSFORMER,
            preset=nncf.QuantizationPreset(options.preset),
            ignored_scope=ignored, advanced_parameters=advanced,
        )  # fmt: skip


def _source(node: Any, port: int, kind: str) -> Any:
    """The node of `kind` that an input comes from by way of nothing but scales, types and shapes, or None.

    One for all tokens may come before the first of them is taken, for a pooler.
    """
    through = {"Convert", "Multiply", "Subtract", "Transpose", "Reshape", "FakeQuantize"} - {kind}
    through |= {"Gather"} if kind == "FakeQuantize" else set()
    origin = node.input_value(port).get_node()
    while origin.get_type_name() in through:
        origin = origin.input_value(0).get_node()
    return origin if origin.get_type_name() == kind else None


def _answers(graph: Any, spec: Spec, samples: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The vectors [N, D] of the first output that count, for each sample."""
    core = openvino_import.openvino().Core()
    with openvino_import.one_allocator():
        request = core.compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
    answers = []
    for sample in samples:
        request.infer(dict(sample))
        answers.append(calibration_inputs.valid_vectors(spec, sample, request.get_tensor(spec.outputs[0]).data))
    return answers


def _cosines(truth: Sequence[Any], got: Sequence[Any]) -> list[float]:
    """Mean cosine of each sample's vectors."""

    def cosine(a: Any, b: Any) -> float:
        norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
        return float(((a * b).sum(axis=-1) / np.maximum(norms, 1e-12)).mean())

    return [cosine(a, b) for a, b in zip(truth, got, strict=True)]


def _most_to_gain(graph: Any, spec: Spec, samples: Sequence[Any], truth: Sequence[Any]) -> tuple[str, ...]:
    """Names of the products fed by the quantised input that costs most on these samples."""
    best: tuple[float, tuple[str, ...]] = (-1.0, ())
    quantized = [node.get_friendly_name() for node in graph.get_ops() if node.get_type_name() == "FakeQuantize"]
    for name in quantized:
        trial = graph.clone()
        (node,) = [op for op in trial.get_ops() if op.get_friendly_name() == name]
        fed = tuple(op.get_friendly_name() for op in products(trial) if _source(op, 0, "FakeQuantize") == node)
        if not fed:
            continue
        node.output(0).replace(node.input_value(0))
        score = min(_cosines(truth, _answers(trial, spec, samples)))
        best = max(best, (score, fed))
    return best[1]
