"""What the session asks of TensorRT, recorded by a fake runtime. Nothing here was run on a GPU."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertopt.core import Engine, Profile, Spec
from bertopt.errors import IntegrityError, ResourceError, Unsupported
from bertopt.sessions import cuda_queue, tensorrt
from bertopt.sessions.tensorrt import TensorrtSession, output_formats
from tests.support.specs import spec as make_spec

GENERAL = Profile(min=(1, 1), opt=(4, 16), max=(8, 32))
TIGHT = Profile(min=(2, 8), opt=(2, 8), max=(4, 16))
TEXT = make_spec()
PLAN = np.random.default_rng(0).bytes(2048)
PLAN_SHA256 = hashlib.sha256(PLAN).hexdigest()
INPUTS, OUTPUTS = TEXT.network_inputs, TEXT.outputs


class Context:
    """Answers each row with the sum of its ids. Refuses what the profile set last would refuse."""

    def __init__(self, runtime: Fake) -> None:
        self.runtime, self.calls = runtime, runtime.calls
        self.profile: Profile | None = None
        self.shapes: dict[str, tuple[int, int]] = {}
        self.addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.calls.append(("profile", index))
        self.profile, self.shapes = self.runtime.profiles[index], {}
        return "profile" not in self.runtime.refused

    def set_input_shape(self, name: str, shape: tuple[int, int]) -> bool:
        self.calls.append(("shape", name, tuple(shape)))
        assert self.profile is not None
        self.shapes[name] = tuple(shape)
        return self.profile.accepts(*shape) and "shape" not in self.runtime.refused

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.calls.append(("address", name))
        self.addresses[name] = address
        return "address" not in self.runtime.refused

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        batch, _ = self.shapes[INPUTS[0]]
        return self.shapes.get(name, (batch, 3))

    def execute_async_v3(self, stream: int) -> bool:
        self.calls.append(("run",))
        batch, sequence = self.shapes[INPUTS[0]]
        ids, mask = (self._array(name, batch * sequence, np.int64) for name in ("input_ids", "attention_mask"))
        sums = (ids * mask).reshape(batch, sequence).sum(axis=1)
        self._array(OUTPUTS[0], batch * 3, np.float32)[:] = np.repeat(sums, 3)
        return "run" not in self.runtime.refused

    def _array(self, name: str, size: int, kind: Any) -> Any:
        import ctypes

        width = np.dtype(kind).itemsize
        return np.frombuffer((ctypes.c_char * (size * width)).from_address(self.addresses[name]), kind)


class Fake:
    """The module `tensorrt` as far as the session uses it, with the calls made in order."""

    __name__, __version__ = "tensorrt", "11.4"
    engine_host_code_allowed = True

    def __init__(self, profiles: tuple[Profile, ...]) -> None:
        self.profiles, self.calls = profiles, list[tuple[Any, ...]]()
        self.refused: set[str] = set()
        self.said = ""
        self.LayerInformationFormat = types.SimpleNamespace(JSON="json")
        self.TensorIOMode = types.SimpleNamespace(INPUT="in", OUTPUT="out")
        self.num_io_tensors = len(INPUTS) + len(OUTPUTS)

        class ILogger:
            Severity = types.SimpleNamespace(ERROR=1)

        self.ILogger = ILogger

    def Runtime(self, logger: Any) -> Any:
        self.calls.append(("runtime",))
        self.logger = logger
        return self

    def deserialize_cuda_engine(self, plan: bytes) -> Any:
        assert self.engine_host_code_allowed is False
        self.calls.append(("deserialize", plan))
        return None if "engine" in self.refused else self

    def create_execution_context(self) -> Any:
        if self.said:
            self.logger.log(0, self.said)
        return None if "context" in self.refused else Context(self)

    def get_tensor_name(self, index: int) -> str:
        return (*INPUTS, *OUTPUTS)[index]

    def get_tensor_mode(self, name: str) -> str:
        return "in" if name in INPUTS else "out"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fake:
    made = Fake((GENERAL, TIGHT))
    (tmp_path / "model.plan").write_bytes(PLAN)
    monkeypatch.setitem(sys.modules, "tensorrt", made)  # type: ignore[arg-type]
    monkeypatch.setattr(tensorrt, "PLACE", "cpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    stream = types.SimpleNamespace(cuda_stream=7, synchronize=lambda: None)
    for name, does in {
        "is_available": lambda: True, "get_device_capability": lambda: (9, 0), "current_stream": lambda: stream,
        "synchronize": lambda: pytest.fail("a wait for the device spoils a capture of another session"),
        "Stream": lambda: stream, "mem_get_info": lambda: (2**30, 2**33),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, does)
    return made


def an_engine(fake: Fake, tmp_path: Path, spec: Spec = TEXT, **fields: Any) -> Engine:
    made = Engine(spec, "float16", tmp_path / "model.plan", "tensorrt", "11.4", ("sm90",), fake.profiles, PLAN_SHA256)
    return replace(made, **fields)


def opened(fake: Fake, tmp_path: Path, spec: Spec = TEXT) -> TensorrtSession:
    return TensorrtSession(an_engine(fake, tmp_path, spec), "cuda")


def batch(rows: int, tokens: int, first: int = 1) -> dict[str, Any]:
    ids = np.arange(first, first + rows * tokens, dtype=np.int64).reshape(rows, tokens)
    return {name: ids if name == "input_ids" else np.ones_like(ids) for name in INPUTS}


def sums(inputs: dict[str, Any]) -> Any:
    return np.repeat(inputs["input_ids"].sum(axis=1)[:, None], 3, axis=1).astype(np.float32)


def test_the_tightest_profile_runs_and_is_switched_only_when_it_changes(fake: Fake, tmp_path: Path) -> None:
    session = opened(fake, tmp_path)
    for rows, tokens in [(3, 10), (3, 10), (4, 16), (8, 32), (8, 20), (2, 8)]:
        inputs = batch(rows, tokens)
        assert np.array_equal(session.run(inputs)[OUTPUTS[0]], sums(inputs))
    assert [call[1] for call in fake.calls if call[0] == "profile"] == [1, 0, 1]


def test_nothing_is_set_again_between_equal_shapes(fake: Fake, tmp_path: Path) -> None:
    session = opened(fake, tmp_path)
    session.run(batch(3, 10))
    fake.calls.clear()
    for first in (5, 9):
        inputs = batch(3, 10, first)
        assert np.array_equal(session.run(inputs)[OUTPUTS[0]], sums(inputs))
    assert fake.calls == [("run",), ("run",)]
    session.run(batch(4, 10))
    assert [call[0] for call in fake.calls] == ["run", "run", *["shape"] * len(INPUTS), "run"]
    session.load(batch(4, 10))
    fake.calls.clear()
    session.step()
    assert fake.calls == [("run",)]


def test_buffers_are_a_profile_s_own_and_stay(fake: Fake, tmp_path: Path) -> None:
    session = opened(fake, tmp_path)
    session.run(batch(2, 8))
    session.run(batch(8, 32))
    first = {name: tensor.data_ptr() for name, tensor in session._buffers[1].items()}
    session.run(batch(2, 8))
    assert {name: tensor.data_ptr() for name, tensor in session._buffers[1].items()} == first
    assert session._buffers[0]["input_ids"].numel() == 8 * 32 and session._buffers[1]["input_ids"].numel() == 4 * 16


def test_a_batch_below_the_lower_bounds_is_widened_by_padding(fake: Fake, tmp_path: Path) -> None:
    fake.profiles = (TIGHT,)
    session = opened(fake, tmp_path)
    session.run(batch(4, 16))
    inputs = batch(1, 3)
    answer = session.run(inputs)[OUTPUTS[0]]
    assert answer.shape == (1, 3) and np.array_equal(answer, sums(inputs))
    assert ("shape", "input_ids", (2, 8)) in fake.calls
    with pytest.raises(Unsupported, match=r"shape \[5, 3\] is outside the engine's profiles \(\[2, 8\] to \[4, 16\]\)"):
        session.run(batch(5, 3))


def test_no_context_is_a_lack_of_memory(fake: Fake, tmp_path: Path) -> None:
    fake.refused, fake.said = {"context"}, "Error Code 2: OutOfMemory (Requested size was 123 bytes.)"
    with pytest.raises(ResourceError, match=r"no GPU memory .*1\.0 of 8\.0 GiB GPU memory free.*Requested size was 123"):
        opened(fake, tmp_path)


@pytest.mark.parametrize(
    ("what", "words"),
    [("profile", "refused profile 0"), ("shape", "refused shape"), ("address", "refused an address"), ("run", "enqueue")],
)
def test_every_refusal_is_seen(fake: Fake, tmp_path: Path, what: str, words: str) -> None:
    session = opened(fake, tmp_path)
    fake.refused = {what}
    with pytest.raises(Unsupported, match=words):
        session.run(batch(8, 32))
    # The reason comes from TensorRT's log, and decides what the error is.
    fake.logger.log(1, "[executionContext.cpp] cudaErrorMemoryAllocation: out of memory")
    with pytest.raises(ResourceError, match="cudaErrorMemoryAllocation"):
        session.run(batch(8, 32))
    fake.refused = set()
    assert np.array_equal(session.run(batch(8, 32))[OUTPUTS[0]], sums(batch(8, 32)))


def test_a_damaged_engine(fake: Fake, tmp_path: Path) -> None:
    fake.refused = {"engine"}
    with pytest.raises(Unsupported, match="refused the engine on sm90"):
        opened(fake, tmp_path)


TEN = {"Layers": [{"Name": "a", "Outputs": [{"Name": "x", "Format/Datatype": "Half"}]}, "not detailed"], "Bindings": ["x"]}
ELEVEN = {
    "Layers": [{"Name": "a", "Outputs": [{"Name": "x", "Format": "Row major linear", "DataType": "Half"}]}],
    "I/O Tensors": [{"Name": "x", "IOMode": "Output", "DataType": "Float"}],
}


@pytest.mark.parametrize("information", [TEN, ELEVEN], ids=["10", "11"])
def test_the_inspector_of_both_versions_is_read(information: dict[str, Any]) -> None:
    assert output_formats(json.dumps(information)) == {"Half": 1}


def test_what_the_inspector_does_not_say_is_not_counted() -> None:
    assert output_formats(json.dumps({"Layers": ["a", {"Outputs": [{"Name": "x"}]}]})) == {}


class Cache:
    def __init__(self) -> None:
        self.read = b""

    def deserialize(self, blob: bytes) -> bool:
        self.read = blob
        return True

    def serialize(self) -> bytes:
        return b"kernels" + self.read


def test_rtx_compiles_before_it_is_timed_and_keeps_its_kernels(fake: Fake, tmp_path: Path) -> None:
    caches: list[Cache] = []
    configs: list[Any] = []

    def create_runtime_config() -> Any:
        caches.append(Cache())
        used: list[Any] = []
        config = types.SimpleNamespace(create_runtime_cache=lambda: caches[-1], set_runtime_cache=used.append, used=used)
        configs.append(config)
        return config

    strategy = types.SimpleNamespace(EAGER="eager")
    fake.DynamicShapesKernelSpecializationStrategy = strategy  # type: ignore[attr-defined]
    fake.create_runtime_config = create_runtime_config  # type: ignore[attr-defined]
    given: list[Any] = []
    fake.create_execution_context = lambda config: (given.append(config), Context(fake))[1]  # type: ignore[method-assign]
    session = opened(fake, tmp_path)
    assert given == configs and configs[0].used == [caches[0]]
    assert configs[0].dynamic_shapes_kernel_specialization_strategy == "eager"
    session.run(batch(2, 8))
    (kept,) = (tmp_path / "cache" / "bertopt" / "tensorrt_rtx").iterdir()
    assert kept.read_bytes() == b"kernels"
    opened(fake, tmp_path)
    assert caches[1].read == b"kernels"


def test_what_is_used_of_tensorrt_rtx_exists() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    for owner, names in {
        "ICudaEngine": "create_execution_context create_runtime_config create_engine_inspector get_tensor_name "
        "get_tensor_mode num_io_tensors",
        "IExecutionContext": "set_optimization_profile_async set_input_shape set_tensor_address get_tensor_shape "
        "execute_async_v3",
        "IRuntimeConfig": "create_runtime_cache set_runtime_cache dynamic_shapes_kernel_specialization_strategy",
        "IRuntimeCache": "serialize deserialize",
        "DynamicShapesKernelSpecializationStrategy": "EAGER",
        "ComputeCapability": "CURRENT",
        "BuilderFlag": "TF32",
        "IBuilderConfig": "clear_flag set_compute_capability num_compute_capabilities create_timing_cache set_timing_cache",
    }.items():
        assert not [name for name in names.split() if not hasattr(getattr(trt, owner), name)], owner


# Which plans are opened


def test_a_damaged_truncated_or_foreign_plan_reaches_no_library(fake: Fake, tmp_path: Path) -> None:
    dice, path, engine = np.random.default_rng(1), tmp_path / "model.plan", an_engine(fake, tmp_path)
    for number in range(500):
        kind = number % 3
        data = bytearray(PLAN)
        if kind == 0:
            data[int(dice.integers(len(data)))] ^= 1 << int(dice.integers(8))
        elif kind == 1:
            data = data[: int(dice.integers(len(data)))]
        else:
            data = bytearray(dice.bytes(len(data)))
        path.write_bytes(data)
        with pytest.raises(IntegrityError, match="sha256 differs") as raised:
            TensorrtSession(engine, "cuda")
        assert raised.value.exit_code == 6
    assert fake.calls == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"version": "11.3"}, "needs tensorrt 11.3; got 11.4"),
        ({"targets": ("sm80", "sm86")}, "for sm80, sm86; the GPU here is sm90"),
        ({"library": "tensorrt_of_nobody"}, "needs tensorrt_of_nobody 11.4"),
        ({"driver": "590.10"}, "built with driver 590.10; here is 580.65.06: update the driver"),
        ({"cuda_version": "12.8"}, "built with CUDA 12.8; torch here has 13.0"),
    ],
)
def test_what_does_not_fit_is_exit_4_and_reaches_no_library(
    fake: Fake, tmp_path: Path, fields: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorrt.tensorrt_import, "built_with", lambda: ("580.65.06", "13.0"))
    with pytest.raises(Unsupported, match=words) as raised:
        TensorrtSession(an_engine(fake, tmp_path, **fields), "cuda")
    assert raised.value.exit_code == 4 and fake.calls == []


def test_a_library_that_cannot_be_loaded_is_not_missing(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorrt_broken.py").write_text("raise ImportError('libnvinfer.so.11: undefined symbol: x')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Unsupported, match=r"needs tensorrt_broken 11\.4; its import fails \(libnvinfer\.so\.11: undefined symbol: x\)"):
        TensorrtSession(an_engine(fake, tmp_path, library="tensorrt_broken"), "cuda")


@pytest.mark.parametrize("fields", [{}, {"driver": "580.65.06", "cuda_version": "13.0"}, {"driver": "570.1", "cuda_version": "13.2"}])
def test_what_fits_is_opened_without_host_code(
    fake: Fake, tmp_path: Path, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorrt.tensorrt_import, "built_with", lambda: ("580.65.06", "13.0"))
    TensorrtSession(an_engine(fake, tmp_path, **fields), "cuda")
    assert fake.calls[:2] == [("runtime",), ("deserialize", PLAN)] and fake.engine_host_code_allowed is False


# CUDA graphs


@pytest.fixture
def graphs(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """torch's graphs: what is enqueued while one is captured is enqueued again, with the same addresses, when it is replayed."""

    class Graph:
        contexts: tuple[Any, ...] = ()

        def replay(self) -> None:
            fake.calls.append(("replay",))
            for context in self.contexts:
                context.execute_async_v3(7)

    @contextlib.contextmanager
    def capture(graph: Graph, stream: Any, capture_error_mode: str = "global") -> Any:
        assert capture_error_mode == "thread_local", "another session's allocation would end the capture"
        assert cuda_queue.capturing.locked(), "torch allows one capture at a time"
        fake.calls.append(("capture",))
        held: list[Any] = []
        monkeypatch.setattr(Context, "execute_async_v3", lambda context, stream: not held.append(context))  # type: ignore[func-returns-value]
        yield
        monkeypatch.setattr(Context, "execute_async_v3", run)
        graph.contexts = tuple(held)

    run = Context.execute_async_v3
    for name, does in {"CUDAGraph": Graph, "graph": capture, "stream": lambda stream: contextlib.nullcontext()}.items():
        monkeypatch.setattr(torch.cuda, name, does)
    return fake


