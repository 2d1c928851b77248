"""The campaigns of faults in short: `python -m campaigns.faults.NAME` runs each at its full size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import readme
from campaigns.faults import outcome

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "times"), [("kills", 1), ("tampering", 70), ("disk", 4), ("memory", 2), ("concurrency", 1)])
def test_a_campaign_in_short(name: str, times: int, tmp_path: Path) -> None:
    """In a process of its own: campaigns make checks cheaper and fork, where pytest's threads of torch would be missing."""
    figures = tmp_path / "faults.json"
    command = [sys.executable, "-m", f"campaigns.faults.{name}", "--times", str(times), "--json", str(figures)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    found = json.loads(figures.read_text("utf-8"))["campaigns"][name]
    assert sum(found["tried"].values()) >= times and found["right"] == found["tried"] and not found["problems"]


def test_what_went_wrong_is_counted_and_kept(tmp_path: Path) -> None:
    result = outcome.Outcome()
    result.count("kills")
    result.count("kills", "a stage is damaged")
    result.notes["slowest, CPU seconds"] = 0.5
    outcome.keep(tmp_path / "faults.json", "kills", result, 3, {})
    outcome.keep(tmp_path / "faults.json", "disk", outcome.Outcome(), 0, {})
    found = json.loads((tmp_path / "faults.json").read_text())
    assert set(found["campaigns"]) == {"kills", "disk"}
    assert found["campaigns"]["kills"]["problems"] == ["kills: a stage is damaged"]
    outcome.keep(tmp_path / "faults.json", "kills", result, 3, found["campaigns"]["kills"])
    again = json.loads((tmp_path / "faults.json").read_text())["campaigns"]["kills"]
    assert again["tried"] == {"kills": 4} and again["right"] == {"kills": 2} and len(again["parts"]) == 2
    page = readme.faults(found)
    assert "| `kills` | kills | 2 | 1 |" in page and "kills 0.5 s of CPU time" in page
