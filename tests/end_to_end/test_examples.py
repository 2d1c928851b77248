"""Every example runs as a user would run it, on a tiny checkpoint; what would be timed for seconds is hardly timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.shared_workers import cheap_workers
from tests.support.tiny_models import Tiny

EXAMPLES = Path(__file__).parents[2] / "examples"
#: Runs an example with timing that takes no time: nothing here looks at it.
UNTIMED = """
import runpy, sys
from bertopt.checks import latency
from bertopt.pipeline.race import Budget
latency.TURN_MS = 1.0
Budget.of = lambda _: Budget(0.0, 0.0, min_rounds=3)
del sys.argv[0]
sys.path[0] = sys.argv[0].rpartition("/")[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(script: str, *arguments: str, cwd: Path, untimed: bool = False) -> str:
    done = subprocess.run(
        [sys.executable, *(("-c", UNTIMED) if untimed else ()), EXAMPLES / script, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        # The delivered copy runs on more threads than there are cores, which would spin.
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_WAIT_POLICY": "PASSIVE"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def ran(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    cwd = tmp_path_factory.mktemp("examples")
    return cwd, run("run_recipe.py", str(tiny()), cwd=cwd, untimed=True)


def test_run_recipe(ran: tuple[Path, str]) -> None:
    assert "delivered: fuse_ort" in ran[1]


def test_classify_with_its_artefact(ran: tuple[Path, str]) -> None:
    out = run("classify.py", "out/run_recipe/artifact", "a good film", cwd=ran[0])
    assert out.startswith("a good film → {'label': ")


def test_compose_passes(tiny: Tiny, tmp_path: Path) -> None:
    out = run("compose_passes.py", str(tiny()), cwd=tmp_path)
    assert float(out.rsplit(": ", 1)[1]) < 1e-4


def test_own_pass(tiny: Tiny, tmp_path: Path) -> None:
    assert run("own_pass.py", str(tiny()), cwd=tmp_path, untimed=True).startswith("ok {'projections': 2}")


def test_look_inside(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The notebook's cells, one after the other; IPython shows nothing here."""
    display = SimpleNamespace(IFrame=lambda source, **_: Path(source).read_text("utf-8"))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None, display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    notebook = json.loads((EXAMPLES / "look_inside.ipynb").read_text("utf-8"))
    names: dict[str, Any] = {"__name__": "notebook"}
    with cheap_workers("pipeline", "commands.profile"):
        monkeypatch.setenv("BERTOPT_MODEL", str(tiny()))
        monkeypatch.chdir(tmp_path)
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                assert not cell["outputs"]
                exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    assert len(names["answers"]) == 2
    assert {"layer 0", "layer 1"} <= set(names["profiled"].by_layer())
    assert "Attention of the fp32 reference" in (tmp_path / "out" / "look_inside" / "profile.html").read_text("utf-8")
    assert names["report"].exit_code == 0


def test_every_example_is_tested() -> None:
    source = Path(__file__).read_text()
    assert all(f'"{path.name}"' in source for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb"))
