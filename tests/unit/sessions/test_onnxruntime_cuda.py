"""What the ONNX Runtime session asks of CUDA, with a fake package. Nothing here was run on a GPU."""

from __future__ import annotations

import os
import sys
import types
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertopt.core import Context, Onnx
from bertopt.errors import Unsupported
from bertopt.modeling import checkpoint
from bertopt.passes import ExportOnnx
from bertopt.sessions import onnxruntime, onnxruntime_cuda, open_session, shipped
from bertopt.sessions.onnxruntime import OnnxRuntimeSession
from tests.support.exports import Exports
from tests.support.specs import spec
from tests.support.tiny_models import Tiny

LOADER = (
    "2026-11-22 [E:onnxruntime:Default, provider_bridge_ort.cc:2251 TryGetProviderInfo_CUDA] /onnxruntime_src/"
    "provider_bridge_ort.cc:1844 Failed to load library libonnxruntime_providers_cuda.so with error: libcublasLt.so.13: "
    "cannot open shared object file: No such file or directory\n"
    "[W:onnxruntime:Default, onnxruntime_pybind_state.cc:1013 CreateExecutionProviderInstance] Failed to create "
    "CUDAExecutionProvider. Require cuDNN 9.* and CUDA 13.*. Please install all dependencies\n"
)


class Fake(types.ModuleType):
    """`onnxruntime` of a wheel with the CUDA provider, which starts or falls back to the CPU."""

    __version__ = "1.31.1"

    def __init__(self, starts: bool) -> None:
        super().__init__("onnxruntime")
        self.starts, self.calls = starts, list[Any]()
        fake = self

        class InferenceSession:
            def __init__(self, path: Any, options: Any, providers: list[Any]) -> None:
                fake.calls.append(("session", providers))
                if not fake.starts:
                    os.write(2, LOADER.encode())

            def get_providers(self) -> list[str]:
                return ["CUDAExecutionProvider", "CPUExecutionProvider"] if fake.starts else ["CPUExecutionProvider"]

            def io_binding(self) -> Any:
                return object()

        class SessionOptions:
            def add_session_config_entry(self, key: str, value: str) -> None:
                pass

        self.InferenceSession, self.SessionOptions = InferenceSession, SessionOptions

    def get_available_providers(self) -> list[str]:
        return ["CUDAExecutionProvider", "CPUExecutionProvider"]

    def preload_dlls(self) -> None:
        self.calls.append("preload")
        if not self.starts:
            print("Failed to load libcudnn.so.9: libcudnn.so.9: cannot open shared object file: No such file or directory")


MODEL = Onnx(spec(), "float32", Path("model.onnx"))


def test_float32_stays_float32_and_memory_is_not_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(starts=True)
    monkeypatch.setitem(sys.modules, "onnxruntime", fake)
    open_session(MODEL, "cuda")
    # Its libraries first: nothing else in a process that serves an ONNX artefact loads them.
    options = {"device_id": "0", "use_tf32": "0", "arena_extend_strategy": "kSameAsRequested"}
    assert fake.calls == ["preload", ("session", [("CUDAExecutionProvider", options)])]


