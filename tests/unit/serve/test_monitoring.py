"""Dashboard and alerts name only metrics, and labels, that a scrape shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.support.serving import InProcess
from tests.unit.serve.conftest import Artefact

FOLDER = Path(__file__).parents[3] / "deploy" / "monitoring"
EXPRESSIONS = [
    *(target["expr"] for panel in json.loads((FOLDER / "dashboard.json").read_text())["panels"] for target in panel["targets"]),
    *(rule["expr"] for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"] for rule in group["rules"]),
]
#: What Prometheus itself adds, and what belongs to a histogram.
GIVEN = {"job", "le", "instance"}


@pytest.fixture(scope="module")
def scrape(artefact: Artefact) -> dict[str, set[str]]:
    """The labels of every sample by name, after requests of all kinds."""
    server = InProcess({"tiny": artefact()}, cache_bytes=1 << 20, queue_tokens=100)
    server.together([("/embed", {"inputs": ["a cat", "the dog"]})] * 4)
    server.post("/embed", {"inputs": []})
    metrics = server.state.models["tiny"].metrics
    metrics.refuse("queue_full")
    metrics.drop("timeout")
    text = server.get("/metrics").text
    server.close()
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        if match := re.match(r"(\w+)(?:\{(.*)\})? ", line):
            found.setdefault(match[1], set()).update(re.findall(r'(\w+)="', match[2] or ""))
    return found


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_query_names_what_a_scrape_shows(expression: str, scrape: dict[str, set[str]]) -> None:
    names = set(re.findall(r"(?:bertopt|process)_\w+", expression))
    assert names and names <= scrape.keys(), names - scrape.keys()
    labels = {label for part in re.findall(r"by \(([^)]*)\)", expression) for label in part.split(", ")}
    labels |= {label for part in re.findall(r"\{([^}]*)\}", expression) for label in re.findall(r"(\w+)\s*=~?", part)}
    assert labels - GIVEN <= set().union(*(scrape[name] for name in names))
    assert expression.count("(") == expression.count(")")


def test_names_follow_prometheus_s_conventions(scrape: dict[str, set[str]]) -> None:
    for name in scrape:
        assert name.startswith(("bertopt_", "process_"))
        assert not re.search(r"(milliseconds|_ms|_s|_count_total)$", name), name


def test_every_metric_is_on_the_dashboard(scrape: dict[str, set[str]]) -> None:
    shown = {re.sub(r"_(bucket|sum|count|total)$", "", name) for one in EXPRESSIONS for name in re.findall(r"bertopt_\w+", one)}
    there = {re.sub(r"_(bucket|sum|count|total|created)$", "", name) for name in scrape if name.startswith("bertopt_")}
    assert there == shown
