"""OpenVINO models on the CPU, with the precision always stated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bertopt.core import Device, OpenVino, Session
from bertopt.errors import Unsupported

if TYPE_CHECKING:
    from bertopt.core import Array


class OpenVinoSession(Session):
    def __init__(self, model: OpenVino, device: Device, threads: int | None = None) -> None:
        try:
            import openvino as ov
        except ImportError as error:
            raise Unsupported("running OpenVINO needs openvino; pip install 'bertopt[cpu]'") from error
        if device != "cpu":
            raise Unsupported("OpenVINO runs on the CPU here; set device: cpu")
        self.spec = model.spec
        # Left alone, OpenVINO runs float32 in bf16 on CPUs that have it.
        hint = "bf16" if model.precision == "bfloat16" else "f32"
        properties: dict[str, Any] = {"INFERENCE_PRECISION_HINT": hint, "PERFORMANCE_HINT": "LATENCY"}
        if threads is not None:
            properties["INFERENCE_NUM_THREADS"] = threads
        self.compiled = ov.Core().compile_model(model.path, "CPU", properties)
        self._request = self.compiled.create_infer_request()
        self._version = ov.get_version()

    def load(self, inputs: Mapping[str, Array]) -> None:
        import openvino as ov

        for name in self.spec.inputs:
            self._request.set_tensor(name, ov.Tensor(inputs[name]))

    def step(self) -> None:
        self._request.infer()

    def fetch(self) -> dict[str, Array]:
        import numpy as np

        return {name: np.array(self._request.get_tensor(name).data, dtype=np.float32) for name in self.spec.outputs}

    def facts(self) -> dict[str, Any]:
        precision = self.compiled.get_property("INFERENCE_PRECISION_HINT")
        return {"runtime": f"openvino {self._version}", "precision": str(precision)}
