"""Eager and compiled torch networks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from bertopt.core import Compiled, Device, Eager, Packaged, RuntimeFacts, Session
from bertopt.errors import Unsupported
from bertopt.modeling import fp8
from bertopt.sessions.cuda_queue import CudaQueue, Mark, Outputs, Queue
from bertopt.sessions.inputs import check
from bertopt.sessions.token_graphs import TokenGraphs
from bertopt.system import limits

if TYPE_CHECKING:
    from bertopt.core import Array

#: Batches that a device holds: while one runs, the next one is copied behind it.
IN_FLIGHT = 2
#: What torch.autocast rounds to where nobody says, of which compiled code depends even where it is off.
_AUTOCAST = {"cpu": torch.bfloat16, "cuda": torch.float16}


@contextmanager
def _in_own_precision(device: torch.device) -> Iterator[None]:
    """Run a network without gradients, in its precision, and with torch's own default device, though the caller's program may be inside
    torch.autocast and have called `torch.set_default_device`."""
    around = torch.is_autocast_enabled(device.type)  # entering a context takes as long as a kernel
    elsewhere = torch.empty(0).device.type != "cpu"  # get_default_device takes five times as long
    off = torch.autocast(device.type, dtype=_AUTOCAST[device.type], enabled=False, cache_enabled=True) if around else nullcontext()
    with torch.inference_mode(), off, torch.device("cpu") if elsewhere else nullcontext():
        yield


class TorchSession(Session):
    """On a CPU a batch at a time. With a `queue`, by default on CUDA, `run` and `run_all` copy through page-locked
    memory and wait only for outputs; `step` waits for the device. Several threads may call those two."""

    def __init__(
        self, model: Eager | Compiled | Packaged, device: Device, threads: int | None = None, queue: Queue | None = None
    ) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise Unsupported(
                "torch sees no CUDA GPU here; load with device='cpu' (in a recipe device: cpu), or install the driver and a CUDA build of torch"
            )
        if device == "cuda" and model.precision == "float8" and (here := torch.cuda.get_device_capability()) < (8, 9):
            raise Unsupported(f"fp8 needs a GPU of sm89 or later; this one is sm{here[0]}{here[1]}: export without quantize_fp8")
        if device == "cpu" and model.precision == "float8" and (reason := fp8.cpu_refusal()):
            raise Unsupported(reason)
        if threads is None and (few := limits.quota_threads()) is not None and few < torch.get_num_threads():
            threads = few
        if threads is not None:
            torch.set_num_threads(threads)
        self.spec = model.spec
        self.device = torch.device(device)
        self.fixed_costs = device == "cpu"
        self.network: Any = self._open(model)
        self._queue = CudaQueue(self.device) if device == "cuda" and queue is None else queue
        self.concurrent = self._queue is not None
        self._graphs = self._open_graphs()
        self._turn = threading.Lock()
        self._idle_memory: list[_HostMemory] = []
        self._widens = isinstance(model, Compiled) and model.spec.layout == "padded" and model.spec.max_length > 1
        self._inputs: tuple[torch.Tensor, ...] = ()
        self._forward: Callable[[], Outputs] = tuple
        self._outputs: Outputs = ()

    def _open(self, model: Any) -> Any:
        """Return what maps input tensors to a tuple of outputs."""
        network = model.network.to(self.device)
        if isinstance(model, Compiled) and any(rewrite.options.get("dynamic") for rewrite in model.rewrites):
            with _in_own_precision(self.device):
                network.tune()
        return network

    def _open_graphs(self) -> TokenGraphs | None:
        sizes: tuple[int, ...] = getattr(self.network, "graph_sizes", ())
        if not sizes:
            return None
        if self._queue is None:
            raise Unsupported("CUDA graphs need a GPU; set device: cuda, or deliver a stage without capture_graphs")
        graphs = TokenGraphs(self.network, self.spec, sizes, self.device, self._queue)
        self.buckets = sizes
        if self.network.graphs_ahead:
            with _in_own_precision(self.device):
                graphs.capture_all()
        return graphs

    def load(self, inputs: Mapping[str, Array]) -> None:
        # As in `_submit`: torch.compile makes a graph for tensors of inference mode and another for those made outside of it.
        with torch.inference_mode():
            arrays, self._inputs, self._forward = self._prepared(inputs)
            for name, tensor in zip(self.spec.network_inputs, self._inputs, strict=True):
                tensor.copy_(torch.from_numpy(arrays[name]))

    def step(self) -> None:
        with _in_own_precision(self.device):
            self._outputs = self._forward()
        if self._queue is not None:
            self._queue.wait()

    def fetch(self) -> dict[str, Array]:
        return {
            name: value.float().cpu().numpy() for name, value in zip(self.spec.outputs, self._outputs, strict=False)
        }

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return super().run(inputs) if self._queue is None else self._collect(self._submit(inputs, self._queue))

    def run_all(self, batches: Iterable[Mapping[str, Array]]) -> Iterator[dict[str, Array]]:
        if self._queue is None:
            yield from super().run_all(batches)
            return
        pending: deque[_Pending] = deque()
        for inputs in batches:
            pending.append(self._submit(inputs, self._queue))
            if len(pending) == IN_FLIGHT:
                yield self._collect(pending.popleft())
        while pending:
            yield self._collect(pending.popleft())

    def _prepared(
        self, inputs: Mapping[str, Array]
    ) -> tuple[Mapping[str, Array], tuple[torch.Tensor, ...], Callable[[], Outputs]]:
        """The arrays to copy, the device's memory for them, and what then runs."""
        check(inputs, self.spec.network_inputs)
        if self._graphs is not None and (batch := self._graphs.pad(inputs)) is not None:
            graphs = self._graphs
            return batch.arrays, graphs.inputs(batch.size, batch.places), lambda: graphs.run(batch)
        shapes = [inputs[name].shape for name in self.spec.network_inputs]
        tensors = tuple(torch.empty(shape, dtype=torch.int64, device=self.device) for shape in shapes)
        return inputs, tensors, lambda: self._run(tensors)

    def _run(self, tensors: tuple[torch.Tensor, ...]) -> Outputs:
        """Run the network, a compiled one with a padding token beside a single one.

        torch.compile traces a separate graph for sequences of one token, which takes 10 to 20 s.
        """
        if not self._widens or tensors[0].shape[1] > 1:
            return tuple(self.network(*tensors))
        fill = {"input_ids": self.spec.pad_id}
        padded = (
            torch.nn.functional.pad(tensor, (0, 1), value=fill.get(name, 0))
            for name, tensor in zip(self.spec.network_inputs, tensors, strict=True)
        )
        outputs = self.network(*padded)
        return tuple(outputs if self.spec.granularity == "text" else (value[:, :1] for value in outputs))

    def _submit(self, inputs: Mapping[str, Array], queue: Queue) -> _Pending:
        """Put a batch into the device's queue: copy it there, run it, copy the outputs back."""
        # One thread at a time: graphs share their inputs, and the device keeps the order.
        with self._turn, _in_own_precision(self.device):
            memory = self._idle_memory.pop() if self._idle_memory else _HostMemory(queue)
            arrays, tensors, forward = self._prepared(inputs)
            for name, tensor in zip(self.spec.network_inputs, tensors, strict=True):
                staged = memory.of(name, tensor)
                staged.numpy()[...] = arrays[name]
                tensor.copy_(staged, non_blocking=True)
            outputs = {}
            for name, value in zip(self.spec.outputs, forward(), strict=False):
                outputs[name] = memory.of(name, value).copy_(value, non_blocking=True)
            return _Pending(memory, outputs, queue.mark())

    def _collect(self, pending: _Pending) -> dict[str, Array]:
        pending.mark.wait()
        outputs = {name: value.to(torch.float32, copy=True).numpy() for name, value in pending.outputs.items()}
        self._idle_memory.append(pending.memory)
        return outputs

    def facts(self) -> RuntimeFacts:
        from torch._dynamo.utils import counters

        graphs = counters["stats"].get("unique_graphs")
        return RuntimeFacts(
            runtime=f"torch {torch.__version__}", device=self.device.type, threads=torch.get_num_threads(),
            graphs=int(graphs) if graphs else None,
            captured_graphs=None if self._graphs is None else self._graphs.captured,
        )  # fmt: skip


class _HostMemory:
    """The host's memory of one batch in flight, kept for later ones and replaced by larger where they need it."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._kept: dict[str, torch.Tensor] = {}

    def of(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return memory for a tensor of that shape and type."""
        kept = self._kept.get(name)
        if kept is None or kept.numel() < like.numel() or kept.dtype != like.dtype:
            kept = self._kept[name] = self._queue.host_memory(like.numel(), like.dtype)
        return kept[: like.numel()].view(like.shape)


@dataclass(frozen=True)
class _Pending:
    """A batch in the device's queue. Its outputs are there once `mark` was waited for."""

    memory: _HostMemory
    outputs: dict[str, torch.Tensor]
    mark: Mark
