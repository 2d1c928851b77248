"""Open-loop load on servers: Poisson arrivals at rising rates, each latency from when the request was due.

    python -m benchmarks.serve --artifact DIR [--checkpoint DIR] [--rates 20 50 100] [--seconds 20] [--out FILE]

Serves the artefact with `bertopt serve` and, with `--checkpoint`, the checkpoint with sentence-transformers behind FastAPI (needs
fastapi), each in a separate process, and sends both the same requests: 1 to 16 built-in texts of natural length. A request is
sent when it is due whether or not earlier ones were answered, and timed from then, so that a stall counts against every request
behind it (no coordinated omission). Reported for each rate: p50, p99 (from 1,000 requests on), texts/s, and errors; nothing here decides
which cores a process has: use taskset.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bertopt.checks import probes
from bertopt.system import environment

#: A peer as its users write it: one endpoint, the library's own batching of one request.
PEER = """
import sys
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer

class Body(BaseModel):
    inputs: list[str]

app, model = FastAPI(), SentenceTransformer(sys.argv[1], device="cpu")

@app.get("/health")
def health() -> None: ...

@app.post("/embed")
def embed(body: Body) -> list[list[float]]:
    return model.encode(body.inputs, normalize_embeddings=True).tolist()

uvicorn.run(app, port=int(sys.argv[2]), log_level="error")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--rates", type=float, nargs="+", default=[20.0, 50.0, 100.0], help="requests a second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--limit-ms", type=float, default=50.0, help="p99 that a rate must keep")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    commands = {"bertopt": ["-m", "bertopt", "serve", str(arguments.artifact), "--log-level", "warning", "--port"]}
    if arguments.checkpoint:
        commands["sentence-transformers behind FastAPI"] = ["-c", PEER, str(arguments.checkpoint)]
    rows = [row for name, command in commands.items() for row in _series(name, command, arguments)]
    found = {"environment": environment.describe(), "seconds": arguments.seconds, "rows": rows}
    for row in rows:
        print(json.dumps(row))
    for name in commands:
        good = [row["rate"] for row in rows if row["server"] == name and row["p99_ms"] is not None and row["p99_ms"] <= arguments.limit_ms]
        print(f"{name}: highest rate with p99 of at most {arguments.limit_ms:g} ms: {max(good, default='none')}")
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")


def _series(name: str, command: list[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    import httpx

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    server = subprocess.Popen([sys.executable, *command, str(port)], env=os.environ)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 300
        while True:
            try:
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{name} did not start") from None
                time.sleep(0.2)
        asyncio.run(_load(url, 5.0, 2.0))
        rows = []
        for rate in arguments.rates:
            rows.append({"server": name, "rate": rate, **asyncio.run(_load(url, rate, arguments.seconds))})
        return rows
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


async def _load(url: str, rate: float, seconds: float) -> dict[str, Any]:
    """Send requests at `rate` a second; return what their latencies were."""
    import httpx
    import numpy as np

    rng = random.Random(0)
    texts = [text for text in probes.built_in_texts() if isinstance(text, str) and text]
    latencies: list[float] = []
    answered = errors = 0
    limits = httpx.Limits(max_connections=1000, max_keepalive_connections=1000)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:

        async def send(due: float, inputs: list[str]) -> None:
            nonlocal answered, errors
            try:
                answer = await client.post("/embed", json={"inputs": inputs})
                good = answer.status_code == 200
            except httpx.HTTPError:
                good = False
            if good:
                latencies.append((time.perf_counter() - due) * 1e3)
                answered += len(inputs)
            else:
                errors += 1

        start, due, tasks = time.perf_counter(), 0.0, []
        while (due := due + rng.expovariate(rate)) < seconds:
            await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
            tasks.append(asyncio.create_task(send(start + due, rng.choices(texts, k=rng.randint(1, 16)))))
        await asyncio.gather(*tasks)
        taken = time.perf_counter() - start
    p50 = float(np.median(latencies)) if latencies else None
    p99 = float(np.percentile(latencies, 99)) if len(latencies) >= 1000 else None
    return {"requests": len(tasks), "errors": errors, "texts_per_s": answered / taken, "p50_ms": p50, "p99_ms": p99}


if __name__ == "__main__":
    main()
