"""A CUDA device as torch sessions use it: page-locked memory, events in its queue of work, captured graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

Outputs = tuple[torch.Tensor, ...]

#: torch.cuda, parts of which have no types.
_cuda: Any = torch.cuda
#: torch allows one capture at a time in a process (its notes on CUDA graphs), whichever session captures.
capturing = threading.Lock()


class Mark(Protocol):
    """A place in the queue. `wait` returns when the work before it is done."""

    def wait(self) -> None: ...


class Queue(Protocol):
    """A device that runs work in the order in which it was submitted. Tests use a fake one."""

    def host_memory(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the host that the device reads and writes by itself."""

    def mark(self) -> Mark: ...

    def wait(self) -> None:
        """Return when the work before it is done."""

    def capture(self, run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """Return what replays the work of `run` on the same memory, and the outputs that every replay writes anew."""


class CudaQueue:
    """The current stream of a CUDA device. Captured graphs share one pool of memory, since they run one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def host_memory(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(elements, dtype=dtype, pin_memory=True)

    def mark(self) -> Mark:
        event: Any = _cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return _CudaMark(event)

    def wait(self) -> None:
        # Not the device: to wait for all of it spoils a capture in another thread, in every capture_error_mode.
        torch.cuda.current_stream(self._device).synchronize()

    def capture(self, run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        current, aside = torch.cuda.current_stream(self._device), _cuda.Stream(self._device)
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            # Libraries choose kernels and allocate workspaces in the first runs, which a capture does not allow.
            for _ in range(2):
                run()
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Other threads may copy, run and wait for their streams during it. `graph` itself begins by waiting for the device,
        # which is why it stands under the lock.
        with capturing, torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = run()
        return graph.replay, outputs


class _CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()
