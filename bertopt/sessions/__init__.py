"""Sessions: one model in one form, running on one device. Sessions know no pass."""

from __future__ import annotations

from bertopt.core import Compiled, Device, Eager, Engine, Model, Native, Onnx, OpenVino, Packaged, Session
from bertopt.errors import Unsupported, UsageError


def open_session(
    model: Model, device: Device = "cpu", threads: int | None = None, streams: int | None = None
) -> Session:
    """The session for `model`'s form; it takes padded batches, also where the model is packed.

    `threads` are for all of the session, `streams` are the batches it may run at once. Raises Unsupported where this
    machine cannot run it on `device`, UsageError for several streams where the form runs one batch at a time.
    """
    if streams is not None and (streams < 1 or (streams > 1 and not isinstance(model, OpenVino))):
        expected = "at least 1" if streams < 1 else f"1 for form '{model.form}', which runs one batch at a time"
        raise UsageError(f"streams must be {expected}; got {streams}: leave it out")
    session = _open(model, device, threads, streams)
    session.asynchronous = device == "cuda"
    if model.spec.layout == "padded":
        return session
    from bertopt.sessions.packed import PackedSession

    return PackedSession(session, model.spec)


def _open(model: Model, device: Device, threads: int | None, streams: int | None) -> Session:
    if isinstance(model, Eager | Compiled):
        from bertopt.sessions.torch import TorchSession

        return TorchSession(model, device, threads)
    if isinstance(model, Packaged):
        from bertopt.sessions.package import PackageSession

        return PackageSession(model, device, threads)
    if isinstance(model, Onnx):
        from bertopt.sessions.onnxruntime import OnnxRuntimeSession

        return OnnxRuntimeSession(model, device, threads)
    if isinstance(model, OpenVino):
        from bertopt.sessions.openvino import OpenVinoSession

        return OpenVinoSession(model, device, threads, streams)
    if isinstance(model, Engine):
        from bertopt.sessions.tensorrt import TensorrtSession

        return TensorrtSession(model, device)
    if isinstance(model, Native):
        from bertopt.sessions.native import NativeSession

        return NativeSession(model, device, threads)
    raise Unsupported(f"no session for form '{model.form}'")
