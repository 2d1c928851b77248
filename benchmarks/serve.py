"""Open-loop load on servers: Poisson arrivals at rising rates, each latency from when the request was due.

    python -m benchmarks.serve --artifact DIR [--checkpoint DIR] [--minutes 6] [--out FILE]

Contenders, each in its own process, one after the other, given the same requests: `bertopt serve` with the artefact; and with
`--checkpoint`, if the packages are there, sentence-transformers behind FastAPI and behind LitServe with its batching
(`--backend openvino` for their ONNX or OpenVINO backends). For each: its rate with 64 waiting clients of one text (saturation), the latency of one
client, then Poisson arrivals of 1 to 16 built-in texts of natural length at rates that are parts of what it can take.

A request is sent when it is due whether or not earlier ones were answered, and timed from then, so that a stall counts against
every request behind it (no coordinated omission). `held` is the highest rate at which p99 kept the limit, no request failed, and the load
itself was sent in time. p99 is of fewer requests than 1,000 where the time is short; `requests` says how many.
The time is divided evenly among contenders; the load shares the machine: `--cores 0,1` pins the servers, the client gets the others.
The offline rate is `bertopt.load` on the same texts, in a process pinned alike.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.http_client import Connection, Server
from bertopt.checks import probes
from bertopt.system import atomic_write, environment

CLIENTS, MIXED_CLIENTS = 64, 16
#: A request that takes longer is an error: it bounds the end of each part.
TIMEOUT_S = 20
#: Parts of the rate of mixed requests from 16 clients that are tried; the last ones are beyond what p99 allows, as a rule.
SHARES = (0.25, 0.4, 0.55, 0.7, 0.85)

FASTAPI = """
import sys
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer

class Body(BaseModel):
    inputs: list[str]

app, model = FastAPI(), SentenceTransformer(sys.argv[1], device="cpu", backend=sys.argv[2])

@app.get("/health")
def health() -> None: ...

@app.post("/embed")
def embed(body: Body) -> list[list[float]]:
    return model.encode(body.inputs, normalize_embeddings=True).tolist()

uvicorn.run(app, port=int(sys.argv[3]), log_level="error")
"""

LITSERVE = """
import sys
import litserve
from sentence_transformers import SentenceTransformer

class Api(litserve.LitAPI):
    def setup(self, device):
        self.model = SentenceTransformer(sys.argv[1], device="cpu", backend=sys.argv[2])
    def decode_request(self, request):
        return request["inputs"]
    def batch(self, inputs):
        return inputs
    def predict(self, batch):
        vectors = self.model.encode([text for texts in batch for text in texts], normalize_embeddings=True)
        ends, place = [], 0
        for texts in batch:
            ends.append(vectors[place : place + len(texts)])
            place += len(texts)
        return ends
    def unbatch(self, output):
        return output
    def encode_response(self, output):
        return output.tolist()

if __name__ == "__main__":
    api = Api(max_batch_size=32, batch_timeout=0.005, api_path="/embed")
    litserve.LitServer(api, accelerator="cpu", devices=1).run(port=int(sys.argv[3]), generate_client_file=False, log_level="error")
