"""Open-loop load on servers: Poisson arrivals at rising rates, each latency from when the request was due.

    python -m benchmarks.serve --prepare                                               # once: the peers' environment, in .peers
    python -m benchmarks.serve --artifact DIR [--checkpoint DIR] [--minutes 6] [--out FILE]

Contenders, each in its own process, one after the other, given the same requests: `bertopt serve` with the artefact; and with
`--checkpoint`, sentence-transformers behind FastAPI, behind LitServe and behind Ray Serve with their batching
(`--backend openvino --file-name F` for their ONNX or OpenVINO backends), and infinity-emb with torch. For each: its rate with 64 waiting clients of one text (saturation), the latency of one
client, then Poisson arrivals of 1 to 16 built-in texts of natural length at rising parts of what it can take, until two in a row are beyond twice the limit.

A request is sent when it is due whether or not earlier ones were answered, and timed from then, so that a stall counts against
every request behind it (no coordinated omission). `held` is the highest rate at which p99 kept the limit, no request failed, and the load
itself was sent in time. p99 is of fewer requests than 1,000 where the time is short; `requests` says how many.
`--minutes` is divided evenly among contenders; low rates take longer, for 100 requests or `--longest` seconds. The load shares the machine: `--cores 0,1` pins the servers, the client gets the others.
The offline rate is `bertopt.load` on the same texts, in a process pinned alike, before and after `bertopt serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.http_client import Connection, Server
from benchmarks.peers import environments
from benchmarks.peers.servers import PROGRAMS
from bertopt.checks import probes
from bertopt.report.svg import Svg, log_axis
from bertopt.system import atomic_write, environment

ROOT = Path(__file__).parent.parent
CLIENTS, MIXED_CLIENTS = 64, 16
#: A request that takes longer is an error: it bounds the end of each part.
TIMEOUT_S = 20
#: Parts of the rate of mixed requests from 16 clients that are tried, from the lowest on until `MISSES` in a row are beyond `BEYOND`
#: times the limit: a machine that was idle answers a lone request later than one of several.
SHARES = (0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 0.7)
MISSES, BEYOND = 2, 2.0
#: A rate is offered until this many requests were due, but no longer than `--longest`.
REQUESTS = 100

OFFLINE = """
import json, sys, time
import bertopt
texts = json.load(open(sys.argv[2]))
predict = bertopt.load(sys.argv[1])
predict(texts[:64])
start, done = time.perf_counter(), 0
while time.perf_counter() - start < float(sys.argv[3]):
    predict(texts)
    done += len(texts)
rate, alone, start = done / (time.perf_counter() - start), [], time.perf_counter()
while time.perf_counter() - start < float(sys.argv[3]) / 2:
    begun = time.perf_counter()
    predict([texts[len(alone) % len(texts)]])
    alone.append((time.perf_counter() - begun) * 1e3)
