"""Running an artefact needs no torch, transformers, optimum or requests: every process here refuses to import them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import bertopt
from tests.support.artefacts import write_artefact
from tests.support.tiny_models import Tiny

ROOT = Path(__file__).parents[3]
REFUSED = ("torch", "transformers", "optimum", "requests", "scipy", "onnx", "onnx_ir", "onnxscript", "nncf")
#: Imported by every Python process that finds it, workers included.
SITECUSTOMIZE = f"""
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {REFUSED!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (refused)", name=name)

sys.meta_path.insert(0, Refuse())
"""
PREDICT = """
import json, sys
import bertopt
from bertopt.errors import Unsupported

onnx, openvino, eager = sys.argv[1:]
found = [bertopt.load(directory)(["a cat sat", "the dog"]).tolist() for directory in (onnx, openvino)]
try:
    bertopt.load(eager)
except Unsupported as error:
    print(json.dumps([*found, str(error)]))
"""


@pytest.fixture(scope="module")
def artefacts(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    pytest.importorskip("openvino")
    folder, source = tmp_path_factory.mktemp("artefacts"), tiny(task="feature-extraction", pooling="mean")
    return [
        write_artefact(source, folder / "onnx", "onnx"), write_artefact(source, folder / "openvino", "openvino"),
        write_artefact(source, folder / "eager", "eager"),
    ]  # fmt: skip


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    paths = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip


def test_onnx_and_openvino_artefacts_are_loaded_and_run(artefacts: list[Path], tmp_path: Path) -> None:
    done = call(tmp_path, "-c", PREDICT, *map(str, artefacts))
    assert done.returncode == 0, done.stderr
    onnx, openvino, refusal = json.loads(done.stdout)
    expected = bertopt.load(artefacts[0])(["a cat sat", "the dog"])
    assert np.array_equal(np.array(onnx, np.float32), expected)
    assert np.abs(np.array(openvino) - expected).max() < 1e-4
    assert "this needs torch" in refusal and "pip install 'bertopt[cpu]'" in refusal


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_commands_on_an_artefact_work(command: str, artefacts: list[Path], tmp_path: Path) -> None:
    for directory in artefacts[:2]:
        done = call(tmp_path, "-m", "bertopt", command, str(directory))
        assert done.returncode == 0, done.stderr


def test_what_needs_torch_says_which_extra_brings_it(artefacts: list[Path], tiny: Tiny, tmp_path: Path) -> None:
    export = ["export", "torch_cpu", "--set", f"model={tiny()}", "--set", "inputs.shapes=[[1, 16]]"]
    for arguments in (["verify", str(artefacts[0]), "--against", str(tiny())], export):
        done = call(tmp_path, "-m", "bertopt", *arguments)
        assert done.returncode == 4, done.stderr
        assert "Traceback" not in done.stderr and "pip install 'bertopt[cpu]'" in done.stdout + done.stderr
