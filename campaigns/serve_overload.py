"""The part `overload` of `campaigns.serve_load`: more requests than a server can take."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.http_client import Connection, Server
from campaigns.serve_known import CLIENTS, Known


def overload(command: list[str], known: Known, folder: Path, seconds: float, cores: set[int], limit_s: float = 1.0) -> dict[str, Any]:
    """`limit_s` of work may wait: the queue's bound follows from the measured rate, as an operator would set it.

    Void where the requests themselves were sent late, as on the cores of a server whose model is tiny.
    """
    everything = os.sched_getaffinity(0)

    def started(*more: str) -> Server:
        os.sched_setaffinity(0, cores or everything)  # the server inherits it
        try:
            return Server([*command, "--log-level", "warning", *more, "--port"], folder / "overload.log")
        finally:
            os.sched_setaffinity(0, everything - cores or everything)

    def series(server: Server, rate: float, length: float) -> tuple[Counter[str], list[float], list[float]]:
        counts: Counter[str] = Counter()
        latencies: list[float] = []
        late: list[float] = []
        pool: list[Connection] = []

        async def send(due: float, rng: random.Random) -> None:
            numbers, body = rng.choices(range(len(known.texts)), k=8), b""
            body = json.dumps({"inputs": [known.texts[number] for number in numbers]}).encode()
            connection = pool.pop() if pool else Connection(server.port)
            late.append(time.perf_counter() - due)
            try:
                answer = await asyncio.wait_for(connection.post("/embed", body), 60)
                good = answer.status == 200
                counts["right" if good and known.right(numbers, answer.json()) else f"status {answer.status}"] += 1
                if good:
                    latencies.append(time.perf_counter() - due)
            except (TimeoutError, ConnectionError) as error:
                counts[type(error).__name__] += 1
            pool.append(connection)

        async def all_of() -> None:
            rng, tasks, due, start = random.Random(3), [], 0.0, time.perf_counter()
            while (due := due + rng.expovariate(rate)) < length:
                await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
                tasks.append(asyncio.create_task(send(start + due, rng)))
            await asyncio.gather(*tasks)

        asyncio.run(all_of())
        return counts, latencies, late

    async def closed(server: Server, length: float) -> float:
        end, done = time.monotonic() + length, 0

        async def client(seed: int) -> None:
            nonlocal done
            rng, connection = random.Random(seed), Connection(server.port)
            while time.monotonic() < end:
                await connection.post("/embed", json.dumps({"inputs": rng.choices(known.texts, k=8)}).encode())
                done += 1
            connection.close()

        await asyncio.gather(*(client(seed) for seed in range(CLIENTS)))
        return done / length

    server = started()
    try:
        capacity = asyncio.run(closed(server, 5.0))
    finally:
        server.end()
    bound = max(2048, round(capacity * 8 * known.tokens * limit_s))
    server = started("--queue-tokens", str(bound))
    try:
        series(server, capacity / 4, 1.0)
        counts, latencies, late = series(server, 3 * capacity, seconds)
        start, quick = time.perf_counter(), []
        while time.perf_counter() - start < 2.0:
            quick.append(series(server, max(2.0, capacity / 4), 0.5))
        last = quick[-1]
    finally:
        server.end()
        os.sched_setaffinity(0, everything)
    p99 = float(np.percentile(latencies, 99)) if latencies else float("inf")
    recovered = not (set(last[0]) - {"right"}) and max(last[1], default=0.0) <= limit_s
    expected = set(counts) <= {"right", "status 429"} and counts["status 429"] > 0
    sent_late = float(np.percentile(late, 99))
    return {"capacity_requests_s": round(capacity, 1), "seconds": seconds, "server_cores": sorted(cores), "queue_tokens": bound, "limit_s": limit_s, "outcomes": dict(counts),
            "accepted_p99_s": round(p99, 3), "sent_late_p99_s": round(sent_late, 3), "recovered": recovered,
            "void": sent_late > limit_s / 10, "holds": expected and p99 <= 2 * limit_s and recovered}  # fmt: skip
