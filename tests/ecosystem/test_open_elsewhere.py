"""Delivered portable artefacts open in sentence-transformers, optimum and optimum-intel, and answer there as in bertopt.

`make ecosystem` runs this. Each library runs in an environment that is built from the pins of benchmarks/peers, which needs
a package index, a few GB and minutes the first time; so `make test` leaves it out. OpenVINO computes in float32 here, as
bertopt does: by itself it takes bfloat16 on CPUs that have it. Not looked at: speed, long texts, other versions than those pinned.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bertopt
from benchmarks.peers import environments
from tests.support.tiny_models import TASKS, Tiny, add_dense, write_tiny

ROOT = Path(__file__).parents[2]
PEERS = Path(os.environ.get("BERTOPT_PEERS", ROOT / ".peers"))
SCRIPT = Path(__file__).with_name("open_elsewhere.py")
TEXTS = ["the cat sat on the mat .", "it was not a very good film", "a dog"]
STEPS = {"onnx": ["use_sdpa", "export_onnx"], "openvino": ["use_sdpa", "export_onnx", "convert_openvino"]}


def delivered(out: Path, model: Path, form: str, *more: dict[str, Any], **options: Any) -> Path:
    steps: list[dict[str, Any]] = [{"pass": name} for name in STEPS[form]]
    steps[-1] |= options
    recipe = {
        "schema_version": 1, "model": str(model), "device": "cpu", "steps": [*steps, *more],
        "inputs": {"shapes": [[1, 8]]}, "timing": {"quick": True},
    }  # fmt: skip
    report = bertopt.run(recipe, out)
    assert report.delivered is not None, report.reason
    return out / report.delivered.path


def elsewhere(library: str, form: str, directory: Path, task: str, texts: list[Any]) -> Any:
    python = environments.environment(form, PEERS)
    call = json.dumps({"library": library, "form": form, "directory": str(directory), "task": task, "texts": texts})
    done = subprocess.run(
        [python, SCRIPT, call], capture_output=True, text=True, check=False, cwd=directory.parent, timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
@pytest.mark.parametrize("form", STEPS)
def test_sentence_transformers(form: str, pooling: str, tiny: Tiny, tmp_path: Path) -> None:
    artifact = delivered(tmp_path, tiny("bert", "feature-extraction", pooling), form)
    theirs = np.array(elsewhere("sentence-transformers", form, artifact, "feature-extraction", TEXTS))
    assert np.abs(theirs - bertopt.load(artifact)(TEXTS)).max() < 1e-5


@pytest.mark.parametrize("form", STEPS)
def test_sentence_transformers_with_a_layer_after_pooling(form: str, tmp_path: Path) -> None:
    model = add_dense(write_tiny(tmp_path / "model", "bert", "feature-extraction", "mean"), (24, "Tanh"))
    artifact = delivered(tmp_path / "out", model, form)
    theirs = np.array(elsewhere("sentence-transformers", form, artifact, "feature-extraction", TEXTS))
    assert theirs.shape == (3, 24) and np.abs(theirs - bertopt.load(artifact)(TEXTS)).max() < 1e-5


@pytest.mark.parametrize("kind", ["splade", "splade_sum_log1p"])
@pytest.mark.parametrize("form", STEPS)
def test_a_sparse_encoder(form: str, kind: str, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model", "bert", "feature-extraction", kind)
    (model / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "SparseEncoder"}))
    artifact = delivered(tmp_path / "out", model, form)
    theirs = np.array(elsewhere("sparse-encoder", form, artifact, "feature-extraction", TEXTS))
    assert theirs.shape == (3, 85) and np.abs(theirs - bertopt.load(artifact).logits(TEXTS)).max() < 1e-5


@pytest.mark.parametrize("form", STEPS)
def test_sentence_transformers_in_int8(form: str, tiny: Tiny, tmp_path: Path) -> None:
    """One text at a time: dynamic INT8 takes its ranges from the whole batch."""
    model = tiny("bert", "feature-extraction", "mean")
    more = [{"pass": "quantize_int8"}] if form == "onnx" else []
    # What INT8 costs a tiny random model is another test's matter.
    options: dict[str, Any] = {"precision": "int8", "limits": {"error_ratio_max": 99, "rank_ratio_max": 99}}
    options = {} if form == "onnx" else options
    artifact = delivered(tmp_path, model, form, *more, **options)
    predictor = bertopt.load(artifact)
    for text in TEXTS:
        theirs = np.array(elsewhere("sentence-transformers", form, artifact, "feature-extraction", [text]))
        assert np.abs(theirs - predictor([text])).max() < 1e-5


@pytest.mark.parametrize("task", [task for task in TASKS if task != "feature-extraction"])
@pytest.mark.parametrize("form", STEPS)
def test_optimum(form: str, task: str, tiny: Tiny, tmp_path: Path) -> None:
    artifact = delivered(tmp_path, tiny("bert", task), form)
    texts: list[Any] = list(TEXTS)
    if task == "question-answering":
        texts = [(TEXTS[0], TEXTS[1]), (TEXTS[2], TEXTS[0])]
    if task == "fill-mask":
        texts = ["the [MASK] sat", "[MASK] was good ."]
    same(elsewhere("optimum", form, artifact, task, texts), list(bertopt.load(artifact)(texts)))


def same(theirs: Any, ours: Any) -> None:
    """Compare outputs in the format of transformers' pipelines: scores to 1e-4, everything else exactly.

    A span's score is left out: transformers counts the first token among the places where it may begin, bertopt does not.
    """
    if isinstance(ours, dict):
        for key in ours.keys() - ({"score"} if "answer" in ours else set()):
            same(theirs[key], ours[key])
    elif isinstance(ours, list | tuple):
        assert len(theirs) == len(ours), (theirs, ours)
        for one, other in zip(theirs, ours, strict=True):
            same(one, other)
    elif isinstance(ours, float | np.floating):
        assert theirs == pytest.approx(float(ours), abs=1e-4)
    else:
        assert theirs == ours
