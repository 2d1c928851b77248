"""ONNX graphs in ONNX Runtime, on the CPU or the CUDA provider and no other."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bertopt.core import Device, Onnx, RuntimeFacts, Session
from bertopt.errors import Unsupported, missing_library
from bertopt.sessions import onnxruntime_cuda
from bertopt.sessions.inputs import check
from bertopt.system import disk_full, limits, onnxruntime_import, temporary_directory

if TYPE_CHECKING:
    from bertopt.core import Array

#: Operators whose place decides where a model runs. Providers leave arithmetic on shapes to the CPU on purpose.
_COMPUTING = frozenset({
    "MatMul", "Gemm", "FusedMatMul", "MatMulInteger", "Attention", "MultiHeadAttention", "Softmax", "Gelu", "BiasGelu",
    "FastGelu", "LayerNormalization", "SkipLayerNormalization", "EmbedLayerNormalization",
})  # fmt: skip
#: Operators that a session runs for quantised products, and those that show that it multiplies floats instead.
_PRODUCTS = frozenset({
    "MatMul", "Gemm", "FusedMatMul", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QLinearMatMul",
    "QGemm", "MatMulNBits",
})  # fmt: skip
#: On CUDA the buffers of the last shapes are kept, up to this many tokens in all, and bytes of outputs: those over a vocabulary
#: take 122 kB a token.
KEPT_TOKENS, KEPT_BYTES = 262_144, 1 << 30
_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


class OnnxRuntimeSession(Session):
    def __init__(self, model: Onnx, device: Device, threads: int | None = None) -> None:
        try:
            ort = onnxruntime_import.module()
        except ImportError as error:
            extra = "onnxruntime" if device == "cpu" else "gpu"
            raise missing_library("running ONNX needs onnxruntime", f"'bertopt[{extra}]'", failed=error) from error
        self.spec = model.spec
        self.device = device
        self.fixed_costs = device == "cpu"
        provider = _PROVIDERS[device]
        if provider not in ort.get_available_providers():
            raise Unsupported(
                f"this onnxruntime has no {provider}; pip uninstall onnxruntime && pip install onnxruntime-gpu, or without a GPU "
                "load with device='cpu' (in a recipe device: cpu)"
            )
        self._ort, self._path, self._threads = ort, model.path, threads or limits.quota_threads()
        self._products: dict[str, int] | None = None
        self._provider: Any = provider if device == "cpu" else (provider, onnxruntime_cuda.OPTIONS)
        missing = ""
        with onnxruntime_cuda.listening() if device == "cuda" else contextlib.nullcontext() as heard:
            try:
                if device == "cuda":
                    missing = onnxruntime_cuda.preload(ort)
                self.session = ort.InferenceSession(model.path, self._options(), providers=[self._provider])
            except Exception as error:
                if "NOT_IMPLEMENTED" not in str(error):
                    raise
                raise Unsupported(
                    f"{provider} has no kernel for this graph in {model.precision}: {str(error).split(' : ')[-1]}"
                ) from error
        # A CUDA session that could not start would be a CPU session now: ask it, not the package.
        if (runs := self.session.get_providers()[0]) != provider:
            reason = onnxruntime_cuda.why(f"{missing}{heard.text if heard else ''}")
            raise Unsupported(
                f"expected {provider}; the session runs on {runs}: {reason}; {onnxruntime_cuda.versions()}"
            )
        self._keeps = device == "cuda"
        self._kept: dict[tuple[Any, ...], tuple[Any, dict[str, Any]]] = {}
        self._output_bytes: dict[tuple[Any, ...], int] = {}
        self._binding: Any = None

    def load(self, inputs: Mapping[str, Array]) -> None:
        """Bind inputs and outputs: on CUDA once for each shape, whose later batches only copy their inputs."""
        check(inputs, self.spec.network_inputs)
        key = (*self.spec.outputs, *(inputs[name].shape for name in self.spec.network_inputs))
        if (kept := self._kept.pop(key, None)) is None:
            self._make_room(math.prod(key[-1]))
            kept = self._bound(inputs)
        else:
            for name, value in kept[1].items():
                value.update_inplace(np.ascontiguousarray(inputs[name]))
                # Where a node on the CPU reads an input, binding copies it there: bound once, its first batch would be read for ever.
                kept[0].bind_ortvalue_input(name, value)
        self._binding = kept[0]
        if self._keeps:
            self._kept[key] = kept

    def _make_room(self, tokens: int) -> None:
        """Give the oldest buffers back before those of `tokens` more are taken."""
        self._binding = None
        while self._kept:
            held = sum(self._output_bytes.get(key, 0) for key in self._kept)
            if held <= KEPT_BYTES and tokens + sum(math.prod(key[-1]) for key in self._kept) <= KEPT_TOKENS:
                return
            del self._kept[next(iter(self._kept))]

    def _bound(self, inputs: Mapping[str, Array]) -> tuple[Any, dict[str, Any]]:
        """A binding of new buffers. What a run allocates for the outputs stays theirs in the binding's later runs."""
        binding, values = self.session.io_binding(), {}
        for name in self.spec.network_inputs:
            values[name] = self._ort.OrtValue.ortvalue_from_numpy(inputs[name], self.device)
            binding.bind_ortvalue_input(name, values[name])
        for name in self.spec.outputs:
            binding.bind_output(name, self.device)
        return binding, values

    def step(self) -> None:
        self.session.run_with_iobinding(self._binding)
        if self.device == "cuda":
            self._binding.synchronize_outputs()

    def fetch(self) -> dict[str, Array]:
        values = self._binding.copy_outputs_to_cpu()
        if self._keeps:
            self._output_bytes[next(reversed(self._kept))] = sum(value.nbytes for value in values)
        return {
            name: value.astype(np.float32, copy=self._keeps)
            for name, value in zip(self.spec.outputs, values, strict=True)
        }

    def facts(self) -> RuntimeFacts:
        placed = self._placed()
        return RuntimeFacts(
            runtime=f"onnxruntime {self._ort.__version__}", provider=self.session.get_providers()[0],
            kernels=self._kernels() if self._quantised() else None,
            nodes=dict(Counter(provider for provider, _ in placed)),
            computing_nodes=dict(Counter(provider for provider, kind in placed if kind in _COMPUTING)),
            threads=self.session.get_session_options().intra_op_num_threads or "all cores",
        )  # fmt: skip

    def _quantised(self) -> bool:
        return any(
            kind in ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear") for _, kind in self._placed()
        )

    def _kernels(self) -> dict[str, int] | None:
        """How often each kind of product stands in the graph that the session made of the model's, and runs; None where an
        environment only runs artefacts: effects are looked at where stages are built."""
        if self._products is None and find_spec("onnx_ir") is not None:
            import onnx_ir

            with temporary_directory.make() as folder:
                options = self._options()
                options.optimized_model_filepath = f"{folder}/model.onnx"
                options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights")
                try:
                    self._ort.InferenceSession(self._path, options, providers=[self._provider])
                except Exception:
                    model = Path(self._path)
                    disk_full.check_room(folder, sum(file.stat().st_size for file in model.parent.glob(f"{model.name}*")))
                    raise
                nodes = onnx_ir.load(f"{folder}/model.onnx").graph
                self._products = dict(Counter(node.op_type for node in nodes if node.op_type in _PRODUCTS))
        return self._products

    def _options(self) -> Any:
        options = self._ort.SessionOptions()
        options.log_severity_level = 4
        options.inter_op_num_threads = 1
        if self._threads is not None:
            options.intra_op_num_threads = self._threads
        # Threads that spin between runs would disturb whatever else the machine does.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        return options

    def _placed(self) -> list[tuple[str, str]]:
        """Provider and operator of every node, as the session assigned them."""
        assigned = self.session.get_provider_graph_assignment_info()
        return [(part.ep_name, node.op_type) for part in assigned for node in part.get_nodes()]
