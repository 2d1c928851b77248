"""A server under load: every answer compared with the known one, restarts, kills, and more requests than it can take.

    python -m campaigns.serve_load [--artifact DIR] [--requests 20000] [--restarts 10] [--kills 5] [--overload 10] [--cores 0] [--out FILE]

Without `--artifact` it serves a tiny random embedding model. Loopback only. A part with count 0 is left out; the results of each
part are added to FILE as they come. Exits 1 if a criterion does not hold.

- `requests`: 64 connections, 1 to 16 texts a request and now and then 100, cache off and on (smaller than the texts); one
  request in 50 is abandoned if it takes longer than 0 to 20 ms. Wrong or lost answers, memory, and whether the queue is empty afterwards.
- `restarts`: SIGTERM under load. A request counts as accepted if the server's access log has it; each such request must
  reach its client whole, the exit code must be 0, and nothing may be cancelled at the end of the grace.
- `kills`: SIGKILL under load; time until the next start on the same port is ready.
- `overload` seconds at 3 times the rate that 64 waiting clients reach: latency of what is accepted, the rest 429, recovery.
  `--cores` pins its server, and its load to the other cores: sharing them, the load lowers the rate that it is 3 times of.

What it does not look at: several machines, TLS, proxies, other routes than /embed. Bytes that the server never read before it ended
(a request sent to a connection that is just being closed) are not accepted requests; they are counted as `unread`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import bertopt
from benchmarks.http_client import Broken, Connection, NotConnected, Server
from bertopt.system import environment

CLIENTS, POOL = 64, 1000
WARM_REQUESTS = 1000
#: Seconds after which an answer counts as lost.
ANSWER_S = 60.0


class Known:
    """Texts, and what the artefact answers to them when it is called without a server."""

    def __init__(self, artifact: Path, count: int = POOL) -> None:
        rng = random.Random(7)
        predictor = bertopt.load(artifact)
        words = sorted(word for word in predictor.tokenizer.fast.get_vocab() if word.isalpha())
        lengths = [min(100, int(rng.lognormvariate(2.5, 0.8)) + 3) for _ in range(count)]
        self.texts = [" ".join(rng.choices(words, k=length)) for length in lengths]
        self.tokens = len(predictor.tokenizer.flat(self.texts).flat.ids) / count
        vectors = np.concatenate([predictor([text]) for text in self.texts])
        self.vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        # What another batch may do to a text's outputs, and how near the nearest other text is: wrong must be between.
        again = predictor(self.texts)
        self.noise = float(np.linalg.norm(again / np.linalg.norm(again, axis=1, keepdims=True) - self.vectors, axis=1).max())
        near = self.vectors @ self.vectors.T - 2 * np.eye(count)
        self.nearest = float(np.sqrt(max(0.0, 2 - 2 * near.max())))
        self.limit = max(1e-5, 4 * self.noise)
        if self.nearest < 2 * self.limit:
            sys.exit(f"two texts' answers differ by {self.nearest:g}, a batch's by {self.noise:g}: this artefact cannot show wrong answers")
        self.worst = 0.0

    def right(self, numbers: list[int], answer: Any) -> bool:
        vectors = np.asarray(answer, np.float64)
        if vectors.shape != (len(numbers), self.vectors.shape[1]):
            return False
        error = float(np.linalg.norm(vectors - self.vectors[numbers], axis=1).max())
        self.worst = max(self.worst, error)
        return error <= self.limit

    def request(self, rng: random.Random, most: int = 16) -> tuple[list[int], bytes]:
        many = rng.choices((1, rng.randint(2, most), 100 if most == 16 else most), (50, 45, 5 if most == 16 else 0))[0]
        numbers = rng.choices(range(len(self.texts)), k=many)
        return numbers, json.dumps({"inputs": [self.texts[number] for number in numbers]}).encode()


async def _client(port: int, known: Known, seed: int, more: Any, count: Counter[str], abandon: bool, ids: dict[str, str] | None = None) -> None:
    """Send one request after the other while `more()`; a count for each outcome, and in `ids` each request's by its id."""
    rng, connection, number = random.Random(seed), Connection(port), 0
    while more():
        numbers, body = known.request(rng)
        number += 1
        name = f"{seed}-{number}"
        patience = rng.random() * 0.02 if abandon and rng.random() < 0.02 else ANSWER_S
        try:
            answer = await asyncio.wait_for(connection.post("/embed", body, name), patience)
            outcome = "right" if answer.status == 200 and known.right(numbers, answer.json()) else f"wrong {answer.status}"
        except TimeoutError:
            outcome = "abandoned" if patience < ANSWER_S else f"wrong: no answer in {ANSWER_S:g} s"
        except NotConnected:
            outcome = "refused"
        except Broken as error:
            outcome = "partial" if error.partial else "unanswered"
        count[outcome] += 1
        if ids is not None:
            ids[name] = outcome
        if outcome == "refused":
            return
    connection.close()


