"""The application in a fork, as gunicorn's `preload_app` makes them: the threads that run batches are missing there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.unit.serve.conftest import Artefact

ROOT = Path(__file__).parents[3]

PRELOADED = """
import asyncio, os, sys
from pathlib import Path
import httpx
from bertopt.errors import UsageError
from bertopt.serve.app import create
from bertopt.serve.settings import Settings

app = create({"m": Path(sys.argv[1])}, Settings(timeout_s=20))

async def statuses():
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as client:
        return (await client.post("/embed", json={"inputs": "the cat"})).status_code, (await client.get("/health")).status_code

async def started():
    async with app.router.lifespan_context(app):
        return True

child = os.fork()
if not child:
    try:
        asyncio.run(started())
    except UsageError as error:
        print(error, flush=True)
        if asyncio.run(statuses()) == (500, 503):
            os._exit(0)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert asyncio.run(statuses()) == (200, 200) and asyncio.run(started())
"""


def test_a_fork_of_a_process_that_made_the_application_does_not_start_it(artefact: Artefact) -> None:
    """It was ready, and no request was ever answered."""
    ended = subprocess.run([sys.executable, "-c", PRELOADED, str(artefact())], cwd=ROOT, timeout=240, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "make the application after the fork (gunicorn: without preload_app)" in ended.stdout
