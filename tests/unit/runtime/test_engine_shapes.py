"""Plans for engines: every batch fits an optimisation profile, and the outputs are right."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertopt.core import Engine, Profile, Session, ShapeLimits
from bertopt.errors import Unsupported
from bertopt.modeling import checkpoint
from bertopt.runtime import cost_model
from bertopt.runtime.batch_limits import BatchLimits
from bertopt.runtime.batch_plan import plan
from bertopt.runtime.cost_model import Costs
from bertopt.runtime.predictor import Predictor
from tests.support.specs import spec
from tests.support.tiny_models import Tiny

SPEC = spec("feature-extraction", pooling="mean", max_length=128, text_length=128)
PLANS = 10_000
ONE, WIDE = Profile(opt=(1, 48), max=(1, 48)), Profile(opt=(4, 8), max=(16, 16))
WIDENED = Profile(min=(4, 16), opt=(4, 16), max=(8, 48))


def engine(profiles: tuple[Profile, ...]) -> Engine:
    return Engine(SPEC, "float16", Path("model.plan"), "tensorrt", "10.8", ("sm86",), profiles, "")


def random_profile(rng: random.Random) -> Profile:
    batches, lengths = (sorted(rng.randint(1, most) for _ in range(3)) for most in (40, 160))
    least, best, most = zip(batches, lengths, strict=True)
    return Profile(min=least, opt=best, max=most)


class Ranges(Session):
    """An engine's session: it refuses what no profile admits, widens to lower bounds, and adds up ids and tokens."""

    def __init__(self, shapes: ShapeLimits, asynchronous: bool = False) -> None:
        self.shapes, self.asynchronous = shapes, asynchronous
        self.ran: list[tuple[int, int]] = []

    def load(self, inputs: Mapping[str, Any]) -> None:
        self.asked = inputs["input_ids"].shape
        shape = self.shapes.fit(*self.asked)
        if shape is None:
            raise Unsupported(f"shape {list(self.asked)} is outside the engine's profiles")
        padding = [(0, wide - own) for wide, own in zip(shape, self.asked, strict=True)]
        self.ran.append(shape)
        self.inputs = {name: np.pad(value, padding) for name, value in inputs.items()}

    def step(self) -> None:
        pass

    def fetch(self) -> dict[str, Any]:
        mask = self.inputs["attention_mask"]
        sums = np.stack([(self.inputs["input_ids"] * mask).sum(axis=1), mask.sum(axis=1)], axis=1)
        return {"sentence_embedding": sums[: self.asked[0]].astype(np.float32)}


def test_every_planned_batch_fits_a_profile() -> None:
    rng, numbers = random.Random(0), np.random.default_rng(0)
    refused = planned = 0
    for turn in range(PLANS):
        shapes = engine(tuple(random_profile(rng) for _ in range(rng.randint(1, 4)))).shapes
        count = 150 if turn % 20 == 0 else rng.randint(1, 12)
        lengths = numbers.integers(1, shapes.longest + 1, count)
        costs = Costs(call=rng.choice((0.0, 8.0, 200.0)), launch=rng.choice((0.0, 2000.0)))
        limits = BatchLimits.of(Ranges(shapes, rng.random() < 0.5), SPEC, shapes, rng.choice((None, 100)))
        chosen = plan(SPEC, lengths, costs, limits)
        used = -np.sort(-chosen.rows.used)
        assert sum(high - low for low, high in chosen.batches) == count
        planned += len(chosen.batches)
        refused += sum(shapes.fit(high - low, int(used[low])) is None for low, high in chosen.batches)
    assert planned > 3 * PLANS and refused == 0


@pytest.mark.parametrize("profiles", [(ONE, WIDE), (WIDE, ONE), (ONE,), (WIDENED,), (WIDENED, ONE)], ids=str)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("measured", [False, True])
def test_an_engine_answers_every_text(
    tiny: Tiny, profiles: tuple[Profile, ...], asynchronous: bool, measured: bool
) -> None:
    directory = tiny("bert", "feature-extraction", "mean")
    of = checkpoint.load(directory, "auto").spec
    shapes = ShapeLimits(longest=min(48, of.max_length), profiles=profiles)
    session = Ranges(shapes, asynchronous)
    predict = Predictor(session, of, directory, shapes, costs=None if measured else Costs())
    rng = np.random.default_rng(1)
    texts = ["cat " * n for n in rng.integers(0, 60, 150)]
    got = predict(texts)
    expected = [(sum(tokens.ids), len(tokens)) for tokens in predict.tokenizer.encode(texts)]
    np.testing.assert_array_equal(got, np.array(expected, np.float32))
    assert all(any(profile.accepts(*shape) for profile in profiles) for shape in session.ran)
    np.testing.assert_array_equal(predict(texts[:1]), got[:1])


def test_texts_longer_than_every_profile_are_truncated(tiny: Tiny) -> None:
    directory = tiny("bert", "feature-extraction", "mean")
    of = checkpoint.load(directory, "auto").spec
    shapes = engine((WIDE,)).shapes
    assert shapes.longest == 16
    predict = Predictor(Ranges(shapes), of, directory, shapes, costs=Costs())
    answer = predict.answer(["cat " * 40, "cat"])
    assert answer.truncated == [0] and answer.values[:, 1].tolist() == [16, 3]


def test_costs_are_measured_on_shapes_that_a_profile_admits() -> None:
    for asynchronous in (False, True):
        for profiles in ((ONE, WIDE), (WIDENED,)):
            shapes = engine(profiles).shapes
            session = Ranges(shapes, asynchronous)
            cost_model.measure(session, SPEC, BatchLimits.of(session, SPEC, shapes))
            assert session.ran
