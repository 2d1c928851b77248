"""The queue of a CUDA device, with torch.cuda replaced: the order of its calls. It cannot show that CUDA accepts them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bertopt.sessions import cuda_queue
from bertopt.sessions.cuda_queue import CudaQueue


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.log.append(f"{self.name} over")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every call, in order."""
    said: list[str] = []
    current = Stream("current", said)

    class Graph:
        def replay(self) -> None:
            said.append("replay")

    class Event:
        def record(self, stream: Stream) -> None:
            said.append(f"record on {stream.name}")

        def synchronize(self) -> None:
            said.append("event over")

    @contextlib.contextmanager
    def stream(of: Stream) -> Iterator[None]:
        said.append(f"on {of.name}")
        yield
        said.append("back")

    @contextlib.contextmanager
    def graph(_: Any, pool: Any, capture_error_mode: str) -> Iterator[None]:
        assert cuda_queue.capturing.locked(), "another session may capture, and each capture begins with a wait for the device"
        said.append(f"capture into {pool}, {capture_error_mode}")
        yield
        said.append("captured")

    pools = iter(("pool 1", "pool 2"))
    replaced = {
        "current_stream": lambda device: current, "Stream": lambda device: Stream("aside", said), "stream": stream, "graph": graph,
        "CUDAGraph": Graph, "graph_pool_handle": lambda: next(pools), "Event": Event,
        "synchronize": lambda device: pytest.fail("a wait for the device spoils a capture in another thread"),
    }  # fmt: skip
    for name, does in replaced.items():
        monkeypatch.setattr(cuda_queue._cuda, name, does)
    return said


def test_a_capture_is_warmed_up_aside_and_shares_one_pool(log: list[str]) -> None:
    queue, runs = CudaQueue(torch.device("cuda")), iter(range(9))

    def run() -> tuple[torch.Tensor, ...]:
        log.append("run")
        return (torch.tensor(next(runs)),)

    replay, outputs = queue.capture(run)
    assert log == [
        "aside waits for current", "on aside", "run", "run", "back", "current waits for aside",
        "capture into pool 1, thread_local", "run", "captured",
    ]  # fmt: skip
    assert int(outputs[0]) == 2, "what the capture gave, not a run before it"
    log.clear()
    replay()
    assert log == ["replay"]
    queue.capture(run)
    assert "capture into pool 1, thread_local" in log, "the same pool"
    assert "capture into pool 2, thread_local" not in log


def test_a_mark_lies_in_the_current_stream(log: list[str]) -> None:
    queue = CudaQueue(torch.device("cuda"))
    mark = queue.mark()
    mark.wait()
    queue.wait()
    assert log == ["record on current", "event over", "current over"]
    assert not cuda_queue.capturing.locked()
