"""The campaigns of faults in short: `python -m campaigns.faults.NAME` runs each at its full size."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import campaign_tables
from campaigns.faults import outcome, power

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "times"), [("kills", 1), ("power", 2), ("tampering", 70), ("disk", 4), ("memory", 2), ("concurrency", 1)])
def test_a_campaign_in_short(name: str, times: int, tmp_path: Path) -> None:
    """In a process of its own: campaigns make checks cheaper and fork, where pytest's threads of torch would be missing."""
    figures = tmp_path / "faults.json"
    command = [sys.executable, "-m", f"campaigns.faults.{name}", "--times", str(times), "--json", str(figures)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    found = json.loads(figures.read_text("utf-8"))["campaigns"][name]
    assert sum(found["tried"].values()) >= times and found["right"] == found["tried"] and not found["problems"]


def test_a_power_cut_loses_what_was_not_kept_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    names = ("kept", "never kept", "changed after", "renamed and kept", "renamed")
    for name in names:
        (out / name).write_text("content")
    log = [synced(out / name) for name in ("kept", "changed after", "renamed and kept", "renamed")]
    (out / "changed after").write_text("content, longer")
    log += [f"rename\t{out / 'before'}\t{out / 'renamed and kept'}\t0", synced(out), f"rename\t{out / 'part'}\t{out / 'renamed'}\t0"]
    rng = random.Random(0)
    rng.random = lambda: 0.0  # type: ignore[method-assign]
    lost, undone = power.cut(out, "\n".join(log), rng)
    assert (lost, undone) == (2, 1)
    content = {path.name: path.read_text() for path in out.iterdir()}
    assert content.keys() == {"kept", "never kept", "changed after", "renamed and kept", "part"}
    assert content["kept"] == content["renamed and kept"] == content["part"] == "content"
    assert content["never kept"] != "content" and content["changed after"] != "content, longer"


def synced(path: Path) -> str:
    seen = path.stat()
    return f"fsync\t{seen.st_dev}\t{seen.st_ino}\t{seen.st_mtime_ns}\t{seen.st_size}"


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
    page = campaign_tables.faults(found)
    assert "| `kills` | kills | 2 | 1 |" in page and "kills 0.5 s of CPU time" in page
