"""Dashboard and alerts in a real Prometheus that scrapes a running server.

Skipped where there is none (on Debian: `apt-get install prometheus`). It does not show how Grafana draws an answer.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.artefacts import write_artefact
from tests.support.serving import Served, free_port
from tests.support.tiny_models import Tiny

FOLDER = Path(__file__).parents[2] / "deploy" / "monitoring"
QUERIES = [target["expr"] for panel in json.loads((FOLDER / "dashboard.json").read_text())["panels"] for target in panel["targets"]]
#: What no client here brings about.
UNSEEN = "bertopt_dropped_requests_total"

pytestmark = pytest.mark.skipif(not (shutil.which("prometheus") and shutil.which("promtool")), reason="needs prometheus")


def asked(url: str, query: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{url}/api/v1/query", params={"query": query}, timeout=30).json()
    assert answer["status"] == "success", answer
    result: list[dict[str, Any]] = answer["data"]["result"]
    return result


@pytest.fixture(scope="module")
def prometheus(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prometheus that has scraped a server before and after its requests."""
    folder = tmp_path_factory.mktemp("prometheus")
    directory = write_artefact(tiny(task="feature-extraction", pooling="mean"), folder / "tiny")
    served = Served(str(directory), options=("--cache-mb", "1", "--concurrent-requests", "2"))
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    (folder / "prometheus.yml").write_text(json.dumps({
        "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"}, "rule_files": [str(FOLDER / "alerts.yaml")],
        "scrape_configs": [{"job_name": "bertopt", "static_configs": [{"targets": [f"127.0.0.1:{served.port}"]}]}],
    }))  # fmt: skip
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stderr=log, stdout=log)
    try:
        deadline = time.monotonic() + 60
        while not _samples(url) >= 6:
            assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            with httpx.Client(timeout=30) as client, ThreadPoolExecutor(16) as clients:  # answered, refused for its list, and more at once than are taken
                for inputs in (["a cat", "the dog"], [], *[["many words " * 15] * 16] * 30):
                    clients.submit(client.post, f"{served.url}/embed", json={"inputs": inputs})
            time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()
        served.end()


def _samples(url: str) -> int:
    try:
        if httpx.get(f"{url}/-/ready", timeout=30).status_code != 200:
            return 0
        found = asked(url, 'count_over_time(bertopt_requests_total{route="/embed",status="200"}[1m])')
    except httpx.TransportError:
        return 0
    return int(found[0]["value"][1]) if found else 0


def test_every_query_of_the_dashboard_has_an_answer(prometheus: str) -> None:
    silent = [query for query in QUERIES if not asked(prometheus, query.replace("$__rate_interval", "1m").replace("$job", ".*"))]
    assert [query for query in silent if UNSEEN not in query] == []


def test_prometheus_loads_the_alerts(prometheus: str) -> None:
    (group,) = httpx.get(f"{prometheus}/api/v1/rules", timeout=30).json()["data"]["groups"]
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
    by_name = {rule["name"]: rule["state"] for rule in group["rules"]}
    # Requests have been refused, for less than the five minutes that the alert waits.
    assert by_name["BertoptRefuses"] == "pending" and by_name["BertoptNotReady"] == "inactive"


def test_promtool_accepts_the_alerts_and_the_scrape(prometheus: str) -> None:
    subprocess.run(["promtool", "check", "rules", str(FOLDER / "alerts.yaml")], check=True, capture_output=True)
    targets = httpx.get(f"{prometheus}/api/v1/targets", timeout=30).json()["data"]["activeTargets"]
    scrape = httpx.get(targets[0]["scrapeUrl"], timeout=30).text
    found = subprocess.run(["promtool", "check", "metrics"], input=scrape, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
