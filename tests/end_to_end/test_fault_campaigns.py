"""The campaigns of faults in short: `python -m campaigns.faults.NAME` runs each at its full size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import readme
from campaigns.faults import concurrency, disk, kills, memory, outcome, tampering


@pytest.mark.slow
@pytest.mark.parametrize(("campaign", "times"), [(kills, 1), (tampering, 70), (disk, 4), (memory, 2), (concurrency, 1)])
def test_a_campaign_in_short(campaign: Any, times: int, tmp_path: Path) -> None:
    result = campaign.run(times, 0, tmp_path)
    assert not result.problems, result.problems
    assert sum(result.tried.values()) >= times


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
