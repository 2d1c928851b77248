"""Packing: every text in one place, and a packed network behind the padded interface answers as the padded one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertopt.checks import parity, probes
from bertopt.core import Context, RuntimeFacts, Session, Spec
from bertopt.errors import UsageError
from bertopt.modeling import checkpoint, packing
from bertopt.passes import PackSequences
from bertopt.runtime.batch_limits import BatchLimits
from bertopt.runtime.batch_plan import plan
from bertopt.runtime.cost_model import Costs
from bertopt.sessions import open_session
from bertopt.sessions.packed import PackedSession
from tests.support.specs import spec
from tests.support.tiny_models import Tiny

Array = np.ndarray
LENGTHS = [
    np.array([5]),
    np.array([16, 16, 16]),
    np.array([1, 2, 3, 40, 16, 15, 1, 9, 7, 7]),
    np.random.default_rng(0).integers(1, 17, 500),
]


def overlaps(lengths: Array, rows: packing.Rows) -> bool:
    taken = [
        set(zip([int(r)] * int(n), range(int(c), int(c + n)), strict=True))
        for n, r, c in zip(lengths, rows.row, rows.column, strict=True)
    ]
    return len(set().union(*taken)) != int(lengths.sum())


@pytest.mark.parametrize("lengths", LENGTHS, ids=len)
def test_every_token_has_a_place_of_its_own(lengths: Array) -> None:
    for rows in (packing.best_fit(lengths, 16), packing.spread(lengths, 3), packing.singly(lengths)):
        assert not overlaps(lengths, rows)
        used = np.bincount(rows.row, weights=lengths, minlength=len(rows.used))
        np.testing.assert_array_equal(used, rows.used)
        # No gaps: a row is used from its first column on.
        np.testing.assert_array_equal(
            [int((rows.column + lengths)[rows.row == r].max()) for r in range(len(rows.used))], rows.used
        )


def test_best_fit_fills_rows() -> None:
    lengths = np.random.default_rng(1).integers(1, 257, 2000)
    rows = packing.best_fit(lengths, 256)
    assert rows.used.max() <= 256
    # Best fit decreasing needs at most 11/9 of the fewest rows, and here hardly more than the tokens do.
    assert len(rows.used) <= 1.02 * lengths.sum() / 256
    alone = packing.best_fit(np.array([300, 10, 10]), 256)
    assert sorted(alone.used.tolist()) == [20, 300]


def test_texts_take_whole_blocks() -> None:
    lengths = np.array([1, 15, 16, 17, 40, 0])
    assert packing.whole(lengths, 16).tolist() == [16, 16, 16, 32, 48, 0]
    assert packing.whole(lengths, 1) is lengths
    of = spec("text-classification").model_copy(update={"layout": "packed", "row_length": 64})
    lengths = np.random.default_rng(3).integers(1, 65, 50)
    flat = packing.flat(of, np.arange(int(lengths.sum())), None, lengths)
    chosen = plan(of, lengths, Costs(), BatchLimits(8, 512, 64, block=16))
    first = [batch.inputs["first_tokens"] for batch in packing.batches(of, flat, chosen.rows, chosen.batches)]
    assert all((columns % 16 == 0).all() for columns in first) and any(columns.any() for columns in first)


def test_spread_rows_are_even() -> None:
    rows = packing.spread(np.random.default_rng(2).integers(1, 100, 64), 4)
    assert rows.used.max() - rows.used.min() < 20 and len(rows.used) == 4


def test_rows_and_back() -> None:
    of = spec("token-classification").model_copy(update={"layout": "packed", "row_length": 16})
    lengths = LENGTHS[2]
    ids = np.arange(100, 100 + lengths.sum())
    flat = packing.flat(of, ids, ids % 2, lengths)
    rows = packing.best_fit(lengths, 16)
    seen = []
    for batch in packing.batches(of, flat, rows, [(0, 2), (2, len(rows.used))]):
        segments, positions = batch.inputs["segment_ids"], batch.inputs["position_ids"]
        assert list(batch.inputs) == ["input_ids", "token_type_ids", "position_ids", "segment_ids"]
        assert (batch.inputs["input_ids"][segments == 0] == of.pad_id).all()
        for text, row, slot in zip(batch.texts, batch.row, batch.slot, strict=True):
            mine = segments[row] == slot + 1
            own = batch.inputs["input_ids"][row][mine]
            np.testing.assert_array_equal(own, ids[flat.starts[text] : flat.starts[text + 1]])
            np.testing.assert_array_equal(positions[row][mine], np.arange(lengths[text]))
            np.testing.assert_array_equal(batch.inputs["token_type_ids"][row][mine], own % 2)
        # Answers that are the ids come back as the ids, text after text.
        answers = batch.inputs["input_ids"][..., None].astype(np.float32)
        np.testing.assert_array_equal(
            batch.by_token(answers)[:, 0], np.concatenate([ids[flat.starts[t] : flat.starts[t + 1]] for t in batch.texts])
        )
        padded, back = batch.padded(of, {"logits": answers})
        np.testing.assert_array_equal(padded["attention_mask"].sum(axis=1), lengths[batch.texts])
        np.testing.assert_array_equal(back["logits"][..., 0], padded["input_ids"] * padded["attention_mask"])
        seen += batch.texts.tolist()
    assert sorted(seen) == list(range(len(lengths)))


def test_first_tokens_and_slots() -> None:
    of = spec("text-classification").model_copy(update={"layout": "packed", "row_length": 16})
    lengths = np.array([4, 9, 3, 12, 2])
    flat = packing.flat(of, np.arange(int(lengths.sum())), None, lengths)
    rows = packing.best_fit(lengths, 16)
    (batch,) = packing.batches(of, flat, rows, [(0, len(rows.used))])
    first = batch.inputs["first_tokens"]
    assert first.shape == (2, 4)
    for text, row, slot in zip(batch.texts, batch.row, batch.slot, strict=True):
        assert batch.inputs["input_ids"][row, first[row, slot]] == flat.starts[text]
    # One answer for each place: the row and slot say which is whose.
    answers = np.arange(8.0).reshape(2, 4, 1)
    np.testing.assert_array_equal(batch.by_text(answers)[:, 0], batch.row * 4 + batch.slot)


def test_counted_positions_are_transformers() -> None:
    import torch
    from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

    ids = np.random.default_rng(3).integers(0, 4, (5, 9))
    of = spec().model_copy(update={"positions": "counted", "position_offset": 2, "pad_id": 1})
    expected = RobertaEmbeddings.create_position_ids_from_input_ids(torch.from_numpy(ids), 1).numpy()
    begins = np.repeat(np.arange(5) * 9, 9)
    np.testing.assert_array_equal(packing.counted(of, ids.ravel(), begins).reshape(5, 9), expected)


class Sums(Session):
    """Stands for a packed network: a text answers the sum of its ids, a token its id and position."""

    def __init__(self, of: Spec) -> None:
        self.spec, self.seen = of, list[Mapping[str, Array]]()

    def load(self, inputs: Mapping[str, Array]) -> None:
        assert tuple(inputs) == self.spec.network_inputs
        self.seen.append(inputs)

    def step(self) -> None:
        """Answers are made when they are fetched."""

    def fetch(self) -> dict[str, Array]:
        inputs = self.seen[-1]
        ids, segments = inputs["input_ids"], inputs["segment_ids"]
        if self.spec.granularity == "token":
            return {"logits": np.stack([ids, inputs["position_ids"]], -1).astype(np.float32)}
        many = inputs["first_tokens"].shape[1]
        sums = [[(row * (own == k + 1)).sum() for k in range(many)] for row, own in zip(ids, segments, strict=True)]
        return {"logits": np.array(sums, np.float32)[..., None]}


MASK = np.array([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0], [1, 0, 1, 0, 1], [1, 1, 1, 1, 1]])
IDS = np.arange(10, 35).reshape(5, 5)
INPUTS = {"input_ids": IDS, "attention_mask": MASK, "token_type_ids": np.zeros_like(IDS)}


def test_a_padded_batch_in_rows() -> None:
    of = spec("text-classification").model_copy(update={"layout": "packed", "row_length": 8})
    rows = Sums(of)
    session = PackedSession(rows, of)
    session.load(INPUTS)
    session.step()
    expected = (IDS * MASK).sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(session.fetch()["logits"], expected)
    assert rows.seen[0]["input_ids"].shape == (2, 8)
    for answers in session.run_all([INPUTS, INPUTS]):
        np.testing.assert_array_equal(answers["logits"], expected)
    nothing = {name: np.zeros_like(value) for name, value in INPUTS.items()}
    np.testing.assert_array_equal(session.run(nothing)["logits"], np.zeros((5, 1)))
    # Of one length: nothing to save, so no longer rows.
    session.run({**INPUTS, "attention_mask": np.ones_like(MASK)})
    assert rows.seen[-1]["input_ids"].shape == (5, 5)


def test_positions_are_those_of_the_padded_batch() -> None:
    columns = spec("token-classification").model_copy(update={"layout": "packed", "row_length": 8})
    got = PackedSession(Sums(columns), columns).run(INPUTS)["logits"]
    np.testing.assert_array_equal(got[..., 0], IDS * MASK)
    np.testing.assert_array_equal(got[..., 1], np.arange(5) * MASK)
    counting = columns.model_copy(update={"positions": "counted", "position_offset": 2, "pad_id": 1})
    ids = np.where(MASK == 1, IDS, 1)
    got = PackedSession(Sums(counting), counting).run({**INPUTS, "input_ids": ids})["logits"]
    np.testing.assert_array_equal(got[..., 1], (1 + np.cumsum(MASK, axis=1)) * MASK)


FAMILIES = [("bert", "text-classification", None), ("roberta", "feature-extraction", "mean"), ("bert", "question-answering", None),
            ("distilbert", "token-classification", None), ("bert", "feature-extraction", "cls")]  # fmt: skip


@pytest.mark.parametrize(("family", "task", "pooling"), FAMILIES)
def test_every_probe_that_can_be_packed_agrees(
    tiny: Tiny, tmp_path: Path, family: str, task: str, pooling: str | None
) -> None:
    model = checkpoint.load(tiny(family, task, pooling), task)
    packed = PackSequences(row_length=32)(model, Context(tmp_path)).model
    reference, session = open_session(model, threads=1), open_session(packed, threads=1)
    left_out = set()
    for probe in [*probes.grid(model.spec, [(2, 7), (5, 16)], None), *probes.serving(model.spec, 32)]:
        if not probes.packable(model.spec, probe):
            left_out.add(probe.padding)
            continue
        of = model.spec
        case = parity.compare(probe, of, parity.answer(session, probe, of), parity.answer(reference, probe, of))
        assert case.max_abs < 1e-4 and case.finite, (probe.name, case.max_abs)
    # Heads and poolings that read the first column: under left padding that is a token no packed row has.
    first = task == "text-classification" or pooling == "cls"
    assert left_out == ({"left"} if first else set())


def test_streams_are_for_what_can_have_them(tiny: Tiny) -> None:
    model: Any = checkpoint.load(tiny(), "auto")
    with pytest.raises(UsageError, match=r"streams must be 1 for form 'eager'.*got 2"):
        open_session(model, streams=2)
    with pytest.raises(UsageError, match="streams must be at least 1"):
        open_session(model, streams=0)
    assert open_session(model, streams=1).streams == 1


@pytest.mark.parametrize("scale", [0.0, 1e-9])
def test_packing_shows_its_effect_whatever_the_size_of_the_outputs(tiny: Tiny, tmp_path: Path, scale: float) -> None:
    """A constant classifier answers every text alike, and no token of a text can show in its answer."""
    model = checkpoint.load(tiny("bert", "text-classification"))
    for parameter in model.network.encoder.classifier.parameters():
        parameter.data.mul_(scale)
    passed = PackSequences(row_length=32)
    packed = passed(model, Context(tmp_path)).model
    shown = passed.effects(packed, RuntimeFacts())
    assert all(expected == found for expected, found in shown.values())
