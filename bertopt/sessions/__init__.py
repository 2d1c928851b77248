"""Sessions: one model in one form, running on one device. Sessions know no pass."""

from __future__ import annotations

from bertopt.core import Compiled, Device, Eager, Engine, Model, Onnx, OpenVino, Session
from bertopt.errors import Unsupported


def open_session(model: Model, device: Device = "cpu", threads: int | None = None) -> Session:
    """The session for `model`'s form. Raises Unsupported where this machine cannot run it on `device`."""
    if isinstance(model, Eager | Compiled):
        from bertopt.sessions.torch import TorchSession

        return TorchSession(model, device, threads)
    if isinstance(model, Onnx):
        from bertopt.sessions.onnxruntime import OnnxRuntimeSession

        return OnnxRuntimeSession(model, device, threads)
    if isinstance(model, OpenVino):
        from bertopt.sessions.openvino import OpenVinoSession

        return OpenVinoSession(model, device, threads)
    if isinstance(model, Engine):
        from bertopt.sessions.tensorrt import TensorrtSession

        return TensorrtSession(model, device)
    raise Unsupported(f"no session for form '{model.form}'")