"""

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
print(done / (time.perf_counter() - start))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--backend", choices=("torch", "onnx", "openvino"), default="torch", help="of sentence-transformers")
    parser.add_argument("--minutes", type=float, default=6.0, help="of load, all contenders together")
    parser.add_argument("--limit-ms", type=float, default=50.0, help="p99 that a rate must keep")
    parser.add_argument("--cores", help="cores of the servers, such as 0,1; the load runs on the others")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bertopt-serve-") as name:
        folder = Path(name)
        commands = {"bertopt": ["-m", "bertopt", "serve", str(arguments.artifact), "--log-level", "warning", "--port"]}
        if arguments.checkpoint:
            for peer, module, program in (("FastAPI", "fastapi", FASTAPI), ("LitServe", "litserve", LITSERVE)):
                if importlib.util.find_spec(module) is None:
                    print(f"{peer} is left out: {module} is not installed", flush=True)
                    continue
                file = folder / f"{module}_server.py"
                file.write_text(program)
                commands[f"sentence-transformers behind {peer}"] = [str(file), str(arguments.checkpoint), arguments.backend]
        pinned = sorted(int(core) for core in arguments.cores.split(",")) if arguments.cores else []
        texts = [text for text in probes.built_in_texts() if text]
        part = arguments.minutes * 60 / len(commands) / (len(SHARES) + 3)
        rows = {}
        for contender, command in commands.items():
            rows[contender] = _contender(command, texts, part, arguments.limit_ms, folder, pinned)
            print(contender, json.dumps(rows[contender]), flush=True)
        found = {"environment": environment.describe(), "limit_ms": arguments.limit_ms, "seconds_each": part, "cores": pinned, "backend": arguments.backend,
                 "offline_texts_s": _offline(arguments.artifact, texts, folder, part, pinned), "servers": rows}  # fmt: skip
    print(table(found))
    if arguments.out:
        atomic_write.write(arguments.out, json.dumps(found, indent=2) + "\n")


def table(found: dict[str, Any]) -> str:
    """Return the Markdown table of a result."""
    lines = [f"| server | one client, p50 | 64 clients, texts/s | texts/s with p99 ≤ {found['limit_ms']:g} ms | memory |", "| :-- | --: | --: | --: | --: |"]
    for name, row in found["servers"].items():
        held = "none" if row["held_texts_s"] is None else f"{row['held_texts_s']:.0f}"
        lines.append(f"| {name} | {row['one_client_p50_ms']:.1f} ms | {row['saturated_texts_s']:.0f} | {held} | {row['memory_mb']:.0f} MB |")
    ours = found["servers"]["bertopt"]["saturated_texts_s"] / found["offline_texts_s"]
    return "\n".join([*lines, "", f"64 clients reach {ours:.2f} of the {found['offline_texts_s']:.0f} texts/s that bertopt.load reaches offline."])


def _contender(command: list[str], texts: list[str], seconds: float, limit_ms: float, folder: Path, cores: list[int]) -> dict[str, Any]:
    everything = os.sched_getaffinity(0)
    try:
        if cores:
            os.sched_setaffinity(0, cores)  # the server inherits it
        server = Server(command, folder / "log")
        if cores:
            os.sched_setaffinity(0, everything - set(cores) or everything)
        try:
            asyncio.run(_closed(server.port, CLIENTS, min(seconds, 5.0), texts))
            alone = asyncio.run(_closed(server.port, 1, seconds, texts))
            full = asyncio.run(_closed(server.port, CLIENTS, seconds, texts))
            most = asyncio.run(_closed(server.port, MIXED_CLIENTS, seconds / 2, texts, 16))
            rows = [asyncio.run(_open(server.port, share * most["requests_s"], seconds, texts)) for share in SHARES]
            memory = server.rss_mb()
        finally:
            server.end()
    finally:
        os.sched_setaffinity(0, everything)
    held = [row["texts_s"] for row in rows if not row["errors"] and (row["p99_ms"] or 1e9) <= limit_ms and row["late_p99_ms"] <= limit_ms / 5]
    return {"ready_s": round(server.ready_s, 2), "one_client_p50_ms": alone["p50_ms"], "saturated_texts_s": full["texts_s"], "held_texts_s": max(held, default=None),
            "errors": alone["errors"] + full["errors"], "memory_mb": memory, "mixed": most, "rates": rows}  # fmt: skip


def _request(rng: random.Random, texts: list[str], most: int) -> tuple[int, bytes]:
    inputs = rng.choices(texts, k=rng.randint(1, most))
    return len(inputs), json.dumps({"inputs": inputs}).encode()


async def _send(connection: Connection, body: bytes) -> bool:
    try:
        return (await asyncio.wait_for(connection.post("/embed", body), TIMEOUT_S)).status == 200
    except (TimeoutError, ConnectionError):
        return False


async def _closed(port: int, clients: int, seconds: float, texts: list[str], most: int = 1) -> dict[str, Any]:
    """Clients that send one request after the other."""
    latencies: list[float] = []
    answered = errors = 0
    start = time.perf_counter()

    async def client(seed: int) -> None:
        nonlocal answered, errors
        rng, connection = random.Random(seed), Connection(port)
        while time.perf_counter() - start < seconds:
            count, body = _request(rng, texts, most)
            begun = time.perf_counter()
            if await _send(connection, body):
                latencies.append((time.perf_counter() - begun) * 1e3)
                answered += count
            else:
                errors += 1
        connection.close()

    await asyncio.gather(*(client(seed) for seed in range(clients)))
    taken = time.perf_counter() - start
    return {"requests_s": len(latencies) / taken, "texts_s": answered / taken, "p50_ms": statistics.median(latencies or [float("nan")]), "errors": errors}


async def _open(port: int, rate: float, seconds: float, texts: list[str]) -> dict[str, Any]:
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
        if await _send(connection, body):
            latencies.append((time.perf_counter() - due) * 1e3)
            answered += count
        else:
            errors += 1
        idle.append(connection)

    start, due, tasks = time.perf_counter(), 0.0, []
    while (due := due + rng.expovariate(rate)) < seconds:
        count, body = _request(rng, texts, 16)
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


def _offline(artifact: Path, texts: list[str], folder: Path, seconds: float, cores: list[int]) -> float:
    file = folder / "texts.json"
    file.write_text(json.dumps(texts))
    command = [sys.executable, "-c", OFFLINE, str(artifact), str(file), str(seconds)]
    pin = ["taskset", "-c", ",".join(map(str, cores))] if cores else []
    return float(subprocess.run([*pin, *command], capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    main()
