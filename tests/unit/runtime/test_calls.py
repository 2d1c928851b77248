"""Calls one after the other and all at once: answers that others' calls change."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
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
    """Another session's answers. It gives one memory to all calls, or keeps the inputs of all calls in one place."""

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
    stages.write_manifest(tmp_path, stages.describe(model, tmp_path))
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


def test_calls_at_once_that_get_each_others_inputs_answer_otherwise(predictor: Predictor) -> None:
    for fault, right in (("no", True), ("one place for inputs", False)):
        one_by_one, *rounds = replay.at_once(faulty(predictor, fault))
        assert len(rounds) == replay.ROUNDS and len(one_by_one) == len(replay.TEXTS)
        try:
            for answers in rounds:
                replay.check(answers, one_by_one, "float32", "a call")
            assert right
        except WrongAnswer:
            assert not right
