"""The graph that ONNX Runtime makes is written to a temporary file, to see which kernels it runs."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bertopt.errors import ResourceError
from bertopt.sessions.onnxruntime import OnnxRuntimeSession


@pytest.mark.parametrize(("free", "kind"), [(10, ResourceError), (1 << 20, RuntimeError)])
def test_no_room_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, kind: type[Exception]) -> None:
    """Its error speaks of external initializers only: `verify` ended with exit code 1."""

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("Failed to write external initializers to file")

    (tmp_path / "model.onnx").write_bytes(b"x" * 4096)
    session: Any = object.__new__(OnnxRuntimeSession)
    session._products, session._path, session._provider, session._threads = None, str(tmp_path / "model.onnx"), "CPUExecutionProvider", 1
    session._ort = SimpleNamespace(InferenceSession=fails, SessionOptions=lambda: SimpleNamespace(add_session_config_entry=lambda *_: None))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(kind, match=r"no space left on the disk .*temporary files|initializers"):
        session._kernels()