print(json.dumps({"texts_s": rate, "one_text_p50_ms": sorted(alone)[len(alone) // 2]}))
"""


@dataclass(frozen=True)
class Contender:
    """How a server is started, all but its port; where it takes texts, and the field they stand in."""

    command: list[str]
    route: str = "/embed"
    field: str = "inputs"

    def request(self, rng: random.Random, texts: list[str], most: int) -> tuple[int, bytes]:
        chosen = rng.choices(texts, k=rng.randint(1, most))
        return len(chosen), json.dumps({self.field: chosen, "model": "model"}).encode()

    async def send(self, connection: Connection, body: bytes) -> bool:
        try:
            return (await asyncio.wait_for(connection.post(self.route, body), TIMEOUT_S)).status == 200
        except (TimeoutError, ConnectionError):
            return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--prepare", action="store_true", help="build the peers' environment, and end")
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers", help="folder of the peers' environment")
    parser.add_argument("--backend", choices=("torch", "onnx", "openvino"), default="torch", help="of sentence-transformers")
    parser.add_argument("--file-name", default="-", help="of the checkpoint's model for that backend")
    parser.add_argument("--torch-checkpoint", type=Path, help="the checkpoint for infinity-emb; left out without it")
    parser.add_argument("--minutes", type=float, default=6.0, help="of load, all contenders together")
    parser.add_argument("--longest", type=float, default=120.0, help="seconds of one rate at most")
    parser.add_argument("--limit-ms", type=float, default=50.0, help="p99 that a rate must keep")
    parser.add_argument("--cores", help="cores of the servers, such as 0,1; the load runs on the others")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.prepare:
        for name in ("serving", "infinity"):
            environments.environment(name, arguments.peers)
        return
    if arguments.artifact is None:
        parser.error("give --artifact DIR, or --prepare")
    with tempfile.TemporaryDirectory(prefix="bertopt-serve-") as made:
        folder = Path(made)
        contenders = {"bertopt": Contender([sys.executable, "-m", "bertopt", "serve", str(arguments.artifact), "--log-level", "warning", "--port"])}
        if arguments.checkpoint:
            contenders |= _peers(arguments, folder)
        pinned = sorted(int(core) for core in arguments.cores.split(",")) if arguments.cores else []
        texts = [text for text in probes.built_in_texts() if text]
        part = arguments.minutes * 60 / len(contenders) / (len(SHARES) + 3)
        rows, offline = {}, [_offline(arguments.artifact, texts, folder, part, pinned)]
        for name, contender in contenders.items():
            rows[name] = _contender(contender, texts, part, arguments.longest, arguments.limit_ms, folder, pinned)
            print(name, json.dumps(rows[name]), flush=True)
            if name == "bertopt":
                offline.append(_offline(arguments.artifact, texts, folder, part, pinned))
        found = {"environment": environment.describe(), "limit_ms": arguments.limit_ms, "seconds_each": part, "cores": pinned, "backend": arguments.backend,
                 "offline": {key: statistics.mean(one[key] for one in offline) for key in offline[0]}, "servers": rows}  # fmt: skip
    print(table(found))
    if arguments.out:
        atomic_write.write(arguments.out, json.dumps(found, indent=2) + "\n")
        atomic_write.write(arguments.out.with_suffix(".svg"), picture(found))


def _peers(arguments: argparse.Namespace, folder: Path) -> dict[str, Contender]:
    pythons = {name: arguments.peers / name / "bin" / "python" for name in ("serving", "infinity")}
    for python in pythons.values():
        if not python.exists():
            sys.exit(f"'{python}' is missing: run `python -m benchmarks.serve --prepare` first")
    found = {}
    for peer, program in PROGRAMS.items():
        file = folder / f"{peer.replace(' ', '_').lower()}_server.py"
        file.write_text(program)
        words = [str(pythons["serving"]), str(file), str(arguments.checkpoint), arguments.backend, arguments.file_name]
        found[f"sentence-transformers behind {peer}"] = Contender(words)
    if arguments.torch_checkpoint is None:
        return found
    infinity = [str(pythons["infinity"].with_name("infinity_emb")), "v2", "--model-id", str(arguments.torch_checkpoint), "--served-model-name", "model",
                "--engine", "torch", "--device", "cpu", "--no-bettertransformer", "--port"]  # fmt: skip
    return {**found, "infinity-emb, torch": Contender(infinity, "/embeddings", "input")}


def table(found: dict[str, Any]) -> str:
    """Return the Markdown table of a result."""
    lines = [f"| server | one client, p50 | 64 clients, texts/s | texts/s with p99 ≤ {found['limit_ms']:g} ms | memory |", "| :-- | --: | --: | --: | --: |"]
    for name, row in found["servers"].items():
        held = "none" if row["held_texts_s"] is None else f"{row['held_texts_s']:.0f}"
        failed = f" ({row['errors']:,} requests failed)" if row["errors"] else ""
        lines.append(f"| {name} | {row['one_client_p50_ms']:.1f} ms | {row['saturated_texts_s']:.0f}{failed} | {held} | {row['memory_mb']:.0f} MB |")
    offline, ours = found["offline"], found["servers"]["bertopt"]["saturated_texts_s"] / found["offline"]["texts_s"]
    return "\n".join([
        *lines, "", f"64 clients reach {ours:.2f} of the {offline['texts_s']:.0f} texts/s that bertopt.load reaches offline; a text alone takes it "
        f"{offline['one_text_p50_ms']:.1f} ms. {_where(found['cores'])}",
    ])  # fmt: skip


def _where(cores: list[int]) -> str:
    return f"The servers have {len(cores)} core(s), the load the others." if cores else "The load shares the servers' cores."


def picture(found: dict[str, Any]) -> str:
    """Return an SVG of each server's 99th percentile at each rate; a line marks the limit."""
    limit, left, step = found["limit_ms"], 300, 18
    rows = [row for server in found["servers"].values() for row in server["rates"]]
    axis = log_axis([limit, *(row["p99_ms"] or float("inf") for row in rows)], left, 880)
    svg = Svg(900, "99th percentile of the latency by offered load, ms")
    bottom = 30.0 + sum(26 + step * len(server["rates"]) for server in found["servers"].values())
    axis.draw(svg, 24, bottom)
    svg.line(axis.at(limit), 24, axis.at(limit), bottom, "whisker")
    y = 30.0
    for name, server in found["servers"].items():
        svg.name(0, y + 14, name, left - 12, "strong")
        y += 22
        for row in server["rates"]:
            svg.text(left - 12, y + 12, f"{row['texts_s']:.0f} texts/s", "soft", end=True)
            late = row["errors"] or (row["p99_ms"] or float("inf")) > limit
            svg.rect(left, axis.at(row["p99_ms"] or float("inf")), y + 2, step - 6, "base" if late else "best")
            y += step
        y += 4
    return svg.finish(bottom + 6, alone=True)


def _contender(
    contender: Contender, texts: list[str], seconds: float, longest: float, limit_ms: float, folder: Path, cores: list[int]
) -> dict[str, Any]:  # fmt: skip
    everything = os.sched_getaffinity(0)
    try:
        if cores:
            os.sched_setaffinity(0, cores)  # the server inherits it
        server = Server(contender.command, folder / "log")
        if cores:
            os.sched_setaffinity(0, everything - set(cores) or everything)
        try:
            asyncio.run(_closed(contender, server.port, CLIENTS, min(seconds, 5.0), texts))
            alone = asyncio.run(_closed(contender, server.port, 1, seconds, texts))
            full = asyncio.run(_closed(contender, server.port, CLIENTS, seconds, texts))
            most = asyncio.run(_closed(contender, server.port, MIXED_CLIENTS, seconds / 2, texts, 16))
            rows: list[dict[str, Any]] = []
            for share in SHARES:
                rate = share * most["requests_s"]
                rows.append(asyncio.run(_open(contender, server.port, rate, min(max(seconds, REQUESTS / rate), longest), texts)))
                if len(rows) >= MISSES and not any(_keeps(row, BEYOND * limit_ms) for row in rows[-MISSES:]):
                    break
            memory = server.rss_mb()
        finally:
            server.end()
    finally:
        os.sched_setaffinity(0, everything)
    held = [row["texts_s"] for row in rows if _keeps(row, limit_ms)]
    return {"ready_s": round(server.ready_s, 2), "one_client_p50_ms": alone["p50_ms"], "saturated_texts_s": full["texts_s"], "held_texts_s": max(held, default=None),
            "errors": alone["errors"] + full["errors"], "memory_mb": memory, "mixed": most, "rates": rows}  # fmt: skip


def _keeps(row: dict[str, Any], limit_ms: float) -> bool:
    return not row["errors"] and (row["p99_ms"] or 1e9) <= limit_ms and row["late_p99_ms"] <= limit_ms / 5


async def _closed(contender: Contender, port: int, clients: int, seconds: float, texts: list[str], most: int = 1) -> dict[str, Any]:
    """Clients that send one request after the other."""
    latencies: list[float] = []
    answered = errors = 0
    start = time.perf_counter()

    async def client(seed: int) -> None:
        nonlocal answered, errors
        rng, connection = random.Random(seed), Connection(port)
        while time.perf_counter() - start < seconds:
            count, body = contender.request(rng, texts, most)
            begun = time.perf_counter()
            if await contender.send(connection, body):
                latencies.append((time.perf_counter() - begun) * 1e3)
                answered += count
            else:
                errors += 1
        connection.close()

    await asyncio.gather(*(client(seed) for seed in range(clients)))
    taken = time.perf_counter() - start
    return {"requests_s": len(latencies) / taken, "texts_s": answered / taken, "p50_ms": statistics.median(latencies or [float("nan")]), "errors": errors}


async def _open(contender: Contender, port: int, rate: float, seconds: float, texts: list[str]) -> dict[str, Any]:
    """Requests that are due at random times, `rate` a second."""
    rng = random.Random(0)
    latencies: list[float] = []
    late: list[float] = []
    idle: list[Connection] = []
    answered = errors = 0

    async def send(due: float, count: int, body: bytes) -> None:
        nonlocal answered, errors
        connection = idle.pop() if idle else Connection(port)
        late.append((time.perf_counter() - due) * 1e3)
        if await contender.send(connection, body):
            latencies.append((time.perf_counter() - due) * 1e3)
            answered += count
        else:
            errors += 1
        idle.append(connection)

    start, due, tasks = time.perf_counter(), 0.0, []
    while (due := due + rng.expovariate(rate)) < seconds:
        count, body = contender.request(rng, texts, 16)
        await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
        tasks.append(asyncio.create_task(send(start + due, count, body)))
    await asyncio.gather(*tasks)
    taken = time.perf_counter() - start
    for connection in idle:
        connection.close()
    return {"rate": rate, "requests": len(tasks), "errors": errors, "texts_s": answered / taken, "p50_ms": _quantile(latencies, 0.5),
            "p99_ms": _quantile(latencies, 0.99), "late_p99_ms": _quantile(late, 0.99) or 0.0}  # fmt: skip


def _quantile(values: list[float], share: float) -> float | None:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else None


def _offline(artifact: Path, texts: list[str], folder: Path, seconds: float, cores: list[int]) -> dict[str, float]:
    file = folder / "texts.json"
    file.write_text(json.dumps(texts))
    command = [sys.executable, "-c", OFFLINE, str(artifact), str(file), str(seconds)]
    pin = ["taskset", "-c", ",".join(map(str, cores))] if cores else []
    found: dict[str, float] = json.loads(subprocess.run([*pin, *command], capture_output=True, text=True, check=True).stdout)
    return found


if __name__ == "__main__":
    main()
