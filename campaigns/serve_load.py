"""A server under load: every answer compared with the known one, restarts, kills, and more requests than it can take.

    python -m campaigns.serve_load [--artifact DIR] [--requests 20000] [--restarts 10] [--kills 5] [--overload 10] [--cores 0] [--out FILE]

Without `--artifact` it serves a tiny random embedding model. Loopback only. A part with count 0 is left out; the results of each
part are added to FILE as they come. Exits 1 if a criterion does not hold, or a part is void.

- `requests`: 64 connections, 1 to 16 texts a request and now and then 100, cache off and on (smaller than the texts); one
  request in 50 is abandoned if it takes longer than 0 to 20 ms. Wrong or lost answers, memory, and whether the queue is empty afterwards.
- `restarts`: SIGTERM under load. A request counts as accepted if the server's access log has it; each such request must
  reach its client whole, the exit code must be 0, and nothing may be cancelled at the end of the grace.
- `kills`: SIGKILL under load; time until the next start on the same port is ready.
- `overload` seconds at 3 times the rate that 64 waiting clients reach: latency of what is accepted, the rest 429, recovery.
  `--cores` pins its server, and its load to the other cores: sharing them, the load lowers the rate that it is 3 times of. Void for
  a tiny model, whose rate the load does not reach.

What it does not look at: several machines, TLS, proxies, other routes than /embed. Bytes that the server never read before it ended
(a request sent to a connection that is just being closed) are not accepted requests; they are counted as `unread`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.http_client import Broken, Connection, NotConnected, Server
from bertopt.system import environment
from campaigns.serve_known import CLIENTS, Known
from campaigns.serve_overload import overload

WARM_REQUESTS = 1000
#: Seconds after which an answer counts as lost.
ANSWER_S = 60.0


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
    rows = [_restart(command, known, folder / f"restart-{number}.log", rng) for number in range(times)]
    bad = [row for row in rows if row["lost"] or row["partial"] or row["wrong"] or row["exit_code"] or row["said"] or not row["accepted"]]
    total = {name: sum(row[name] for row in rows) for name in ("accepted", "lost", "unread", "partial", "wrong")}
    return {"restarts": times, **total, "bad": bad, "holds": not bad}


def _restart(command: list[str], known: Known, log: Path, rng: random.Random) -> dict[str, Any]:
    """Return what became of the requests to a server that is stopped under load."""
    server = Server([*command, "--drain", str(rng.choice((0, 0.2))), "--port"], log)
    count: Counter[str] = Counter()
    ids: dict[str, str] = {}

    async def loaded() -> None:
        more = lambda: True  # noqa: E731
        clients = [asyncio.create_task(_client(server.port, known, i, more, count, False, ids)) for i in range(16)]
        await asyncio.sleep(0.5 + rng.random())
        server.process.send_signal(signal.SIGTERM)
        await asyncio.gather(*clients)

    asyncio.run(loaded())
    # A second signal would end it without grace.
    code, lines = server.wait(), log.read_text().splitlines()
    log.unlink()
    answered = [entry["request_id"] for line in lines if line.startswith("{") for entry in [json.loads(line)] if entry["path"] == "/embed"]
    lost = [name for name in answered if ids.get(name) != "right"]
    said = [line for line in lines if "Traceback" in line or "ancel" in line]
    return {"accepted": len(answered), "lost": len(lost), "unread": count["unanswered"], "refused": count["refused"],
            "partial": count["partial"], "wrong": sum(many for name, many in count.items() if name.startswith("wrong")),
            "exit_code": code, "said": said[:3]}  # fmt: skip


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
        problems = []
        for part, run in parts.items():
            if getattr(arguments, part.split("_")[0]):
                result = {"artefact": what, "environment": environment.describe(), **run()}
                print(part, json.dumps({key: value for key, value in result.items() if key != "environment"}), flush=True)
                if result.get("void"):
                    problems.append(f"{part} is void, since its requests were sent too late: give a larger model with --artifact, and --cores")
                elif not result["holds"]:
                    problems.append(f"does not hold: {part}")
                kept = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {}
                arguments.out.write_text(json.dumps({**kept, part: result}, indent=2) + "\n")
    if problems:
        sys.exit("; ".join(problems))


if __name__ == "__main__":
    main()
