"""Calls one after the other and all at once: answers that others' calls change."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bertopt
from bertopt import stages
from bertopt.core import Session
from bertopt.errors import WrongAnswer
from bertopt.modeling import checkpoint
from bertopt.runtime import replay, single_calls
from bertopt.runtime.predictor import Predictor
from tests.support.tiny_models import Tiny

TEXTS = ["a cat", "the cat sat on the mat", "a dog ran"]


class Faulty(Session):
    """Another session's answers. It gives one memory to all calls, keeps the inputs of all calls in one place, keeps outputs by their
    ids, or overflows."""

    def __init__(self, right: Session, fault: str) -> None:
        self.right, self.fault, self.concurrent = right, fault, True
        self.place: dict[str, Any] = {}
        self.turn = threading.Lock()

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        held: dict[str, Any] = self.place if self.fault == "one place for inputs" else {}
        held["inputs"] = inputs
        time.sleep(0.001)
        with self.turn:
            found = self.right.run(held["inputs"])
        if self.fault == "NaN":
            return {name: np.full_like(value, np.nan) for name, value in found.items()}
        if self.fault == "kept outputs":
            key = inputs["input_ids"].tobytes().hex()
            return {name: self.place.setdefault(f"{key} {name}", value) for name, value in found.items()}
        if self.fault != "one memory":
            return found
        for name, value in found.items():
            self.place.setdefault(name, np.empty_like(value))[...] = value
        return {name: self.place[name] for name in found}

    def load(self, inputs: Mapping[str, Any]) -> None:
        raise NotImplementedError

    step = fetch = load  # type: ignore[assignment]


@pytest.fixture
def predictor(tiny: Tiny, tmp_path: Path) -> Predictor:
    model = checkpoint.load(tiny())
    checkpoint.write_snapshot(model, tmp_path)
    stages.write_form(model, tmp_path)
    stages.write_manifest(tmp_path, stages.describe(model))
    return bertopt.load(tmp_path)


def faulty(predictor: Predictor, fault: str) -> Predictor:
    predictor.runner.session = Faulty(predictor.session, fault)
    return predictor


def test_answers_in_memory_that_is_used_again_are_refused(predictor: Predictor) -> None:
    right = list(single_calls.answers(predictor, TEXTS))
    together = predictor.raw(TEXTS)
    assert all(np.allclose(one["logits"], other["logits"], atol=1e-6) for one, other in zip(right, together, strict=True))
    list(single_calls.answers(faulty(predictor, "no"), TEXTS))
    with pytest.raises(WrongAnswer, match="text 0 was changed by the call for the next one"):
        list(single_calls.answers(faulty(predictor, "one memory"), TEXTS))


def test_outputs_that_a_caller_may_not_change_are_refused(predictor: Predictor) -> None:
    """An embedding that a caller divided by its length stayed divided for the next one: such a model was delivered."""
    with pytest.raises(WrongAnswer, match="text 0 changed with what its caller wrote"):
        list(single_calls.answers(faulty(predictor, "kept outputs"), TEXTS))


def test_outputs_that_are_nan_are_left_to_parity(predictor: Predictor) -> None:
    """An overflow in half precision was said to be what a caller had written."""
    answered = list(single_calls.answers(faulty(predictor, "NaN"), TEXTS))
    assert all(np.isnan(one["logits"]).all() for one in answered)


@pytest.mark.parametrize(("ask", "texts"), [(replay.at_once, len(replay.TEXTS)), (replay.calls_at_once, 4 * replay.MANY)])
def test_calls_at_once_that_get_each_others_inputs_answer_otherwise(predictor: Predictor, ask: Callable[..., Any], texts: int) -> None:
    for fault, right in (("no", True), ("one place for inputs", False)):
        try:
            one_by_one, *rounds = ask(faulty(predictor, fault))
            assert len(rounds) == replay.ROUNDS and len(one_by_one) == texts
            for answers in rounds:
                replay.check(answers, one_by_one, "float32", "a call")
            assert right
        except (WrongAnswer, IndexError):  # another batch's answers may be too few
            assert not right


class OneBatch(Faulty):
    """Mixes up batches of several texts that come in calls of their own, and no others."""

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return super().run(inputs) if len(inputs["input_ids"]) > 1 else self.right.run(inputs)

    def run_all(self, batches: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        with self.turn:
            yield from self.right.run_all(batches)


def test_batches_at_once_are_tried_as_a_server_runs_them(predictor: Predictor) -> None:
    predictor.runner.price()
    predictor.runner.session = OneBatch(predictor.session, "one place for inputs")
    with pytest.raises((WrongAnswer, IndexError)):  # another batch's answers may be too few
        one_by_one, *rounds = replay.calls_at_once(predictor)
        for answers in rounds:
            replay.check(answers, one_by_one, "float32", "a call")


class OneWidth(Faulty):
    """Keeps the number of columns of batches in one place for all calls: outputs are lost where another call has changed it."""

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        columns = inputs["input_ids"].shape[1]
        self.place["columns"] = columns
        self.place.setdefault("seen", set()).add(columns)
        time.sleep(0.002)
        with self.turn:
            found = self.right.run(inputs)
        return found if self.place["columns"] == columns else {name: np.zeros_like(value) for name, value in found.items()}


def test_calls_at_once_have_texts_of_other_lengths(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    """All calls were of batches of one shape, as words of one token gave: a workspace that is laid out for another call's shape did not show."""
    raw = predictor.raw
    # Each word has one token, as in a real vocabulary.
    monkeypatch.setattr(predictor, "raw", lambda texts, *how: raw(["cat " * len(text.split()) for text in texts], *how))
    predictor.runner.price()
    predictor.runner.session = session = OneWidth(predictor.session, "no")
    one_by_one, *rounds = replay.calls_at_once(predictor)
    assert len(session.place["seen"]) == 4 and max(session.place["seen"]) > 3 * min(session.place["seen"])
    with pytest.raises(WrongAnswer):
        for answers in rounds:
            replay.check(answers, one_by_one, "float32", "a call")


