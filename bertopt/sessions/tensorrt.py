"""TensorRT and TensorRT-RTX engines. Need an NVIDIA GPU of a compute capability that the engine was built for."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bertopt.core import Device, Engine, RuntimeFacts, Session
from bertopt.errors import IntegrityError, ResourceError, Unsupported, missing_library
from bertopt.sessions import tensorrt_rtx
from bertopt.sessions.inputs import check
from bertopt.system import gpu, tensorrt_import

if TYPE_CHECKING:
    from bertopt.core import Array

#: Where buffers lie; tests put them elsewhere.
PLACE = "cuda"


class TensorrtSession(Session):
    """Runs each batch in the tightest profile that takes it, widened to that profile's lower bounds, or with CUDA graphs of
    TensorRT to its upper ones, since a graph is of one shape. (TensorRT-RTX keeps graphs of several shapes itself.)

    The plan is opened after its hash, the library's version, the GPU, its driver and CUDA were compared, and never with
    host code. Not seen: what a plan of this hash does.

    A profile's buffers are allocated when it is first used. Addresses are set when the profile changes, shapes when they
    change, so that a timed step is the engine alone.
    """

    def __init__(self, model: Engine, device: Device) -> None:
        import torch

        there = ", ".join(model.targets)
        if not torch.cuda.is_available():
            raise Unsupported(f"the engine is for {there} and there is no CUDA GPU here; run bertopt verify where one is")
        capability = gpu.capability()
        if capability not in model.targets:
            raise Unsupported(
                f"the engine is for {there}; the GPU here is {capability}; build with targets: [{capability}]"
            )
        try:
            trt: Any = importlib.import_module(model.library)
        except ImportError as error:
            raise missing_library(f"running the engine needs {model.library} {model.version}", f"{model.library.replace('_', '-')}=={model.version}", failed=error) from error
        if trt.__version__ != model.version:
            raise Unsupported(
                f"the engine needs {model.library} {model.version}; got {trt.__version__}; rebuild it or install that version"
            )
        if reason := tensorrt_import.refusal(model.driver, model.cuda_version):
            raise Unsupported(reason)
        plan = model.path.read_bytes()
        if hashlib.sha256(plan).hexdigest() != model.sha256:
            raise IntegrityError(f"'{model.path.name}' is not the engine that was built (sha256 differs); export again")
        self.spec, self.shapes = model.spec, model.shapes
        self._torch, self._trt = torch, trt
        self._logger = tensorrt_import.logger(trt)
        self._runtime = trt.Runtime(self._logger)
        self._runtime.engine_host_code_allowed = False
        self.engine = self._runtime.deserialize_cuda_engine(plan)
        if self.engine is None:
            raise self._failure(f"{model.library} {trt.__version__} refused the engine on {capability}")
        self._cache = tensorrt_rtx.KernelCache(trt, self.engine, plan, capability, model.cuda_graphs)
        # One context for all profiles, or with graphs one for each: a graph holds its context's addresses.
        self._graphs = model.cuda_graphs and not self._cache.runtime_graphs
        self._context = self._new_context()
        self._captured: dict[int, tuple[Any, Any]] = {}
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._buffers: dict[int, dict[str, Any]] = {}
        self._profile: int | None = None
        self._shape: tuple[int, int] | None = None
        self._asked, self._new_shape = (0, 0), False

    def load(self, inputs: Mapping[str, Array]) -> None:
        check(inputs, self.spec.network_inputs)
        batch, sequence = self._asked = inputs["input_ids"].shape
        chosen = self.shapes.choose(batch, sequence)
        if chosen is None:
            ranges = "; ".join(f"{list(profile.min)} to {list(profile.max)}" for profile in self.shapes.profiles)
            raise Unsupported(f"shape [{batch}, {sequence}] is outside the engine's profiles ({ranges})")
        profile, shape = chosen
        if self._graphs:
            shape = self.shapes.profiles[profile].max
        if profile != self._profile:
            self._switch(profile)
        if shape != self._shape:
            if profile not in self._captured:
                self._set_shape(shape)
            self._shape, self._new_shape = shape, True
        for name in self.spec.network_inputs:
            self._copy(name, inputs[name], shape)
        if self._graphs and profile not in self._captured:
            self._capture(profile)
        # Not the device: that would spoil a capture of another session.
        self._torch.cuda.current_stream().synchronize()

    def step(self) -> None:
        if self._profile in self._captured:
            with self._torch.cuda.stream(self._stream):
                self._captured[self._profile][1].replay()
        else:
            self._run()
        self._stream.synchronize()

    def _run(self) -> None:
        if not self._context.execute_async_v3(self._stream.cuda_stream):
            raise self._failure("TensorRT could not enqueue the engine")

    def _capture(self, profile: int) -> None:
        """Capture a graph of the profile. TensorRT finishes its set-up of a shape in the run before."""
        from bertopt.sessions.cuda_queue import capturing

        self._run()
        self._stream.synchronize()
        graph = self._torch.cuda.CUDAGraph()
        # Other sessions of the process may allocate and run during it; none may capture.
        with capturing, self._torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            self._run()
        self._captured[profile] = (self._context, graph)

    def _new_context(self) -> Any:
        context = self._cache.context()
        if context is None:
            raise ResourceError(
                f"no GPU memory for the engine's execution context{tensorrt_import.free_memory()}; "
                f"use smaller profiles, or free GPU memory: {self._logger.last}"
            )
        return context

    def fetch(self) -> dict[str, Array]:
        assert self._profile is not None, "load comes first"
        batch, sequence = self._asked
        answers = {}
        for name in self.spec.outputs:
            shape = tuple(self._context.get_tensor_shape(name))
            value = self._buffers[self._profile][name][: math.prod(shape)].cpu().numpy().reshape(shape)[:batch]
            # The rows of a span's answer, too, are as long as the batch was made.
            answers[name] = value if self.spec.granularity == "text" else value[:, :sequence]
        if self._new_shape:
            self._cache.keep()
            self._new_shape = False
        return answers

    def facts(self) -> RuntimeFacts:
        return RuntimeFacts(
            runtime=f"{self._trt.__name__} {self._trt.__version__}", gpu=self._torch.cuda.get_device_name(),
            captured_graphs=len(self._captured) if self._graphs else None,
            output_formats=output_formats(
                self.engine.create_engine_inspector().get_engine_information(self._trt.LayerInformationFormat.JSON)
            ),
        )  # fmt: skip

    def _switch(self, number: int) -> None:
        """Make `number` the profile that runs, with its own buffers."""
        self._profile = self._shape = None
        if number in self._captured:
            self._context, self._profile = self._captured[number][0], number
            return
        if self._captured:
            self._context = self._new_context()
        self._need(
            self._context.set_optimization_profile_async(number, self._stream.cuda_stream), f"profile {number}"
        )
        if number not in self._buffers:
            self._set_shape(self.shapes.profiles[number].max)
            self._buffers[number] = self._allocated(self.shapes.profiles[number].max)
        for name, buffer in self._buffers[number].items():
            self._need(self._context.set_tensor_address(name, buffer.data_ptr()), f"an address for '{name}'")
        self._stream.synchronize()
        self._profile = number

    def _allocated(self, largest: tuple[int, int]) -> dict[str, Any]:
        """One flat buffer for every input and output, of the profile's largest shape."""
        torch = self._torch
        buffers = {name: torch.zeros(math.prod(largest), dtype=torch.int64, device=PLACE) for name in self.spec.network_inputs}
        for index in range(self.engine.num_io_tensors):
            name = self.engine.get_tensor_name(index)
            if self.engine.get_tensor_mode(name) == self._trt.TensorIOMode.OUTPUT:
                shape = tuple(self._context.get_tensor_shape(name))
                if min(shape) < 0:
                    raise Unsupported(f"the engine leaves the shape of '{name}' open: {list(shape)}")
                # Answers are float32 in every bertopt graph.
                buffers[name] = torch.zeros(math.prod(shape), dtype=torch.float32, device=PLACE)
        return buffers

    def _set_shape(self, shape: tuple[int, int]) -> None:
        for name in self.spec.network_inputs:
            self._need(self._context.set_input_shape(name, shape), f"shape {list(shape)} for '{name}'")

    def _copy(self, name: str, array: Array, shape: tuple[int, int]) -> None:
        import numpy as np

        if array.shape != shape:
            # Rows and tokens that nobody asked for are padding.
            wide = np.full(shape, self.spec.pad_id if name == "input_ids" else 0, np.int64)
            wide[: array.shape[0], : array.shape[1]] = array
            array = wide
        assert self._profile is not None
        buffer = self._buffers[self._profile][name]
        buffer[: array.size].copy_(self._torch.from_numpy(np.ascontiguousarray(array)).reshape(-1))

    def _need(self, taken: bool, what: str) -> None:
        if not taken:
            raise self._failure(f"TensorRT refused {what}")

    def _failure(self, what: str) -> Exception:
        return tensorrt_import.failure(what, self._logger.last)


def output_formats(information: str) -> dict[str, int]:
    """Count the outputs of an engine's layers by type, from the inspector's JSON of TensorRT 10, 11 or RTX.

    TensorRT 10 writes one field, `Format/Datatype`; 11 writes `Format` and `DataType`.
    """
    layers = [layer for layer in json.loads(information).get("Layers", []) if isinstance(layer, dict)]
    outputs = [output for layer in layers for output in layer.get("Outputs", []) if isinstance(output, dict)]
    kinds = (output.get("DataType") or output.get("Datatype") or output.get("Format/Datatype") for output in outputs)
    return dict(Counter(str(kind) for kind in kinds if kind))