def test_a_graph_is_captured_once_for_each_profile_and_replayed(graphs: Fake, tmp_path: Path) -> None:
    session = TensorrtSession(an_engine(graphs, tmp_path, cuda_graphs=True), "cuda")
    for rows, tokens in [(3, 10), (2, 8), (8, 32), (4, 16), (5, 20), (3, 9)]:
        inputs = batch(rows, tokens)
        assert np.array_equal(session.run(inputs)[OUTPUTS[0]], sums(inputs)), (rows, tokens)
    kinds = [call[0] for call in graphs.calls]
    assert kinds.count("capture") == 2 and kinds.count("replay") == 6 and kinds.count("profile") == 2
    assert len(session._captured) == 2
    shapes = {call[2] for call in graphs.calls if call[0] == "shape"}
    assert shapes == {GENERAL.max, TIGHT.max}
    session.load(batch(3, 10))
    graphs.calls.clear()
    session.step()
    assert graphs.calls == [("replay",), ("run",)]


def test_no_memory_for_a_second_context_is_a_resource(graphs: Fake, tmp_path: Path) -> None:
    session = TensorrtSession(an_engine(graphs, tmp_path, cuda_graphs=True), "cuda")
    session.run(batch(2, 8))
    graphs.refused.add("context")
    with pytest.raises(ResourceError, match="no GPU memory for the engine's execution context"):
        session.run(batch(8, 32))
