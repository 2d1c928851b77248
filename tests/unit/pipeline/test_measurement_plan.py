"""Texts that stages are probed, calibrated and timed with: pairs where the recipe has these and the model takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bertopt.checks import probes
from bertopt.core import Context
from bertopt.pipeline.measurement_plan import OWN_TEXTS, MeasurementPlan
from bertopt.pipeline.race import Budget
from bertopt.quantization import calibration_inputs
from bertopt.recipe.texts import Texts
from tests.support.specs import EMBEDDING, QUESTIONS, RERANKER, TEXT

COUNT = 200
ONE, OTHER = (tuple(f"{name} {number}" for number in range(COUNT)) for name in ("query", "passage"))
PAIRS = list(zip(ONE, OTHER, strict=True))
FILE = Texts(ONE, source="texts.jsonl", second=OTHER)


def plan(spec: Any, texts: Texts = FILE) -> MeasurementPlan:
    return MeasurementPlan.of(spec, [(1, 8)], texts, Budget(0.0, 0.0))


@pytest.mark.parametrize("spec", [TEXT, RERANKER, QUESTIONS], ids=["classes", "re-ranker", "questions"])
def test_pairs_are_probed_timed_and_calibrated_as_pairs(spec: Any, tmp_path: Path) -> None:
    found = plan(spec)
    texts, pairs = found.sample()
    built_in = probes.built_in_texts()
    assert set(texts) <= set(built_in) and len(texts) > 70
    assert set(pairs[:OWN_TEXTS]) < set(PAIRS) and pairs[OWN_TEXTS:] == probes.pairs(spec, texts) != []
    assert len(found.mix) == 8 and set(found.mix) < set(PAIRS)
    seen: list[Any] = []

    def encode(given: Any) -> Any:
        seen.extend(given)
        ids = [[2, *range(5, 9), 3]] * len(given)
        return {name: probes.np.array(ids if name == "input_ids" else [[1] * 6] * len(given)) for name in spec.inputs}

    context = Context(tmp_path, texts=FILE.asked(spec.task), encode=encode)
    calibration_inputs.samples(spec, context, 20)
    assert len(seen) == 21 and set(seen[1:]) < set(PAIRS)


def test_both_texts_of_each_pair_are_embedded() -> None:
    texts, pairs = plan(EMBEDDING).sample()
    own = set(texts) - set(probes.built_in_texts())
    assert own & set(ONE) and own & set(OTHER) and len(own) == OWN_TEXTS and pairs == probes.pairs(EMBEDDING, texts)
    assert all(isinstance(text, str) for text in plan(EMBEDDING).mix) and set(plan(EMBEDDING).mix) & set(OTHER)


def test_texts_without_a_question_are_asked_one() -> None:
    found = plan(QUESTIONS, Texts(ONE, source="texts.txt"))
    assert {question for question, _ in found.mix} == {"what?"}
    assert set(found.sample()[0]) & set(ONE)
    built_in = Texts(tuple(probes.built_in_texts()))
    assert plan(QUESTIONS, built_in).sample()[0] == list(built_in.texts)