def test_buffers_are_bound_once_for_each_shape(tiny: Tiny, export: Exports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real package and its CPU provider, as a CUDA session keeps them."""
    model = checkpoint.load(tiny("bert", "feature-extraction", "mean"))
    graph = export(model, Context(tmp_path))
    plain, keeping = OnnxRuntimeSession(graph, "cpu"), OnnxRuntimeSession(graph, "cpu")
    keeping._keeps = True
    made: list[Any] = []
    bound = keeping._bound
    monkeypatch.setattr(keeping, "_bound", lambda inputs: (made.append(inputs["input_ids"].shape), bound(inputs))[1])
    dice, kept, places = np.random.default_rng(0), [], {}
    for shape in [(2, 8), (1, 5), (2, 8), (1, 5), (2, 8)]:
        ids = dice.integers(5, 40, shape)
        inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        # A transposed array is not contiguous.
        got = keeping.run({name: np.asfortranarray(array) for name, array in inputs.items()})
        kept.append((got, plain.run(inputs)))
        place = keeping._binding.get_outputs()[0].data_ptr()
        assert places.setdefault(shape, place) == place
    assert made == [(2, 8), (1, 5)]
    # Outputs are the caller's: a later run does not change them.
    for got, expected in kept:
        for name in expected:
            np.testing.assert_array_equal(got[name], expected[name])
    monkeypatch.setattr(onnxruntime, "KEPT_TOKENS", 16)
    keeping.run({name: array[:, :4].copy() for name, array in inputs.items()})
    assert [key[-1] for key in keeping._kept] == [(2, 4)]
    # What the artefact ships beside the spec's outputs is bound, too.
    wide = shipped.runner(keeping, graph)(inputs)
    assert set(wide) == {"sentence_embedding", "last_hidden_state"} and set(keeping.run(inputs)) == {"sentence_embedding"}


def test_an_input_that_binding_copies_is_bound_anew_with_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime copies an input when it is bound where the node that reads it is on another device (CopyOneInputAcrossDevices)."""
    fake = Fake(starts=True)
    read: list[list[int]] = []

    class Value:
        def __init__(self, array: Any) -> None:
            self.array = array.copy()

        def update_inplace(self, array: Any) -> None:
            self.array[...] = array

    class Binding:
        def __init__(self) -> None:
            self.bound: dict[str, Any] = {}

        def bind_ortvalue_input(self, name: str, value: Value) -> None:
            self.bound[name] = value.array.copy()

        def bind_output(self, name: str, device: str) -> None:
            assert device == "cuda"

        def synchronize_outputs(self) -> None:
            pass

    fake.OrtValue = types.SimpleNamespace(ortvalue_from_numpy=lambda array, device: Value(array))  # type: ignore[attr-defined]
    monkeypatch.setattr(fake.InferenceSession, "io_binding", lambda self: Binding())
    run = lambda self, binding: read.append(binding.bound["input_ids"].ravel().tolist())  # noqa: E731
    monkeypatch.setattr(fake.InferenceSession, "run_with_iobinding", run, raising=False)
    monkeypatch.setitem(sys.modules, "onnxruntime", fake)
    session = open_session(MODEL, "cuda")
    for first in (5, 7):
        ids = np.array([[first, 6]])
        session.load({name: ids if name == "input_ids" else np.ones_like(ids) for name in MODEL.spec.inputs})
        session.step()
    assert read == [[5, 6], [7, 6]]


def test_wide_outputs_that_are_kept_are_bounded_in_bytes(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs over a vocabulary of 30,522 take 122 kB a token: 262,144 tokens of them would be 32 GB of the GPU."""
    graph = ExportOnnx()(checkpoint.load(tiny("bert", "fill-mask")), Context(tmp_path)).model
    session = OnnxRuntimeSession(graph, "cpu")
    session._keeps = True

    def inputs(rows: int, tokens: int) -> dict[str, Any]:
        ids = np.full((rows, tokens), 7)
        return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}

    # The logits of the first two fit together, those of the last do not fit alone.
    monkeypatch.setattr(onnxruntime, "KEPT_BYTES", 15 * graph.spec.vocabulary * 4)
    for shape in [(1, 4), (1, 8), (2, 8)]:
        session.run(inputs(*shape))
    assert [key[-1] for key in session._kept] == [(1, 4), (1, 8), (2, 8)]
    large = weakref.ref(session._kept[next(reversed(session._kept))][0])
    session.load(inputs(1, 5))
    # Their memory is free before the next outputs take theirs.
    assert large() is None and [key[-1] for key in session._kept] == [(1, 5)]


def test_a_fallback_is_refused_with_what_the_loader_said(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", Fake(starts=False))
    with pytest.raises(Unsupported) as error:
        open_session(MODEL, "cuda")
    message = str(error.value)
    for words in ("libcudnn.so.9: cannot open", "libcublasLt.so.13: cannot open", "Require cuDNN 9.* and CUDA 13.*"):
        assert words in message, message
    assert "the session runs on CPUExecutionProvider" in message and "torch for " in message
    assert capfd.readouterr() == ("", "")


def test_the_cuda_versions_of_both_wheels_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    validation = pytest.importorskip("onnxruntime.capi.onnxruntime_validation")
    monkeypatch.setattr(validation, "cuda_version", "13.0", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "built for CUDA 13.0, torch for 12.8; both must be for one CUDA major" in onnxruntime_cuda.versions()
    monkeypatch.setattr(torch.version, "cuda", "13.1")
    assert onnxruntime_cuda.versions() == "onnxruntime is built for CUDA 13.0, torch for 13.1"


def test_the_wheels_that_run_an_opset_23_attention_are_asked_for() -> None:
    import tomllib

    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "onnxruntime-gpu>=1.25" in extras["gpu"]
    # Its parser has the operator from 10.14 on (TensorRT's changelog).
    assert "tensorrt>=10.14" in extras["gpu"]
