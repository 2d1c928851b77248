"""OpenVINO models on the CPU, with precision, threads and streams always stated."""

from __future__ import annotations

import os
import queue
import re
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from bertopt.core import Device, OpenVino, RuntimeFacts, Session
from bertopt.errors import Unsupported
from bertopt.modeling import packing
from bertopt.sessions.inputs import check
from bertopt.sessions.openvino_request import BLOCK, Request, Short, widens
from bertopt.system import environment, limits, openvino_import, signal_stack

if TYPE_CHECKING:
    from bertopt.core import Array

#: One text runs on a model compiled for the least of these lengths that it fits into: working out shapes anew takes up to a
#: third of so short a run. Compiling it takes about a second, once for each length, when the first such text comes.
#: Without AVX-512 texts of more than 24 tokens come out otherwise: nearly all in float32, one in a thousand in INT8.
_SHORT, _SHORT_WITHOUT_AVX512 = (8, 16, 32), (8, 16)
#: Random texts of every number of tokens whose answers must be equal to the last bit before it is used. Left to itself
#: OpenVINO fuses more where it knows shapes, and then one text in three differs.
_EQUAL_TEXTS = 2
_UNFUSED = {"SNIPPETS_MODE": "DISABLE"}
#: Entries in OpenVINO's cache of prepared shapes: a shape takes about 100 for each 6 layers, and its default of 5,000 holds
#: fewer shapes than a service sees.
_PREPARED = 40_000
#: Type of matrix products in a compiled model.
_PRODUCTS = frozenset({"MatMul", "FullyConnected", "Convolution"})
#: OpenVINO's messages for an operator without a kernel, when it compiles and when it runs, and environment variables that keep oneDNN from
#: using instructions of the CPU; `runs_bfloat16` does not consider them.
_NO_KERNEL = re.compile(r"Supported primitive descriptors list is empty for node: \S+ type: (\w+)|\[CPU\] (\w+) node with name \S+ bad combination")
_LESS_ISA = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
#: Most streams by default: each has separate buffers.
MOST_STREAMS = 16


