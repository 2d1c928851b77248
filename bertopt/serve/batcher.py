"""The queue that plans: texts of many requests in shared batches.

While streams are busy, texts gather. When one is free, the texts that come first are planned together by cost, the batch
that holds the very first runs, and the others wait on and are planned again with whatever has come since. No timer: a lone
text runs at once.

First is whose number is lowest. The queue counts the tokens it has run. A request's first text gets the count at its
arrival; each further one, twice the tokens of the request before it on top. So a request of many texts counts as if they
came one after another, at half the rate of the model: beside it a small request is in the next batch, and as the count
grows with any work, nothing waits for ever.

What this does not do: it never interrupts a batch that runs, and it does not weigh users, only requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bertopt.modeling import packing
from bertopt.runtime.batch_limits import BatchLimits
from bertopt.runtime.batch_plan import plan
from bertopt.runtime.collector import of_texts, of_vectors
from bertopt.runtime.runner import Runner
from bertopt.serve.errors import RequestError
from bertopt.serve.metrics import ModelMetrics

if TYPE_CHECKING:
    from bertopt.core import Array

#: Most tokens of a batch where it costs little more than its tokens do: the sooner it ends, the sooner its texts are answered.
TOKENS = 2048
#: A request's later texts come as if the model had this many times their predecessors' work in between.
SPACING = 2
#: Dropped texts that may lie in the queue, beside as many as wait.
MOST_DROPPED = 1024
_log = logging.getLogger("bertopt.serve")


@dataclass(frozen=True)
class EncodedText:
    """Token ids [S] of one text, and its types where any is not 0."""

    ids: Array
    types: Array | None = None


@dataclass(eq=False)
class Job:
    """The texts of one request that are to be run. `outputs` [N] fill up in any order; then `future` is done."""

    texts: Sequence[EncodedText]
    future: asyncio.Future[None]
    outputs: list[dict[str, Array]] = field(default_factory=list)
    tokens: int = 0
    """Tokens that still wait."""
    waiting: int = 0
    """Texts that still wait."""
    left: int = 0
    """Texts that have no outputs yet."""
    dropped: bool = False
    submitted: float = 0.0
    started: float | None = None

    def __post_init__(self) -> None:
        self.left = self.waiting = len(self.texts)
        self.tokens = sum(len(text.ids) for text in self.texts)
        self.outputs = [{} for _ in self.texts]


class _Waiting(NamedTuple):
    """A text of a job, at `place` among its texts. The lowest number is first, then the earliest arrival, which no other text has."""

    number: int
    arrival: int
    job: Job
    place: int

    @property
    def text(self) -> EncodedText:
        return self.job.texts[self.place]


@dataclass
class _Batch:
    items: list[_Waiting]
    inputs: dict[str, Array]
    packed: packing.Batch | None
    """None for one text in the way of single texts."""


class Batcher:
    """Runs jobs on one session in as many threads as it has streams, plus one that hands out outputs while the next batch runs."""

    def __init__(self, runner: Runner, queue_tokens: int, metrics: ModelMetrics) -> None:
        self._runner, self.session, self.spec = runner, runner.session, runner.spec
        self.limits: BatchLimits = runner.limits
        if self.spec.layout == "packed" and self.spec.row_length is None:
            self.limits = replace(self.limits, tokens=min(self.limits.tokens, TOKENS))
        self.queue_tokens, self.metrics = queue_tokens, metrics
        self._waiting: list[_Waiting] = []
        self._changed = threading.Condition()
        self._arrivals = itertools.count()
        self._tokens = self._texts = self._run_tokens = 0
        self._rate, self._closed = 0.0, False
        streams = self.session.streams if self.session.concurrent else 1
        self._slots = threading.Semaphore(streams)
        self._threads = [threading.Thread(target=self._work, name=f"bertopt-batches-{i}", daemon=True) for i in range(streams + 1)]
        for thread in self._threads:
            thread.start()

    def expect(self, tokens: float) -> None:
        """Raise RequestError (429) where an estimate of `tokens` does not fit into a queue more than half full: before tokenising."""
        with self._changed:
            if self._tokens > self.queue_tokens / 2 and self._tokens + tokens > self.queue_tokens:
                raise self._full()

    def submit(self, texts: Sequence[EncodedText]) -> Job:
        """Queue texts, at least one, for the event loop that calls. Raises RequestError (422, 429) where they do not fit."""
        job = Job(texts, asyncio.get_running_loop().create_future())
        if job.tokens > self.queue_tokens:
            raise RequestError(422, f"the texts have {job.tokens} tokens; the queue holds {self.queue_tokens}: send fewer at once")
        with self._changed:
            if self._tokens + job.tokens > self.queue_tokens:
                raise self._full()
            if len(self._waiting) > 2 * self._texts + MOST_DROPPED:
                self._waiting = [item for item in self._waiting if not item.job.dropped]
                heapq.heapify(self._waiting)
            job.submitted = time.perf_counter()
            number, arrival = self._run_tokens, next(self._arrivals)
            for index, text in enumerate(texts):
                heapq.heappush(self._waiting, _Waiting(number, arrival * self.queue_tokens + index, job, index))
                number += SPACING * len(text.ids)
            self._count(job.tokens, len(texts))
            self._changed.notify()
        return job

    def drop(self, job: Job, reason: str) -> None:
        """Take a job out of the queue: nothing of it that has not begun is run."""
        with self._changed:
            if not job.dropped and job.left:
                job.dropped = True
                self._count(-job.tokens, -job.waiting)
                job.tokens = job.waiting = 0
                self.metrics.drop(reason)

    def _full(self) -> RequestError:
        wait = math.ceil(self._tokens / self._rate) if self._rate else 1
        self.metrics.refuse("queue_full")
        return RequestError(429, "the queue is full; try again later", retry_after_s=min(max(wait, 1), 60))

    def close(self) -> None:
        """End the threads once their batches are done. What waits is not run."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _count(self, tokens: int, texts: int) -> None:
        self._tokens += tokens
        self._texts += texts
        self.metrics.queue(self._tokens, self._texts)

    def _work(self) -> None:
        while True:
            with self._slots:
                window = self._take()
                if not window:
                    return
                batch: _Batch | None = None
                try:
                    batch = self._choose(window)
                    start = time.perf_counter()
                    raw = self.session.run(batch.inputs)
                    seconds = time.perf_counter() - start
                except BaseException as error:  # the thread must live: the request gets the error, the log the stack
                    self._failed(batch.items if batch else window, error)
                    continue
            try:
                self._measured(batch, seconds)
                self._finish(batch, raw)
            except BaseException as error:
                self._failed(batch.items, error)

    def _take(self) -> list[_Waiting]:
        """Return the first waiting texts, as many as are planned together; none once the queue is closed."""
        with self._changed:
            while True:
                window: list[_Waiting] = []
                while self._waiting and len(window) < self.limits.texts:
                    item = heapq.heappop(self._waiting)
                    if not item.job.dropped:
                        window.append(item)
                if window or self._closed:
                    return window if not self._closed else []
                self._changed.wait()

    def _choose(self, window: list[_Waiting]) -> _Batch:
        """Plan the texts of `window`, put all but the first text's batch back, and return that."""
        batch = self._alone(window[0]) if len(window) == 1 and self.spec.granularity == "text" else self._planned(window)
        now = time.perf_counter()
        chosen = {id(item) for item in batch.items}
        with self._changed:
            back = [item for item in window if id(item) not in chosen and not item.job.dropped]
            for item in back:
                heapq.heappush(self._waiting, item)
            for item in batch.items:
                job, tokens = item.job, len(item.text.ids)
                self._run_tokens += tokens
                if not job.dropped:
                    job.tokens -= tokens
                    job.waiting -= 1
                    self._count(-tokens, -1)
                if job.started is None:
                    job.started = now
                    self.metrics.waited.observe(now - job.submitted)
            if back:
                self._changed.notify()
        return batch

    def _alone(self, item: _Waiting) -> _Batch:
        types = None if item.text.types is None else item.text.types.tolist()
        return _Batch([item], self._runner.single.inputs(item.text.ids.tolist(), types), None)

    def _planned(self, window: list[_Waiting]) -> _Batch:
        """Return the batch that holds the first text of `window`, where all its texts are planned together."""
        texts = [item.text for item in window]
        lengths = np.fromiter((len(text.ids) for text in texts), np.int64, len(texts))
        types = None
        if any(text.types is not None for text in texts):
            types = np.concatenate([np.zeros_like(text.ids) if text.types is None else text.types for text in texts])
        flat = packing.flat(self.spec, np.concatenate([text.ids for text in texts]), types, lengths)
        chosen = plan(self.spec, lengths, self._runner.price(), self.limits)
        first = int(packing.by_length(chosen.rows)[0])
        span = next((low, high) for low, high in chosen.batches if low <= first < high)
        (packed,) = packing.batches(self.spec, flat, chosen.rows, [span])
        return _Batch([window[number] for number in packed.texts.tolist()], packed.inputs, packed)

    def _measured(self, batch: _Batch, seconds: float) -> None:
        tokens = sum(len(item.text.ids) for item in batch.items)
        self.metrics.batch(len(batch.items), tokens, batch.inputs["input_ids"].size, seconds)
        rate = tokens / max(seconds, 1e-6) * (self.session.streams if self.session.concurrent else 1)
        with self._changed:
            self._rate = rate if not self._rate else 0.9 * self._rate + 0.1 * rate

    def _finish(self, batch: _Batch, raw: dict[str, Array]) -> None:
        if batch.packed is None:
            by_text = of_vectors(self.spec, [raw[self.spec.outputs[0]].reshape(-1)])
        else:
            by_text = of_texts(self.spec, batch.packed, raw)
        done = []
        with self._changed:
            for item, outputs in zip(batch.items, by_text, strict=True):
                item.job.outputs[item.place] = outputs
                item.job.left -= 1
                if not item.job.left:
                    done.append(item.job)
        _settle(done, None)

    def _failed(self, items: list[_Waiting], error: BaseException) -> None:
        _log.error("a batch failed", exc_info=error)
        self.metrics.failed_batches.inc()
        jobs = list(dict.fromkeys(item.job for item in items))
        for job in jobs:
            self.drop(job, "failed")
        _settle(jobs, RequestError(500, "the model failed on this request; the server's log says why"))


def _settle(jobs: list[Job], error: Exception | None) -> None:
    """Tell the event loops of `jobs`, with one call each."""
    for loop in {job.future.get_loop() for job in jobs}:
        mine = [job.future for job in jobs if job.future.get_loop() is loop]
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_set, mine, error)


def _set(futures: list[asyncio.Future[None]], error: Exception | None) -> None:
    for future in (future for future in futures if not future.done()):
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
            future.exception()  # else asyncio logs a stack where nobody waits any more
