"""TensorRT-RTX compiles kernels where an engine runs: all of them at once, and kept between processes."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any

from bertopt.system import atomic_write


class KernelCache:
    """Creates the execution context of an engine and keeps the kernels that TensorRT-RTX compiled for it.

    Left alone it compiles the kernels of a new shape in the background while slower ones answer, so that a race would
    time those. The kernels are kept in the user's cache directory under the plan's hash, library version and compute
    capability: an artefact is never written to. For TensorRT itself, which compiles when it builds, this does nothing.
    """

    def __init__(self, trt: Any, engine: Any, plan: bytes, capability: str, cuda_graphs: bool = False) -> None:
        self._engine, self._cache, self._config, self._shapes = engine, None, None, 0
        self.path = folder() / f"{hashlib.sha256(plan).hexdigest()}-{trt.__version__}-{capability}.kernels"
        if not hasattr(trt, "DynamicShapesKernelSpecializationStrategy"):
            return
        self._config = engine.create_runtime_config()
        self._config.dynamic_shapes_kernel_specialization_strategy = trt.DynamicShapesKernelSpecializationStrategy.EAGER
        if cuda_graphs:
            self._config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        self._cache = self._config.create_runtime_cache()
        if self.path.is_file():
            # TensorRT-RTX compares the GPU and its own version, and refuses what does not fit: then it starts empty.
            self._cache.deserialize(self.path.read_bytes())
        self._config.set_runtime_cache(self._cache)

    @property
    def runtime_graphs(self) -> bool:
        """Whether the library captures CUDA graphs, and this session need not."""
        return self._config is not None

    def context(self) -> Any:
        """Return the engine's execution context, None where there is no memory for it."""
        return self._engine.create_execution_context(*(() if self._config is None else (self._config,)))

    def keep(self) -> None:
        """Write the compiled kernels. Called after a shape ran first; writes after the 1st, 2nd, 4th, 8th, … of them."""
        self._shapes += 1
        if self._cache is None or self._shapes & (self._shapes - 1):
            return
        with contextlib.suppress(OSError):  # a full or read-only disk costs time at the next start, nothing else
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with atomic_write.replacing(self.path) as new:
                new.write_bytes(memoryview(self._cache.serialize()))


def folder() -> Path:
    """The user's cache directory for compiled kernels."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bertopt" / "tensorrt_rtx"
