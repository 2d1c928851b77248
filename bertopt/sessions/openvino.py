"""OpenVINO models on the CPU, with precision, threads and streams always stated."""

from __future__ import annotations

import os
import queue
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from bertopt import vendor
from bertopt.core import Device, OpenVino, Session
from bertopt.errors import Unsupported

if TYPE_CHECKING:
    from bertopt.core import Array

#: Attention sums over the tokens in blocks of so many, and in another order over what is left: 1e-7 that may flip an INT8
#: rounding, and then an answer by 5e-3. In whole blocks, a padded text's answer is the same to the last bit beside any
#: others. And the first run of a shape costs 25 ms of preparation at MiniLM's size, so the fewer shapes the better.
_BLOCK = 16
#: One text of at most so many tokens runs on a model compiled for that shape alone: working out shapes anew takes up to half
#: of so short a run. Compiling it takes about a second, once, when the first such text comes.
_SHORT = _BLOCK
#: Prepared shapes are kept up to so many parts, of which a shape has some 100 for each 6 layers; OpenVINO's own 5,000 hold
#: fewer than a service sees.
_PREPARED = 40_000
#: What a matrix product is called in a compiled model.
_PRODUCTS = frozenset({"MatMul", "FullyConnected", "Convolution"})
#: Streams by default at most: each has buffers of its own.
MOST_STREAMS = 16


