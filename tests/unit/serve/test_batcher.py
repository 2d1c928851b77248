"""The queue: what waits is planned together, small requests pass large ones, and nothing is run for nobody."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bertopt.core import Session
from bertopt.runtime.batch_limits import BatchLimits
from bertopt.runtime.cost_model import Costs
from bertopt.runtime.single_text import SingleTextInputs
from bertopt.serve.batcher import Batcher, EncodedText, Job
from bertopt.serve.errors import RequestError
from bertopt.serve.metrics import Metrics
from tests.support.specs import spec


class Gate(Session):
    """Answers a text's first id, one batch at a time, each when `go` is called; keeps the batches it saw."""

    def __init__(self) -> None:
        self.batches: list[np.ndarray] = []
        self.entered, self.allowed = threading.Semaphore(0), threading.Semaphore(0)
        self.broken = False

    def load(self, inputs: Mapping[str, Any]) -> None:
        self._ids = inputs["input_ids"]

    def step(self) -> None:
        self.batches.append(self._ids)
        self.entered.release()
        assert self.allowed.acquire(timeout=20)
        if self.broken:
            raise RuntimeError("the runtime says no")

    def fetch(self) -> dict[str, Any]:
        return {"sentence_embedding": np.repeat(self._ids[:, :1].astype(np.float32), 4, axis=1)}

    def go(self, count: int = 1) -> None:
        self.allowed.release(count)

    def wait(self) -> None:
        assert self.entered.acquire(timeout=20)


class Bench:
    def __init__(self, queue_tokens: int = 10_000, tokens: int = 64, **fields: Any) -> None:
        self.session = Gate()
        self.spec = spec(task="feature-extraction", outputs=("sentence_embedding",), pooling="mean", labels=(), **fields)
        limits = BatchLimits(rows=8, tokens=tokens, length=16)
        runner: Any = SimpleNamespace(
            session=self.session, spec=self.spec, limits=limits, price=Costs, single=SingleTextInputs(self.spec, 16)
        )
        self.metrics = Metrics()
        self.batcher = Batcher(runner, queue_tokens, self.metrics.of("m"))

    def value(self, name: str, **labels: str) -> float:
        return float(self.metrics.registry.get_sample_value(f"bertopt_{name}", {"model": "m", **labels}) or 0.0)

    def run(self, do: Callable[[], Awaitable[None]]) -> None:
        async def go() -> None:
            try:
                await asyncio.wait_for(do(), 30)
            finally:
                self.session.go(1000)
                await asyncio.to_thread(self.batcher.close)

        asyncio.run(go())


def text(first: int, length: int = 4) -> EncodedText:
    return EncodedText(np.array([first, *[7] * (length - 1)], np.int64))


def values(job: Job) -> list[float]:
    return [float(one["sentence_embedding"][0]) for one in job.outputs]


async def entered(bench: Bench) -> None:
    await asyncio.to_thread(bench.session.wait)


def test_texts_gather_while_the_model_is_busy() -> None:
    bench = Bench()

    async def go() -> None:
        first = bench.batcher.submit([text(1)])
        await entered(bench)
        others = [bench.batcher.submit([text(10 + i)]) for i in range(6)]
        bench.session.go(100)
        for job in (first, *others):
            await job.future
        assert values(first) == [1.0] and [values(job)[0] for job in others] == [10.0 + i for i in range(6)]

    bench.run(go)
    assert [len(batch) for batch in bench.session.batches] == [1, 6]
    assert bench.value("queue_tokens") == bench.value("queue_texts") == 0
    assert bench.value("tokens_total") == 28


@pytest.mark.parametrize("length", [2, 4, 16])
def test_a_large_request_delays_a_single_text_by_two_batches_at_most(length: int) -> None:
    bench = Bench()

    async def go() -> None:
        large = bench.batcher.submit([text(100 + i) for i in range(200)])
        for _ in range(3):
            await entered(bench)
            bench.session.go()
        await entered(bench)
        small = bench.batcher.submit([text(1, length)])
        seen = len(bench.session.batches)
        bench.session.go(1000)
        await small.future
        place = next(i for i, batch in enumerate(bench.session.batches) if (batch[:, 0] == 1).any())
        assert place - seen <= 1, "the batch that runs, and one that was begun"
        await large.future
        assert values(large) == [100.0 + i for i in range(200)]

    bench.run(go)


def test_a_large_request_ends_however_many_small_ones_come() -> None:
    bench = Bench()

    async def go() -> None:
        large = bench.batcher.submit([text(100 + i) for i in range(40)])
        count = 0
        while not large.future.done():
            assert count < 200
            await entered(bench)
            for _ in range(8):
                bench.batcher.submit([text(1)])
            count += 1
            bench.session.go()
            await asyncio.sleep(0.005)

    bench.run(go)


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    bench = Bench(queue_tokens=40)

    async def go() -> None:
        bench.batcher.submit([text(1)])
        await entered(bench)
        waiting = [bench.batcher.submit([text(2)]) for _ in range(10)]
        with pytest.raises(RequestError, match="queue is full") as refused:
            bench.batcher.submit([text(3)])
        assert refused.value.status == 429 and int(refused.value.headers["Retry-After"]) >= 1
        with pytest.raises(RequestError, match="send fewer at once") as refused:
            bench.batcher.submit([text(3)] * 11)
        assert refused.value.status == 422
        bench.session.go(100)
        for job in waiting:
            await job.future
        await_again = bench.batcher.submit([text(4)])
        await await_again.future

    bench.run(go)
    assert bench.value("refused_requests_total", reason="queue_full") == 1


