"""Outputs do not depend on what was measured: equal to the last bit between loads and between threads."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bertopt import stages
from bertopt.core import Context, Model
from bertopt.modeling import checkpoint
from bertopt.passes import ConvertOpenvino, FuseOrt, QuantizeInt8
from bertopt.runtime import cost_model
from bertopt.runtime.load import load
from bertopt.runtime.predictor import Predictor
from tests.support.exports import Exports
from tests.support.tiny_models import WORDS, Tiny

KINDS = ("eager", "onnx-int8", "openvino")
Stage = Callable[[str], Path]


@pytest.fixture(scope="module")
def stage(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory, export: Exports) -> Stage:
    folder = tmp_path_factory.mktemp("reproducible")
    reference = checkpoint.load(tiny(task="feature-extraction", pooling="mean"))

    def context(name: str) -> Context:
        (folder / "work" / name).mkdir(parents=True)
        return Context(folder / "work" / name)

    def build(kind: str) -> Model:
        if kind == "eager":
            return reference
        graph = export(reference, context(f"{kind}-graph"))
        if kind == "openvino":
            return ConvertOpenvino()(graph, context(kind)).model
        return QuantizeInt8()(FuseOrt()(graph, context(f"{kind}-fused")).model, context(kind)).model

    def commit(kind: str) -> Path:
        out = folder / kind
        if not out.is_dir():
            if kind == "openvino":
                pytest.importorskip("openvino")
            with checkpoint.quiet():
                model = build(kind)
            out.mkdir()
            checkpoint.write_snapshot(reference, out)
            stages.write_form(model, out)
            stages.write_manifest(out, {"device": "cpu", "passes": [], **stages.describe(model)})
        return out

    return commit


def texts_of(seed: int, count: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, n)) for n in rng.integers(0, 45, count)]


def load_with_clock(directory: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Predictor, list[Any]]:
    """Load, with a clock whose differences are random, and note the shape of every batch."""
    now = itertools.accumulate(np.random.default_rng(seed).lognormal(-6, 2, 10_000))
    monkeypatch.setattr(cost_model, "time", SimpleNamespace(perf_counter=lambda: float(next(now))))
    predict, shapes = load(directory, threads=2), []
    predict.watched(lambda batch, outputs: shapes.append(batch.inputs["input_ids"].shape))
    return predict, shapes


@pytest.mark.parametrize("kind", KINDS)
def test_two_loads_give_the_same_outputs_whatever_their_clocks_say(
    stage: Stage, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = texts_of(0, 150)
    outputs, batches, calls = [], [], []
    for seed in range(4):
        predict, shapes = load_with_clock(stage(kind), seed, monkeypatch)
        outputs.append(predict(texts))
        batches.append(shapes)
        calls.append(predict.runner.costs)
    for other in outputs[1:]:
        np.testing.assert_array_equal(other, outputs[0])
    if kind == "openvino":
        # Its outputs are the same in any batch, so it keeps the costs that it measures.
        assert len(set(calls)) > 1
    else:
        assert all(other == batches[0] for other in batches[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_threads_get_the_outputs_of_serial_calls_of_another_load(stage: Stage, kind: str) -> None:
    calls = [texts_of(seed, 1 + seed % 9) for seed in range(120)]
    one, other = load(stage(kind), threads=2), load(stage(kind), threads=2)
    serial = [one(call) for call in calls]
    with ThreadPoolExecutor(8) as threads:
        for got, expected in zip(threads.map(other, calls), serial, strict=True):
            np.testing.assert_array_equal(got, expected)


FORK = """
import os, sys
import bertopt
from bertopt.errors import UsageError
predict = bertopt.load(sys.argv[1])
predict(["the cat", "a dog sat"])
child = os.fork()
if not child:
    raised = 0
    for texts in (["the cat"], ["the cat", "a dog sat"]):
        try:
            predict(texts)
        except UsageError as error:
            raised += "call bertopt.load after the fork" in str(error)
    try:
        next(predict.stream(iter(["the cat"])))
    except UsageError:
        raised += 1
    os._exit(raised)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
assert predict(["the cat"]).shape == (1, 32)
"""


@pytest.mark.skipif(not hasattr(sys, "getdlopenflags"), reason="needs fork")
@pytest.mark.parametrize("kind", ["eager", "openvino"])
def test_a_fork_is_told_to_load_again(stage: Stage, kind: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FORK, str(stage(kind))], timeout=240, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


AGAIN = """
import os, sys, threading
import bertopt
predict = bertopt.load(sys.argv[1], threads=2)
expected = predict(["the cat", "a dog sat"])
child = os.fork()
if not child:
    threading.Timer(60, os._exit, [99]).start()
    try:
        predict = bertopt.load(sys.argv[1])
    except bertopt.BertoptError as error:
        os._exit(2 if "multiprocessing's 'spawn'" in str(error) else 1)
    os._exit(0 if (abs(predict(["the cat", "a dog sat"]) - expected) < 0.2).all() else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(sys, "getdlopenflags"), reason="needs fork")
@pytest.mark.parametrize(("kind", "code"), [("eager", 2), ("onnx-int8", 0), ("openvino", 0)])
def test_a_fork_may_load_again_in_the_place_of_the_inherited_one(stage: Stage, kind: str, code: int) -> None:
    """Freeing the inherited one would wait for ever for its runtime's threads, and so would torch's first product."""
    ended = subprocess.run(
        [sys.executable, "-c", AGAIN, str(stage(kind))], timeout=240, capture_output=True, text=True, check=False
    )
    assert ended.returncode == code, ended.stderr


SIGNAL = """
import gc, signal, sys
import bertopt
signal.signal(signal.SIGUSR1, lambda *_: print("handled"))
first, second = bertopt.load(sys.argv[1]), bertopt.load(sys.argv[1])
del first
gc.collect()
del second
gc.collect()
signal.raise_signal(signal.SIGUSR1)
"""


def test_a_signal_is_handled_after_openvino_models_were_closed(stage: Stage) -> None:
    """It was a segmentation fault: each model had a core, and each core another stack for signals."""
    ended = subprocess.run(
        [sys.executable, "-c", SIGNAL, str(stage("openvino"))], timeout=240, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "handled\n"), ended.stderr