class OpenVinoSession(Session):
    """Runs an IR on `threads` threads (all cores where None): one batch alone on all of them, several in `streams`
    streams that share them, by default one a thread. `run` and `run_all` may be called by several threads at once;
    `load`, `step` and `fetch` belong to one caller."""

    def __init__(self, model: OpenVino, device: Device, threads: int | None = None, streams: int | None = None) -> None:
        ov = vendor.openvino()
        if device != "cpu":
            raise Unsupported("OpenVINO runs on the CPU here; set device: cpu")
        if model.precision == "bfloat16" and not vendor.runs_bfloat16():
            raise Unsupported(
                "this CPU has no bfloat16 arithmetic (avx512_bf16 or amx_bf16), and OpenVINO would run float32 instead; "
                "export with precision: f32 or int8"
            )
        self.spec = model.spec
        self.streams, self.concurrent = streams or min(threads or _cores(), MOST_STREAMS), True
        # Packed floats need no blocks: what they differ by is 1e-7.
        self.block = 1 if model.spec.layout == "packed" and model.precision != "int8" else _BLOCK
        properties: dict[str, Any] = {
            # Left alone, OpenVINO runs float32 in bf16 on CPUs that have it.
            "INFERENCE_PRECISION_HINT": "bf16" if model.precision == "bfloat16" else "f32",
            # Two processes that pin their threads pin them to the same cores.
            "ENABLE_CPU_PINNING": False,
            "CPU_RUNTIME_CACHE_CAPACITY": _PREPARED,
        }
        if threads is not None:
            properties["INFERENCE_NUM_THREADS"] = threads
        self._core, self._path, self._properties = ov.Core(), model.path, properties
        self.compiled = self._compile(1)
        self._tensor = ov.Tensor
        self._version = ov.get_version()
        self._request = self.compiled.create_infer_request()
        self._loaded = self._request
        self._inputs: list[Array] = []
        self._alone, self._lock = threading.Lock(), threading.Lock()
        self._single = self.compiled.create_infer_request()
        #: The model for one short text: not looked for yet, or none where it would not give the same answers.
        self._short: Any = None
        self._sought = False
        self._several: Any = None
        #: Requests that nobody uses, so that as many callers run at once as there are streams.
        self._free: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def load(self, inputs: Mapping[str, Array]) -> None:
        with self._alone:
            self._loaded = self._for_short(inputs, self._request) or self._request
        self._inputs = self._set(self._loaded, inputs)

    def step(self) -> None:
        self._loaded.infer()

    def fetch(self) -> dict[str, Array]:
        return self._answers(self._loaded, self._inputs)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        # Alone, a batch has all threads; beside others, a stream.
        if self._alone.acquire(blocking=self.streams == 1):
            try:
                return self._infer(self._for_short(inputs, self._single) or self._single, inputs)
            finally:
                self._alone.release()
        self._throughput()
        request = self._free.get()
        try:
            return self._infer(request, inputs)
        finally:
            self._free.put(request)

    def run_all(self, batches: Iterable[Mapping[str, Array]]) -> Iterator[dict[str, Array]]:
        running: deque[tuple[Any, list[Array]]] = deque()
        model = self._throughput()
        requests = [model.create_infer_request() for _ in range(self.streams)]
        try:
            for inputs in batches:
                answers = None
                if requests:
                    request = requests.pop()
                else:
                    request, held = running.popleft()
                    request.wait()
                    answers = self._answers(request, held)
                held = self._set(request, inputs)
                request.start_async()
                running.append((request, held))
                if answers is not None:
                    yield answers
            while running:
                request, held = running.popleft()
                request.wait()
                yield self._answers(request, held)
        finally:
            # Left early: what still runs reads arrays that are about to go.
            for request, _ in running:
                request.wait()

    def facts(self) -> dict[str, Any]:
        threads = int(self.compiled.get_property("INFERENCE_NUM_THREADS"))
        return {
            "runtime": f"openvino {self._version}",
            "precision": str(self.compiled.get_property("INFERENCE_PRECISION_HINT")),
            "threads": threads or "all cores",
            "streams": self.streams,
            "products": executed(self.compiled),
        }

    def _compile(self, streams: int, shape: tuple[int, int] | None = None) -> Any:
        model = self._path
        if shape:
            model = self._core.read_model(self._path)
            model.reshape({name: [shape[0], 1] if name == "first_tokens" else shape for name in self.spec.network_inputs})
        return self._core.compile_model(model, "CPU", {**self._properties, "NUM_STREAMS": streams})

    def _for_short(self, inputs: Mapping[str, Array], usual: Any) -> Any:
        """A request for one short text, if these are one. The first is run on the `usual` one too: only a model whose answer
        is the same to the last bit is used."""
        import numpy as np

        rows, length = inputs["input_ids"].shape
        if rows != 1 or length > min(_SHORT, self.spec.max_length):
            return None
        if not self._sought:
            self._sought = True
            short = self._compile(1, (1, min(_SHORT, self.spec.max_length))).create_infer_request()
            found, expected = (self._infer(request, inputs) for request in (short, usual))
            if all(np.array_equal(found[name], expected[name], equal_nan=True) for name in expected):
                self._short = short
        return self._short

    def _throughput(self) -> Any:
        """The model compiled for all streams, when it is first needed: one that answers single texts never pays for it."""
        with self._lock:
            if self._several is None:
                several = self.compiled if self.streams == 1 else self._compile(self.streams)
                for _ in range(self.streams):
                    self._free.put(several.create_infer_request())
                self._several = several
        return self._several

    def _infer(self, request: Any, inputs: Mapping[str, Array]) -> dict[str, Array]:
        held = self._set(request, inputs)
        request.infer()
        return self._answers(request, held)

    def _set(self, request: Any, inputs: Mapping[str, Array]) -> list[Array]:
        """Hand the arrays over, uncopied where their length allows; they must live until the request has run.

        Returns them, and first of all the ids as they came.
        """
        import numpy as np

        ids = inputs["input_ids"]
        missing = -ids.shape[1] % _BLOCK
        if self.spec.layout == "padded":
            missing = min(missing, self.spec.max_length - ids.shape[1])
        held = []
        for name in self.spec.network_inputs:
            array = inputs[name]
            if missing > 0 and name != "first_tokens":
                rows, length = array.shape
                wide = np.empty((rows, length + missing), np.int64)
                wide[:, :length] = array
                wide[:, length:] = self.spec.pad_id if name == "input_ids" else 0
                array = wide
            held.append(np.ascontiguousarray(array))
            request.set_tensor(name, self._tensor(held[-1], shared_memory=True))
        return [ids, *held]

    def _answers(self, request: Any, held: list[Array]) -> dict[str, Array]:
        import numpy as np

        found = {name: np.array(request.get_tensor(name).data, dtype=np.float32) for name in self.spec.outputs}
        width = held[0].shape[1]
        if self.spec.granularity != "text":
            return {name: np.ascontiguousarray(value[:, :width]) for name, value in found.items()}
        return found


def executed(compiled: Any) -> dict[str, int]:
    """Matrix products of a compiled model by the precision that they run in, as the runtime says."""
    found: Counter[str] = Counter()
    for node in compiled.get_runtime_model().get_ops():
        info = node.get_rt_info()
        if "layerType" in info and info["layerType"].astype(str) in _PRODUCTS:
            found[info["runtimePrecision"].astype(str)] += 1
    return dict(found)


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