def test_what_a_queue_more_than_half_full_has_no_room_for_is_refused_by_its_expected_tokens() -> None:
    bench = Bench(queue_tokens=40)

    async def go() -> None:
        bench.batcher.submit([text(1)])
        await entered(bench)
        jobs = [bench.batcher.submit([text(2)]) for _ in range(5)]
        bench.batcher.expect(1000)
        jobs.append(bench.batcher.submit([text(2)]))
        bench.batcher.expect(16)
        with pytest.raises(RequestError, match="queue is full") as refused:
            bench.batcher.expect(16.5)
        assert refused.value.status == 429 and int(refused.value.headers["Retry-After"]) >= 1
        bench.session.go(100)
        for job in jobs:
            await job.future
        bench.batcher.expect(1000)

    bench.run(go)
    assert bench.value("refused_requests_total", reason="queue_full") == 1


@pytest.mark.parametrize(("fields", "most"), [({"layout": "packed"}, 2048), ({"layout": "packed", "row_length": 512}, 8192), ({}, 8192)])
def test_batches_that_cost_what_their_tokens_do_end_sooner(fields: dict[str, Any], most: int) -> None:
    bench = Bench(tokens=8192, **fields)
    bench.batcher.close()
    assert bench.batcher.limits.tokens == most


def test_what_nobody_waits_for_is_not_run() -> None:
    bench = Bench()

    async def go() -> None:
        bench.batcher.submit([text(1)])
        await entered(bench)
        dropped = bench.batcher.submit([text(50) for _ in range(20)])
        kept = bench.batcher.submit([text(2)])
        bench.batcher.drop(dropped, "disconnected")
        assert bench.value("queue_tokens") == 4
        bench.session.go(100)
        await kept.future

    bench.run(go)
    assert not any((batch[:, 0] == 50).any() for batch in bench.session.batches)
    assert bench.value("dropped_requests_total", reason="disconnected") == 1


def test_what_is_dropped_while_it_is_planned_leaves_the_queue_empty() -> None:
    bench = Bench()
    planning, go_on = threading.Event(), threading.Event()

    def price() -> Costs:
        planning.set()
        assert go_on.wait(20)
        return Costs()

    bench.batcher._runner.price = price  # type: ignore[method-assign]

    async def go() -> None:
        dropped = bench.batcher.submit([text(50), text(51), text(52)])
        await asyncio.to_thread(planning.wait, 20)
        bench.batcher.drop(dropped, "disconnected")
        go_on.set()
        bench.session.go(100)
        await bench.batcher.submit([text(2)]).future

    bench.run(go)
    assert bench.value("queue_tokens") == bench.value("queue_texts") == 0


def test_a_failing_batch_fails_its_requests_and_the_next_one_works() -> None:
    bench = Bench()

    async def go() -> None:
        bench.session.broken = True
        job = bench.batcher.submit([text(1)])
        bench.session.go()
        with pytest.raises(RequestError, match="the model failed") as failed:
            await job.future
        assert failed.value.status == 500
        bench.session.broken = False
        bench.session.go(10)
        again = bench.batcher.submit([text(2)])
        await again.future
        assert values(again) == [2.0]

    bench.run(go)
    assert bench.value("failed_batches_total") == 1 and bench.value("queue_tokens") == 0


def test_a_batch_that_fails_when_nobody_waits_leaves_no_stack_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    monkeypatch.setattr("bertopt.serve.batcher._log", logging.Logger("unseen"))  # a record would keep what failed

    async def go() -> None:
        bench.session.broken = True
        job = bench.batcher.submit([text(1)])
        while bench.value("queue_texts"):
            await asyncio.sleep(0.001)
        bench.batcher.drop(job, "timeout")
        bench.session.go()
        while not job.future.done():
            await asyncio.sleep(0.001)

    bench.run(go)
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio" and record.levelname == "ERROR"]


def test_a_wrong_output_fails_its_request_and_the_threads_live() -> None:
    bench = Bench()

    async def go() -> None:
        right = bench.session.fetch
        bench.session.fetch = dict  # type: ignore[method-assign, assignment]
        bench.session.go(100)
        for _ in range(4):  # more than there are threads
            with pytest.raises(RequestError, match="the model failed"):
                await bench.batcher.submit([text(1)]).future
        bench.session.fetch = right  # type: ignore[method-assign]
        await bench.batcher.submit([text(2)]).future

    bench.run(go)
    assert bench.value("failed_batches_total") == 4 and bench.value("queue_tokens") == 0


def test_requests_of_clients_that_go_take_no_memory_while_others_wait() -> None:
    bench = Bench()

    async def go() -> None:
        bench.batcher.submit([text(1)])
        await entered(bench)
        waits = [bench.batcher.submit([text(2, 16)]) for _ in range(40)]
        for _ in range(200):
            bench.batcher.drop(bench.batcher.submit([text(3)] * 50), "disconnected")
        assert len(bench.batcher._waiting) < 2000, "of 10,000 texts that nobody waits for"
        bench.session.go(1000)
        await asyncio.gather(*(job.future for job in waits))

    bench.run(go)
    assert bench.value("queue_tokens") == bench.value("queue_texts") == 0
