"""Measure the ranges of a graph's activations on real texts and unusual inputs."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bertopt.errors import Unsupported
from bertopt.quantization import onnx_files
from bertopt.system import onnxruntime_import, temporary_directory

if TYPE_CHECKING:
    from bertopt.core import Array

Method = Literal["minmax", "percentile", "entropy"]
#: Share of the values that a range by percentile holds, in percent: ONNX Runtime's default.
PERCENTILE = 99.999
#: Bins of the histograms. Entropy compares them with 8 bits, from half the bins on, so it cuts half a range at most:
#: with 2048 bins it cut so much of BERT's few large values that cosines fell to 0.73.
BINS, LEVELS = {"percentile": 2048, "entropy": 512}, 256


@dataclass(frozen=True)
class Sample:
    """One batch as the network takes it, and which of its tokens [B, S] are not padding."""

    inputs: dict[str, Array]
    valid: Array


@dataclass
class Range:
    """The values that one activation [..., H] had."""

    low: float = 0.0
    high: float = 0.0
    channels: Any = field(default=0.0)
    """Largest magnitude in each of the H channels."""


def measure(path: Path, names: Sequence[str], given: Iterable[Sample], method: Method) -> dict[str, Range]:
    """The range of each named value [..., H] of the graph over the samples' valid tokens.

    `minmax` holds everything seen, `percentile` all but one in a hundred thousand, and `entropy` loses the least
    information about the distribution (ONNX Runtime's calibrators). Raises Unsupported for a value that is not finite.
    """
    found = {name: Range() for name in names}
    if not found:
        return found
    histograms = _histograms(method)
    for sample, values in _run(path, names, given):
        for name, value in values.items():
            seen, rows = found[name], _valid(value, sample.valid)
            if not np.isfinite(rows).all():
                raise Unsupported(f"'{name}' is not finite on the calibration texts; no range holds it")
            if rows.size:
                seen.channels = np.maximum(seen.channels, np.abs(rows).max(axis=0))
                seen.low, seen.high = min(seen.low, float(rows.min())), max(seen.high, float(rows.max()))
                if histograms is not None and np.abs(rows).max() > 0:
                    _quietly(histograms.collect, {name: rows})
    if histograms is not None:
        for name, (low, high, *_) in _quietly(histograms.compute_collection_result).items():
            found[name].low, found[name].high = min(0.0, float(low)), max(0.0, float(high))
    return found


def _histograms(method: Method) -> Any:
    if method == "minmax":
        return None
    return onnxruntime_import.module("onnxruntime.quantization.calibrate").HistogramCollector(method, False, BINS[method], LEVELS, PERCENTILE, "same")


def _quietly(do: Callable[..., Any], *arguments: Any) -> Any:
    """ONNX Runtime's collectors print what they do."""
    with contextlib.redirect_stdout(io.StringIO()):
        return do(*arguments)


def _valid(value: Array, valid: Array) -> Array:
    """The rows [N, H] of an activation that belong to tokens; all of them where it has one a text."""
    if value.shape[:2] == valid.shape:
        return np.asarray(value[valid])
    rows = value.reshape(-1, value.shape[-1])
    return rows[valid.reshape(-1)] if len(rows) == valid.size else rows


def _run(source: Path, names: Sequence[str], given: Iterable[Sample]) -> Iterator[tuple[Sample, dict[str, Array]]]:
    """The samples with the values that the graph computes for them."""
    import onnx_ir as ir

    ort = onnxruntime_import.module()
    graph = ir.load(source)
    values = {value.name: value for node in graph.graph for value in node.outputs}
    graph.graph.outputs.clear()
    for name in names:
        values[name].dtype = ir.DataType.FLOAT
        graph.graph.outputs.append(values[name])
    options = ort.SessionOptions()
    options.log_severity_level = 4
    with temporary_directory.make() as folder:
        path = onnx_files.save(graph, Path(folder))
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        for sample in given:
            answers = session.run(list(names), sample.inputs)
            yield sample, {name: np.asarray(answer) for name, answer in zip(names, answers, strict=True)}