class Late(Faulty):
    """Once a call was left before its last batch, answers are those of the batch before."""

    late: dict[str, Any] | None = None

    def run_all(self, batches: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        try:
            for inputs in batches:
                found = self.right.run(inputs)
                given, self.late = (found, None) if self.late is None else (self.late, found)
                yield given
        except GeneratorExit:
            self.late = found
            raise


def test_a_call_that_was_interrupted_spoils_none_after_it(predictor: Predictor) -> None:
    recorded = replay.answers(predictor)
    replay.check(replay.after_one_that_ends_early(predictor), recorded, "float32", "a call")
    predictor.runner.session = Late(predictor.session, "no")
    predictor.runner.session.concurrent = True
    with pytest.raises((WrongAnswer, IndexError, ValueError)):
        replay.check(replay.after_one_that_ends_early(predictor), recorded, "float32", "a call")


def test_long_texts_and_many_are_recorded_and_earlier_artefacts_are_still_compared(predictor: Predictor) -> None:
    found = replay.answers(predictor)
    assert len(found) == len(replay.TEXTS) + 2 + replay.MANY + len(replay.PAIRS)
    replay.check(found, found[: len(replay.TEXTS) + 1], "float32", "an artefact of 0.1")
    wrong = [*found[:-1], [[size, *(2 * figure for figure in figures)] for size, *figures in found[-1]]]
    with pytest.raises(WrongAnswer, match=f"text {len(found) - 1} differ"):
        replay.check(wrong, found, "float32", "the last of many")
    assert len(replay.answers(predictor, compiled=True)) == len(replay.TEXTS) + 1


class OneText(Faulty):
    """Takes both texts of a pair for one."""

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return self.right.run({**inputs, "token_type_ids": np.zeros_like(inputs["token_type_ids"])})


def test_pairs_of_a_classifier_are_recorded(predictor: Predictor) -> None:
    recorded = replay.answers(predictor)
    predictor.runner.session = OneText(predictor.session, "no")
    with pytest.raises(WrongAnswer, match=f"text {len(recorded) - len(replay.PAIRS)} differ"):
        replay.check(replay.answers(predictor), recorded, "float32", "another runtime")


def test_one_number_near_zero_is_held_to_the_usual_size() -> None:
    def one(logits: list[float]) -> replay.Answers:
        return [[[1.0, abs(logit), logit, -logit, logit / 2, logit / 3]] for logit in logits]

    recorded = one([4.0, -5.0, 0.002, 3.0])
    replay.check(one([4.01, -5.02, 0.03, 3.01]), recorded, "int8", "another machine")
    with pytest.raises(WrongAnswer, match="text 2 differ"):
        replay.check(one([4.01, -5.02, 2.0, 3.01]), recorded, "int8", "another machine")


def test_what_another_version_rounds_otherwise_is_not_refused_by_chance() -> None:
    """ONNX Runtime 1.24 and 1.31 differ on all-MiniLM-L6-v2 in INT8 by 0.12 for half of the texts and both err by 0.13 to 0.17; an
    unlucky projection showed 0.35 of it."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        right = rng.standard_normal((43, 384))
        noise = rng.standard_normal(right.shape) * np.where(np.arange(43) < 24, 0.03, 0.12)[:, None]
        recorded, found = ([[replay._projected(row)] for row in rows] for rows in (right, right + noise))
        replay.check(found, recorded, "int8", "another version")
        replay.check([[text[0][:6]] for text in found], recorded, "int8", "an artefact of 0.1")
        for figure in range(1, 6):
            nan = [[*found[7][0][:figure], float("nan"), *found[7][0][figure + 1 :]]]
            with pytest.raises(WrongAnswer, match="text 7 differ"):
                replay.check([*found[:7], nan, *found[8:]], recorded, "int8", "another version")
        found[7] = [replay._projected(right[7] + 0.6 * rng.standard_normal(384))]
        with pytest.raises(WrongAnswer, match="text 7 differ"):
            replay.check(found, recorded, "int8", "another version")


def test_the_median_text_is_held_more_tightly_than_one(predictor: Predictor) -> None:
    found = replay.answers(predictor)
    scaled = [[[size, *(1.2 * figure for figure in figures)] for size, *figures in text] for text in found]
    replay.check([*scaled[:5], *found[5:]], found, "int8", "a few texts")
    with pytest.raises(WrongAnswer, match="the outputs of the median text differ"):
        replay.check(scaled, found, "int8", "all texts")
