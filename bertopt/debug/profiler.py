"""Profile one call of a stage with its runtime's own profiler, in sessions opened for that alone."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertopt.checks.timed_steps import random_inputs
from bertopt.core import Compiled, Device, Eager, Model, Onnx, OpenVino, Session
from bertopt.debug.graph_layers import ATTENTION, SOFTMAX, layers_of, onnx_nodes, openvino_nodes
from bertopt.debug.timed_calls import WARM_UP, call_times, timed, warm_up
from bertopt.errors import Unsupported, UsageError
from bertopt.report.profile import AFTER, BEFORE, UNKNOWN, Profile, Row, class_of
from bertopt.runtime import text_inputs
from bertopt.runtime.tokenization import Tokenizer
from bertopt.sessions import open_session
from bertopt.sessions.onnxruntime import OnnxRuntimeSession
from bertopt.sessions.openvino import OpenVinoSession
from bertopt.sessions.openvino_request import Request
from bertopt.sessions.packed import PackedSession

if TYPE_CHECKING:
    from bertopt.core import Array

#: What profilers give: (layer, operator) to (calls, milliseconds) over all runs.
Sums = Mapping[tuple[str, str], tuple[int, float]]


def profile(
    model: Model, directory: Path, device: Device, shape: tuple[int, int] | None, texts: list[Any], scratch: Path
) -> Profile:
    """Profile `model` on `texts` as one padded batch, or on random tokens [B, S] where there are none.

    `scratch` is an empty directory. Raises Unsupported for a form or device that has no profiler here, UsageError for more tokens than the model has positions.
    """
    if device != "cpu":
        raise Unsupported("profile measures on the CPU; for a GPU use Nsight Systems, or export with device: cpu")
    inputs = _inputs(model, directory, shape, texts)
    plain = open_session(model, device)
    plain_ms = statistics.median(call_times(plain, inputs))
    runtime = plain.facts().runtime
    del plain
    profiler = _profiler(model, scratch)
    session = PackedSession(profiler.session, model.spec) if model.spec.layout == "packed" else profiler.session
    session.load(inputs)
    times, sums = profiler.measure(session)
    rows = [
        Row(layer=layer, operator=operator, operators=class_of(operator), calls=calls / len(times), ms=ms / len(times))
        for (layer, operator), (calls, ms) in sums.items()
    ]
    wall = statistics.fmean(times)
    batch, sequence = inputs["input_ids"].shape
    return Profile(
        directory=str(directory), form=model.form, precision=model.precision, runtime=runtime, batch=batch, sequence=sequence,
        runs=len(times), wall_ms=wall, plain_ms=plain_ms, rows=sorted(rows, key=lambda row: -row.ms),
        between_ms=wall - sum(row.ms for row in rows),
    )  # fmt: skip


def _inputs(model: Model, directory: Path, shape: tuple[int, int] | None, texts: list[Any]) -> dict[str, Array]:
    import numpy as np

    longest = model.shapes.longest
    if texts:
        tokenizer = Tokenizer(directory, model.spec, longest)
        return tokenizer.batch(tokenizer.encode(text_inputs.from_json(texts)))
    batch, sequence = shape or (8, min(128, longest))
    if sequence > longest:
        raise UsageError(f"the shape must fit the model's {longest} tokens; got {batch} × {sequence}")
    return random_inputs(model.spec, (batch, sequence), np.random.default_rng(0))


def _profiler(model: Model, scratch: Path) -> Any:
    if isinstance(model, Onnx):
        return _OnnxRuntime(model, scratch)
    if isinstance(model, OpenVino):
        return _OpenVino(model)
    if isinstance(model, Eager | Compiled):
        from bertopt.debug.profile_torch import TorchProfiler

        return TorchProfiler(model)
    raise Unsupported(f"no profiler for form '{model.form}'; profile the ONNX stage that it was built from")


class _Recording(OnnxRuntimeSession):
    """A session that writes its profile below `prefix`, and the graph that it really runs beside it."""

    def __init__(self, model: Onnx, folder: Path) -> None:
        self._folder = folder
        super().__init__(model, "cpu")

    def _options(self) -> Any:
        options = super()._options()
        options.enable_profiling, options.profile_file_prefix = True, str(self._folder / "profile")
        options.optimized_model_filepath = str(self._folder / "model.onnx")
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights")
        return options


class _OnnxRuntime:
    def __init__(self, model: Onnx, folder: Path) -> None:
        self._folder, self._model = folder, model
        self.session = _Recording(model, folder)

    def measure(self, session: Session) -> tuple[list[float], Sums]:
        import onnx_ir as ir

        warm_up(session)
        times = timed(session.step)
        events = json.loads(Path(self.session.session.end_profiling()).read_text("utf-8"))
        graph = ir.load(self._folder / "model.onnx")
        layers = layers_of(onnx_nodes(graph), self._model.spec.layers)
        by_name = {node.name: layers.get(node.outputs[0].name or "", UNKNOWN) for node in graph.graph}
        begin = [event["ts"] for event in events if event["name"] == "model_run"][-len(times)]
        sums: dict[tuple[str, str], tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        for event in events:
            if event["cat"] == "Node" and event["name"].endswith("_kernel_time") and event["ts"] >= begin:
                key = by_name.get(event["name"].removesuffix("_kernel_time"), UNKNOWN), event["args"]["op_name"]
                calls, ms = sums[key]
                sums[key] = calls + 1, ms + event["dur"] / 1000
        return times, sums


class _Counting(OpenVinoSession):
    """A session whose requests count the time of each node."""

    def _compile(self, streams: int) -> Any:
        self._properties["PERF_COUNT"] = True
        return super()._compile(streams)

    def _request_for(self, inputs: Mapping[str, Array], request: Request) -> Request:
        # Short texts would run on another model, without the names of this one.
        return request

    def counted(self) -> dict[tuple[str, str], float]:
        """Mean milliseconds of each node that ran, by its name and type."""
        nodes = self._loaded.request.get_profiling_info()
        return {(node.node_name, node.node_type): ms for node in nodes if (ms := node.real_time.total_seconds() * 1000)}


class _OpenVino:
    def __init__(self, model: OpenVino) -> None:
        self._model = model
        self.session = _Counting(model, "cpu")

    def measure(self, session: Session) -> tuple[list[float], Sums]:
        from bertopt.system import openvino_import

        nodes = openvino_nodes(openvino_import.openvino().Core().read_model(self._model.path))
        layers = layers_of(nodes, self._model.spec.layers)
        originals = _originals(self.session.compiled.get_runtime_model())
        attentions = {node.name for node in nodes if node.kind in ATTENTION | SOFTMAX}
        # The counters are means over all runs so far.
        warm_up(session)
        before = self.session.counted()
        times = timed(session.step)
        every, sums = WARM_UP + len(times), dict[tuple[str, str], tuple[int, float]]()
        for (name, kind), mean in self.session.counted().items():
            ms = max(0.0, mean * every - before.get((name, kind), 0.0) * WARM_UP)
            parts = originals.get(name, (name,))
            # A whole attention may run as one subgraph.
            operator = "MHA" if kind == "Subgraph" and not attentions.isdisjoint(parts) else kind
            key = _layer([layers.get(each) for each in parts]), operator
            calls, known = sums.get(key, (0, 0.0))
            sums[key] = calls + len(times), known + ms
        return times, sums


def _originals(graph: Any) -> dict[str, list[str]]:
    """For each node that is run, the nodes of the model that it was made of."""
    found = {}
    for node in graph.get_ordered_ops():
        info = node.get_rt_info()
        if "originalLayersNames" in info:
            found[node.get_friendly_name()] = str(info["originalLayersNames"].value).split(",")
    return found


def _layer(names: list[str | None]) -> str:
    """The layer of a node that was made of nodes of these layers: the last encoder layer among them."""
    known = [name for name in names if name]
    numbers = [int(name.removeprefix("layer ")) for name in known if name not in (BEFORE, AFTER)]
    if numbers:
        return f"layer {max(numbers)}"
    return known[0] if known else UNKNOWN
