"""What a process has been told by its environment, or by a user's code, before it opens an artefact."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bertopt.errors import Unsupported
from bertopt.modeling import source
from bertopt.system import environment
from bertopt.workers.client import Workers
from tests.support.artefacts import write_artefact
from tests.support.tiny_models import Tiny

ROOT = Path(__file__).parents[3]


def run(code: str, artefact: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new interpreter with these variables, with `artefact` as its argument."""
    path = [str(ROOT), *(p for p in sys.path if p)]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "2", **environment}
    return subprocess.run([sys.executable, "-c", code, str(artefact)], capture_output=True, text=True, env=variables, check=False)


LOAD = """
import sys, bertopt
try:
    bertopt.load(sys.argv[1])
except bertopt.BertoptError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def test_without_docstrings(tiny: Tiny, tmp_path: Path) -> None:
    """An intact artefact was said to be damaged: transformers builds docstrings when its models are imported."""
    done = run(LOAD, write_artefact(tiny(), tmp_path / "artefact", "eager"), PYTHONOPTIMIZE="2")
    assert (done.returncode, done.stderr.splitlines()[-1:]) == (
        4, ["transformers cannot import its models without their docstrings, which python -OO drops; unset PYTHONOPTIMIZE, or leave out -OO"],
    )  # fmt: skip
    assert not run(LOAD, write_artefact(tiny(), tmp_path / "onnx"), PYTHONOPTIMIZE="2").returncode


@pytest.mark.parametrize("name", ["HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"])
def test_seconds_of_the_hub_that_are_no_whole_number(name: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers imports the hub's client, which imports with a ValueError: an intact artefact was said to be damaged, and runs ended as by a bug."""
    message = f"{name} must be a whole number of seconds, or huggingface_hub cannot be imported; got '0.5': change or unset it"
    done = run(LOAD, write_artefact(tiny(), tmp_path / "artefact", "eager"), **{name: "0.5"})
    assert (done.returncode, done.stderr.splitlines()[-1:]) == (4, [message])
    monkeypatch.setenv(name, "0.5")
    for look in (source.resolve, source.examine_here):
        with pytest.raises(Unsupported, match=f"{name} must be a whole number"):
            look("nobody/nothing")
    # Workers import transformers ahead, whether or not they need it.
    monkeypatch.setattr(environment, "check_hub_variables", lambda: None)
    with Workers() as workers, workers.start() as worker:
        assert worker.call("device")
