"""The reference runs each row of the sweeps once, and its vectors are those of the sweeps as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bertopt.checks import coverage, reference_rows, sweep_plan
from bertopt.checks.reference_rows import ReferenceRows
from bertopt.core import ShapeLimits, Spec

WHOLE = ShapeLimits(longest=64)
SPEC = Spec(
    family="bert", task="text-classification", inputs=("input_ids", "attention_mask", "token_type_ids"), outputs=("logits",),
    layers=2, heads=2, hidden=32, vocabulary=900, token_types=2, pad_id=0, max_length=64, text_length=64,
    labels=("bad", "good"), parameters=1,
)  # fmt: skip
HIDDEN = np.random.default_rng(0).standard_normal((SPEC.vocabulary, SPEC.hidden)).astype(np.float32)


def network(spec: Spec) -> Any:
    """A network whose outputs depend on valid tokens, their places and types alone, and are garbage elsewhere."""

    def run(inputs: Any) -> dict[str, Any]:
        ids, mask, types = (inputs[name] for name in SPEC.inputs)
        tokens = (HIDDEN[ids] + np.arange(ids.shape[1])[:, None] * 0.1 + types[..., None]) * mask[..., None]
        text = tokens.sum(axis=1, keepdims=True)
        garbage = np.where(mask[..., None] == 1, 0.0, float(ids.shape[0]))
        hidden = (tokens + text + garbage).astype(np.float32)
        outputs = {"logits": text[:, 0, :2], "last_hidden_state": hidden}
        if spec.granularity == "span":
            outputs = {"start_logits": hidden[..., 0], "end_logits": hidden[..., 1], "last_hidden_state": hidden}
        if spec.granularity == "token":
            outputs = {"logits": hidden[..., :5]}
        return {name: value.astype(np.float32) for name, value in outputs.items()}

    return run


@pytest.mark.parametrize("task", ["text-classification", "token-classification", "question-answering"])
def test_vectors_are_those_of_the_sweeps_as_they_are(task: Any) -> None:
    spec = SPEC.model_copy(update={"task": task})
    sweeps, run = sweep_plan.plan(spec, 3, 1024).of(True, WHOLE), network(spec)
    rows = ReferenceRows(spec)
    batches = rows.missing(sweeps)
    for batch in batches:
        rows.keep(batch, coverage.answer(run, batch.probe, spec, WHOLE, 3)[0])
    assert rows.missing(sweeps) == []
    for probe in sweeps:
        expected = coverage.answer(run, probe, spec, WHOLE, 3)[0]
        found = rows.vectors(probe)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=f"{name}, {probe.name}")


def test_each_row_is_run_once_in_batches_of_bounded_size() -> None:
    sweeps = sweep_plan.plan(SPEC, 3, 1024).of(True, WHOLE)
    batches = ReferenceRows(SPEC).missing([*sweeps, *sweeps])
    keys = [key for batch in batches for key in batch.keys]
    assert len(keys) == len(set(keys)) < sum(probe.shape[0] for probe in sweeps), "copies are run once"
    masks = [batch.probe.inputs["attention_mask"] for batch in batches]
    assert sum(mask.size for mask in masks) < 1.3 * sum(mask.sum() for mask in masks), "rows of a batch are about as long"
    for batch in batches:
        mask = batch.probe.inputs["attention_mask"]
        assert mask.size <= reference_rows.BATCH_TOKENS and mask.shape[1] == mask.sum(axis=1).max()


def test_rows_that_differ_in_one_id_type_or_compared_place_are_told_apart() -> None:
    rng = np.random.default_rng(0)
    mask = np.ones((4, 3), np.int64)
    probe = sweep_plan.make_probe(SPEC, "batch sizes", 0, mask, np.tile([5, 6, 7], 4), rng)
    probe.inputs["token_type_ids"][:] = 0
    probe.inputs["input_ids"][1, 2] = 8
    probe.inputs["token_type_ids"][2, 1] = 1
    probe.compared[3, 0] = False
    (batch,) = ReferenceRows(SPEC).missing([probe])
    assert len(batch.keys) == 4


@pytest.mark.parametrize(("layers", "hidden", "tokens"), [(2, 32, 1024), (6, 384, 1024), (12, 768, 147), (24, 1024, 128)])
def test_a_batch_of_a_large_model_is_smaller(layers: int, hidden: int, tokens: int) -> None:
    assert ReferenceRows(SPEC.model_copy(update={"layers": layers, "hidden": hidden})).batch_tokens == tokens
