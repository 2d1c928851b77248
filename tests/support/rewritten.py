"""Networks after some passes, and graphs of them, whose answers for padded and packed rows are compared with the reference's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bertopt.checks import probes
from bertopt.core import Eager, Onnx, Pass, RuntimeFacts
from bertopt.passes import CompileTorch, KeepClsOnly, MergeQkv, PackSequences, UseSdpa
from tests.support import packing
from tests.support.tiny_models import FAMILIES, NORM_FIRST_FAMILIES, TASKS

AnyPass = Pass[Any, Any]
KNOWN = (*FAMILIES, "albert", "mpnet", "ernie", "data2vec-text", "rembert", *NORM_FIRST_FAMILIES)
#: A task, and how the model pools.
MODELS = [(task, None) for task in TASKS] + [("feature-extraction", mode) for mode in ("mean", "cls", "mean_sqrt_len")]
FIRST_ONLY = [("text-classification", None), ("feature-extraction", "cls")]
EXACT = 1e-5
SDPA, MERGE, KEEP, PACK = UseSdpa(), MergeQkv(), KeepClsOnly(), PackSequences(row_length=16)
#: Texts of each row, by length: one that fills it, many, one-token ones, none, and one longer than `row_length`.
ROWS = ([23], [1, 5, 1, 7, 2], [], [9, 11], [1])


def build(model: Any, steps: Sequence[AnyPass], context: Any) -> Any:
    """Apply the passes; each must count something and show its effects."""
    done: list[str] = []
    for step in steps:
        result = step(model, context())
        model = result.model
        done.append(step.name())
        assert any(result.changes.values()), step
        if not isinstance(step, CompileTorch):
            shown = step.effects(model, RuntimeFacts(passes=tuple(done)))
            assert shown and not {what: pair for what, pair in shown.items() if pair[0] != pair[1]}
    return model


def run(model: Any, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The answers of a network, or of its graph in ONNX Runtime, to what the network itself takes."""
    if isinstance(model, Onnx):
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        session = ort.InferenceSession(model.path, options, providers=["CPUExecutionProvider"])
        return list(session.run(list(model.spec.outputs), inputs))
    with torch.inference_mode():
        found = model.network(*(torch.from_numpy(inputs[name]) for name in inputs))
    return [each.numpy() for each in found[: len(model.spec.outputs)]]


def padded_error(reference: Eager, model: Any) -> float:
    """The largest difference over padded batches: none, right and left padding, holes, a fully masked row aside."""
    worst = 0.0
    for probe in probes.grid(reference.spec, [(1, 1), (2, 8), (3, 17)], None):
        inputs = {name: probe.inputs[name] for name in reference.spec.inputs}
        there = inputs["attention_mask"].any(axis=1)
        for mine, theirs in zip(run(model, inputs), run(reference, inputs), strict=True):
            assert mine.shape == theirs.shape and np.isfinite(mine).all()
            worst = max(worst, float(np.abs(mine - theirs)[there].max(initial=0)))
    return worst


def packed_error(reference: Eager, model: Any, rows: Sequence[Sequence[int]] = ROWS, slack: int = 2) -> float:
    """The largest difference between a text's answer in packed rows and its answer alone in the reference."""
    spec, worst = model.spec, 0.0
    texts = iter(packing.make(spec, [length for row in rows for length in row]))
    filled = [[next(texts) for _ in row] for row in rows]
    length = max(sum(row) for row in rows) + slack
    inputs = packing.pack(spec, filled, length, max(map(len, rows)))
    answers = run(model, inputs)
    assert all(np.isfinite(answer).all() and answer.dtype == np.float32 for answer in answers)
    for row, members in enumerate(filled):
        for number, text in enumerate(members):
            mine = packing.unpack(spec, inputs, answers, row, number)
            for got, wanted in zip(mine, run(reference, packing.alone(spec, text)), strict=True):
                assert got.shape == wanted[0].shape
                worst = max(worst, float(np.abs(got - wanted[0]).max()))
    return worst


def nodes(model: Onnx) -> Counter[str]:
    import onnx

    return Counter(node.op_type for node in onnx.load(model.path).graph.node)