def requests(command: list[str], known: Known, folder: Path, total: int, cache_mb: float) -> dict[str, Any]:
    server = Server([*command, "--log-level", "warning", "--cache-mb", str(cache_mb), "--port"], folder / "requests.log")
    count: Counter[str] = Counter()

    def some(most: int, seed: int) -> None:
        sent = iter(range(most))

        async def all_of() -> None:
            more = lambda: next(sent, None) is not None  # noqa: E731
            await asyncio.gather(*(_client(server.port, known, seed + i, more, count, True) for i in range(CLIENTS)))

        asyncio.run(all_of())

    memory = []
    try:
        some(min(total, WARM_REQUESTS), 10**6)
        for part in range(5):
            memory.append(round(server.rss_mb(), 1))
            some(total // 5, part * 1000)
        memory.append(round(server.rss_mb(), 1))
        scrape = {line.split("{")[0]: float(line.split()[-1]) for line in server.get("/metrics").decode().splitlines() if line[:1] not in ("", "#")}
    finally:
        code = server.end()
    empty = scrape["bertopt_queue_tokens"] == scrape["bertopt_queue_texts"] == 0
    growth = memory[-1] / memory[0] - 1
    bad = sum(many for name, many in count.items() if name not in ("right", "abandoned"))
    return {"requests": sum(count.values()), "outcomes": dict(count), "cache_mb": cache_mb, "memory_mb": memory, "memory_growth": round(growth, 4),
            "largest_error": known.worst, "limit": known.limit, "nearest_other_text": known.nearest, "queue_empty": empty, "exit_code": code,
            "holds": not bad and empty and growth <= 0.05 and code == 0}  # fmt: skip


def restarts(command: list[str], known: Known, folder: Path, times: int) -> dict[str, Any]:
    rng = random.Random(1)
    rows: list[dict[str, Any]] = []
    for number in range(times):
        log = folder / f"restart-{number}.log"
        server = Server([*command, "--drain", str(rng.choice((0, 0.2))), "--port"], log)
        count: Counter[str] = Counter()
        ids: dict[str, str] = {}

        async def loaded(server: Server = server, count: Counter[str] = count, ids: dict[str, str] = ids) -> None:
            more = lambda: True  # noqa: E731
            clients = [asyncio.create_task(_client(server.port, known, i, more, count, False, ids)) for i in range(16)]
            await asyncio.sleep(0.5 + rng.random())
            server.process.send_signal(signal.SIGTERM)
            await asyncio.gather(*clients)

        asyncio.run(loaded())
        # A second signal would end it without grace.
        code, lines = server.wait(), log.read_text().splitlines()
        answered = [entry["request_id"] for line in lines if line.startswith("{") for entry in [json.loads(line)] if entry["path"] == "/embed"]
        lost = [name for name in answered if ids.get(name) != "right"]
        said = [line for line in lines if "Traceback" in line or "ancel" in line]
        rows.append({"accepted": len(answered), "lost": len(lost), "unread": count["unanswered"], "refused": count["refused"],
                     "partial": count["partial"], "wrong": sum(many for name, many in count.items() if name.startswith("wrong")),
                     "exit_code": code, "said": said[:3]})  # fmt: skip
        log.unlink()
    bad = [row for row in rows if row["lost"] or row["partial"] or row["wrong"] or row["exit_code"] or row["said"] or not row["accepted"]]
    total = {name: sum(row[name] for row in rows) for name in ("accepted", "lost", "unread", "partial", "wrong")}
    return {"restarts": times, **total, "bad": bad, "holds": not bad}


def kills(command: list[str], known: Known, folder: Path, times: int) -> dict[str, Any]:
    rng, ready = random.Random(2), []
    server = Server([*command, "--log-level", "warning", "--port"], folder / "kills.log")
    outcomes: Counter[str] = Counter()
    for _ in range(times):

        async def loaded(server: Server) -> None:
            ended = asyncio.Event()
            more = lambda: not ended.is_set()  # noqa: E731
            clients = [asyncio.create_task(_client(server.port, known, i, more, outcomes, False)) for i in range(16)]
            await asyncio.sleep(0.3 + rng.random() / 2)
            server.process.kill()
            ended.set()
            await asyncio.gather(*clients)

        asyncio.run(loaded(server))
        server.end(signal.SIGKILL)
        server = Server(server.command, server.log, server.port)
        ready.append(round(server.ready_s, 2))
    server.end()
    wrong = sum(many for name, many in outcomes.items() if name.startswith("wrong"))
    return {"kills": times, "ready_s": ready, "outcomes": dict(outcomes), "holds": not wrong and max(ready) <= 3.0}


def overload(command: list[str], known: Known, folder: Path, seconds: float, cores: set[int], limit_s: float = 1.0) -> dict[str, Any]:
    """`limit_s` of work may wait: the queue's bound follows from the measured rate, as an operator would set it."""
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
    return {"capacity_requests_s": round(capacity, 1), "seconds": seconds, "server_cores": sorted(cores), "queue_tokens": bound, "limit_s": limit_s, "outcomes": dict(counts),
            "accepted_p99_s": round(p99, 3), "sent_late_p99_s": round(float(np.percentile(late, 99)), 3), "recovered": recovered,
            "holds": expected and p99 <= 2 * limit_s and recovered}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path)
    for name, default in (("requests", 20_000), ("restarts", 10), ("kills", 5), ("overload", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cores", type=lambda word: {int(core) for core in word.split(",")}, default=set(), help="of the overloaded server, such as 0,1")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/serve_campaign.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bertopt-load-") as name:
        folder = Path(name)
        artifact, what = arguments.artifact, str(arguments.artifact and arguments.artifact.name)
        if artifact is None:
            from tests.support.artefacts import write_artefact
            from tests.support.tiny_models import write_tiny

            write_tiny(folder / "tiny", task="feature-extraction", pooling="mean")
            artifact, what = write_artefact(folder / "tiny", folder / "artifact"), "tiny random model, ONNX float32"
        command = [sys.executable, "-m", "bertopt", "serve", f"m={artifact.resolve()}"]
        known = Known(artifact)
        parts: dict[str, Any] = {
            "requests": lambda: requests(command, known, folder, arguments.requests, 0),
            "requests_cached": lambda: requests(command, known, folder, arguments.requests, 0.25),
            "restarts": lambda: restarts(command, known, folder, arguments.restarts),
            "kills": lambda: kills(command, known, folder, arguments.kills),
            "overload": lambda: overload(command, known, folder, arguments.overload, arguments.cores),
        }
        failed = []
        for part, run in parts.items():
            if getattr(arguments, part.split("_")[0]):
                result = {"artefact": what, "environment": environment.describe(), **run()}
                print(part, json.dumps({key: value for key, value in result.items() if key != "environment"}), flush=True)
                failed += [] if result["holds"] else [part]
                kept = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {}
                arguments.out.write_text(json.dumps({**kept, part: result}, indent=2) + "\n")
    if failed:
        sys.exit(f"does not hold: {', '.join(failed)}")


if __name__ == "__main__":
    main()
