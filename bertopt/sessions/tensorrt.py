"""TensorRT and TensorRT-RTX engines. Not run without an NVIDIA GPU of a compute capability the engine was built for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bertopt.core import Device, Engine, RuntimeFacts, Session
from bertopt.errors import Unsupported

if TYPE_CHECKING:
    from bertopt.core import Array


class TensorrtSession(Session):
    def __init__(self, model: Engine, device: Device) -> None:
        import torch

        if not torch.cuda.is_available():
            raise Unsupported(
                f"the engine is for {', '.join(model.targets)} and there is no CUDA GPU here; run bertopt verify where one is"
            )
        capability = "sm{}{}".format(*torch.cuda.get_device_capability())
        if capability not in model.targets:
            raise Unsupported(
                f"the engine is for {', '.join(model.targets)}; the GPU here is {capability}; build with targets: [{capability}]"
            )
        try:
            trt: Any = importlib.import_module(model.library)
        except ImportError as error:
            raise Unsupported(f"running the engine needs {model.library} {model.version}") from error
        if trt.__version__ != model.version:
            raise Unsupported(
                f"the engine needs {model.library} {model.version}; got {trt.__version__}; rebuild it or install that version"
            )
        self.spec, self.profiles = model.spec, model.profiles
        self._torch, self._trt = torch, trt
        self._runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
        self.engine = self._runtime.deserialize_cuda_engine(model.path.read_bytes())
        if self.engine is None:
            raise Unsupported(f"{model.library} {trt.__version__} refused the engine on {capability}")
        self._context = self.engine.create_execution_context()
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._inputs: dict[str, Any] = {}
        self._outputs: dict[str, Any] = {}

    def load(self, inputs: Mapping[str, Array]) -> None:
        batch, sequence = inputs["input_ids"].shape
        fitting = [i for i, profile in enumerate(self.profiles) if profile.accepts(batch, sequence)]
        if not fitting:
            raise Unsupported(f"shape [{batch}, {sequence}] is outside the engine's profiles")
        torch = self._torch
        self._context.set_optimization_profile_async(fitting[0], self._stream.cuda_stream)
        self._inputs = {name: torch.from_numpy(inputs[name]).cuda() for name in self.spec.network_inputs}
        for name, tensor in self._inputs.items():
            self._context.set_input_shape(name, tuple(tensor.shape))
            self._context.set_tensor_address(name, tensor.data_ptr())
        self._outputs = {}
        for i in range(self.engine.num_io_tensors):
            name = self.engine.get_tensor_name(i)
            if self.engine.get_tensor_mode(name) == self._trt.TensorIOMode.OUTPUT:
                # Answers are float32 in every bertopt graph.
                tensor = torch.empty(tuple(self._context.get_tensor_shape(name)), dtype=torch.float32, device="cuda")
                self._context.set_tensor_address(name, tensor.data_ptr())
                self._outputs[name] = tensor
        torch.cuda.synchronize()

    def step(self) -> None:
        if not self._context.execute_async_v3(self._stream.cuda_stream):
            raise RuntimeError("TensorRT could not enqueue the engine")
        self._stream.synchronize()

    def fetch(self) -> dict[str, Array]:
        return {name: self._outputs[name].cpu().numpy() for name in self.spec.outputs}

    def facts(self) -> RuntimeFacts:
        import json

        layers = json.loads(
            self.engine.create_engine_inspector().get_engine_information(self._trt.LayerInformationFormat.JSON)
        )
        formats: dict[str, int] = {}
        for layer in layers.get("Layers", []):
            for output in layer.get("Outputs", []) if isinstance(layer, dict) else []:
                kind = str(output.get("Format/Datatype", "unknown"))
                formats[kind] = formats.get(kind, 0) + 1
        return RuntimeFacts(
            runtime=f"{self._trt.__name__} {self._trt.__version__}", gpu=self._torch.cuda.get_device_name(),
            output_formats=formats,
        )  # fmt: skip
