"""Steps under the clock: inputs that were never seen, and samples of what was answered."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import numpy as np

from bertopt.checks import timed_steps as clocks
from bertopt.core import Session, Spec

SPEC = Spec(family="bert", task="text-classification", inputs=("input_ids", "attention_mask", "token_type_ids"),
            outputs=("logits",), layers=1, heads=1, hidden=4, vocabulary=50, token_types=2, pad_id=7, max_length=16,
            text_length=16, labels=("a", "b"), parameters=1)  # fmt: skip


class Doubling(Session):
    """Answers twice its input ids, in memory that it uses again."""

    def __init__(self) -> None:
        self.memory = np.zeros((2, 6), np.float32)

    def load(self, inputs: Mapping[str, np.ndarray]) -> None:
        self.inputs = inputs["input_ids"]

    def step(self) -> None:
        self.memory[:] = 2 * self.inputs

    def fetch(self) -> dict[str, np.ndarray]:
        return {"logits": self.memory}


def test_random_inputs_are_never_padding_and_never_alike() -> None:
    rng = np.random.default_rng(0)
    made = [clocks.random_inputs(SPEC, (2, 6), rng) for _ in range(300)]
    assert len({inputs["input_ids"].tobytes() for inputs in made}) == len(made)
    ids = np.stack([inputs["input_ids"] for inputs in made])
    assert set(np.unique(ids)) == set(range(50)) - {7} and ids.dtype == np.int64
    assert list(made[0]) == list(SPEC.inputs) and made[0]["attention_mask"].all()
    assert made[0]["token_type_ids"].tolist() == [[0, 0, 0, 1, 1, 1]] * 2


def test_a_sample_is_what_was_answered_to_its_inputs() -> None:
    rng = np.random.default_rng(0)
    batches = [clocks.random_inputs(SPEC, (2, 6), rng) for _ in range(4)]
    step_ms, unfinished_ms, (inputs, answers) = clocks.time_steps(Doubling(), batches, keep=1)
    assert len(step_ms) == 4 and min(step_ms) >= 0 and math.isfinite(unfinished_ms)
    assert inputs is batches[1]
    np.testing.assert_array_equal(answers["logits"], 2 * batches[1]["input_ids"])


def test_rotated_texts_have_the_same_words() -> None:
    assert [clocks.rotate_words("a cat sat", by) for by in range(4)] == ["a cat sat", "cat sat a", "sat a cat", "a cat sat"]
    assert [clocks.rotate_words(text, 5) for text in ("", "one", "狗坐着")] == ["", "one", "狗坐着"]


def test_the_reservoir_chooses_evenly_and_within_bounds() -> None:
    def sample(number: int, size: int = 1) -> clocks.Sample:
        return {"x": np.full(size, number)}, {}

    kept = Counter[int]()
    for seed in range(400):
        reservoir = clocks.ReservoirSample(np.random.default_rng(seed))
        for number in range(10):
            reservoir.add(sample(number))
        taken = [int(inputs["x"][0]) for inputs, _ in reservoir.take()]
        assert len(set(taken)) == clocks.SAMPLES and reservoir.take() == []
        kept.update(taken)
    assert min(kept.values()) > 100 and max(kept.values()) < 220
    large = clocks.ReservoirSample(np.random.default_rng(0))
    for number in range(3):
        large.add(sample(number, clocks.SAMPLE_BYTES))
    assert len(large.take()) == 1