class OpenVinoSession(Session):
    """Runs an IR on `threads` threads (as many as the cores and the CPU quota allow where None): one batch alone on all of them, several in `streams`
    streams that share them, by default one a thread. `run` and `run_all` may be called by several threads at once;
    `load`, `step` and `fetch` belong to one caller."""

    def __init__(self, model: OpenVino, device: Device, threads: int | None = None, streams: int | None = None) -> None:
        ov = openvino_import.openvino()
        if device != "cpu":
            raise Unsupported("OpenVINO runs on the CPU here; load with device='cpu' (in a recipe device: cpu)")
        if model.precision == "bfloat16" and not openvino_import.runs_bfloat16():
            raise Unsupported(
                "OpenVINO has no bfloat16 kernels for this CPU (they need avx512_bf16 or amx_bf16) and would run float32 instead; "
                "export with precision: f32 or int8"
            )
        self.spec = model.spec
        self.streams, self.concurrent = streams or min(threads or limits.cores(), MOST_STREAMS), True
        # Packed floats need no blocks: what they differ by is 1e-7.
        self.block = 1 if model.spec.layout == "packed" and model.precision != "int8" else BLOCK
        properties: dict[str, Any] = {
            # Left alone, OpenVINO runs float32 in bf16 on CPUs that have it.
            "INFERENCE_PRECISION_HINT": "bf16" if model.precision == "bfloat16" else "f32",
            # Two processes that pin their threads pin them to the same cores.
            "ENABLE_CPU_PINNING": False,
            "CPU_RUNTIME_CACHE_CAPACITY": _PREPARED,
        }
        if threads is not None or (threads := limits.quota_threads()) is not None:
            properties["INFERENCE_NUM_THREADS"] = max(threads, self.streams)
        self._core, self._properties = ov.Core(), properties
        # Read once: by the time that more streams or a short length are compiled, another file may lie there.
        self._model = self._core.read_model(model.path)
        self._precision, self._tensor = model.precision, ov.Tensor
        with signal_stack.kept(), openvino_import.one_allocator():
            self.compiled = self._compile(1)
        self._version = ov.get_version()
        #: What `load` takes, and what a batch alone runs on.
        self._request, self._single = self._requests(self.compiled, 2)
        self._loaded = self._request
        self._alone, self._lock = threading.Lock(), threading.Lock()
        #: Requests for one short text by its length, one for each of these two; empty where the answers differed.
        self._short: dict[int, dict[Request, Short]] = {}
        self._lengths = _SHORT if "avx512f" in environment.isa() else _SHORT_WITHOUT_AVX512
        self._several: Any = None
        #: Requests that nobody uses, so that as many callers run at once as there are streams.
        self._free: queue.SimpleQueue[Request] = queue.SimpleQueue()

    def load(self, inputs: Mapping[str, Array]) -> None:
        with self._alone:
            self._loaded = self._request_for(inputs, self._request)
        self._loaded.set(inputs)

    def step(self) -> None:
        self._loaded.request.infer()

    def fetch(self) -> dict[str, Array]:
        return self._loaded.answers()

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        # Alone, a batch has all threads; beside others, a stream.
        if self._alone.acquire(blocking=self.streams == 1):
            try:
                return self._request_for(inputs, self._single).run(inputs)
            finally:
                self._alone.release()
        self._throughput()
        request = self._free.get()
        try:
            return request.run(inputs)
        finally:
            self._free.put(request)

    def run_all(self, batches: Iterable[Mapping[str, Array]]) -> Iterator[dict[str, Array]]:
        running: deque[Request] = deque()
        # Twice as many as streams: one that is done finds its next batch waiting, however long the others take.
        requests = self._requests(self._throughput(), 2 * self.streams)
        try:
            for inputs in batches:
                answers = None
                if requests:
                    request = requests.pop()
                else:
                    request = running.popleft()
                    request.request.wait()
                    answers = request.answers()
                request.set(inputs)
                request.request.start_async()
                running.append(request)
                if answers is not None:
                    yield answers
            while running:
                request = running.popleft()
                request.request.wait()
                yield request.answers()
        finally:
            # Left early: what still runs reads arrays that are about to go.
            for request in running:
                request.request.wait()

    def facts(self) -> RuntimeFacts:
        return RuntimeFacts(
            runtime=f"openvino {self._version}", precision=self.compiled.get_property("INFERENCE_PRECISION_HINT").to_string(),
            threads=int(self.compiled.get_property("INFERENCE_NUM_THREADS")) or "all cores", streams=self.streams,
            products=executed(self.compiled),
        )  # fmt: skip

    def _compile(self, streams: int) -> Any:
        taken = [name for name in _LESS_ISA if name in os.environ]
        try:
            compiled = self._core.compile_model(self._model, "CPU", {**self._properties, "NUM_STREAMS": streams})
            if taken or "avx2" not in environment.isa():
                # Some operators look for their kernel when they first run.
                Request(compiled.create_infer_request(), self._tensor, self.spec).run(packing.random_rows(self.spec, 1, 1, np.random.default_rng(0)))
            return compiled
        except RuntimeError as error:
            found = _NO_KERNEL.search(str(error))
            if found is None:
                raise
            advice = f"unset {', '.join(taken)}, which keeps it from using instructions of this CPU" if taken else "export another precision"
            raise Unsupported(f"OpenVINO has no kernel here for {found[found.lastindex or 0]} in {self._precision}: {advice}") from error

    def _requests(self, compiled: Any, count: int) -> list[Request]:
        return [Request(compiled.create_infer_request(), self._tensor, self.spec) for _ in range(count)]

    def _request_for(self, inputs: Mapping[str, Array], usual: Request) -> Request:
        """The request for these inputs: a separate one for one short text, if that answers as the `usual` one does."""
        check(inputs, self.spec.network_inputs)
        rows, tokens = inputs["input_ids"].shape
        length = next((length for length in self._lengths if tokens <= length <= self.spec.max_length), None)
        # A packed row may hold several texts.
        texts = inputs["first_tokens"].size if "first_tokens" in inputs else rows
        if texts != 1 or rows != 1 or length is None or not widens(self.spec, inputs):
            return usual
        if length not in self._short:
            model = self._model.clone()
            model.reshape({name: [1, 1 if name == "first_tokens" else length] for name in self.spec.network_inputs})
            compiled = self._core.compile_model(model, "CPU", {**self._properties, **_UNFUSED, "NUM_STREAMS": 1})
            short = [Short(compiled.create_infer_request(), self._tensor, self.spec, length) for _ in range(2)]
            same = self._equal_answers(short[0], usual, length)
            self._short[length] = dict(zip((self._request, self._single), short, strict=True)) if same else {}
        return self._short[length].get(usual, usual)

    def _equal_answers(self, one: Request, other: Request, length: int) -> bool:
        """Whether both give the same bits for one text, of any number of tokens that the request for `length` is used for."""
        rng = np.random.default_rng(0)
        fewest = max((shorter for shorter in self._lengths if shorter < length), default=0) + 1
        for tokens in [*range(fewest, length + 1)] * _EQUAL_TEXTS:
            inputs = packing.random_rows(self.spec, 1, tokens, rng)
            got, expected = one.run(inputs), other.run(inputs)
            if not all(np.array_equal(got[name], expected[name], equal_nan=True) for name in expected):
                return False
        return True

    def _throughput(self) -> Any:
        """The model compiled for all streams, when it is first needed: one that answers single texts never pays for it."""
        with self._lock:
            if self._several is None:
                several = self.compiled if self.streams == 1 else self._compile(self.streams)
                for request in self._requests(several, self.streams):
                    self._free.put(request)
                self._several = several
        return self._several


def executed(compiled: Any) -> dict[str, int]:
    """Matrix products of a compiled model by the precision that they run in, as the runtime says."""
    found: Counter[str] = Counter()
    for node in compiled.get_runtime_model().get_ops():
        info = node.get_rt_info()
        if "layerType" in info and info["layerType"].astype(str) in _PRODUCTS:
            found[info["runtimePrecision"].astype(str)] += 1
    return dict(found)
