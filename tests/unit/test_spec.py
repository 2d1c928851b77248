"""Which inputs a model takes, and which shapes a form runs."""

from __future__ import annotations

import random

import numpy as np

from bertopt.core import Profile, ShapeLimits, Spec
from tests.support.specs import TEXT, TWO_LABELS

LONG, WIDE = Profile(min=(1, 1), opt=(1, 256), max=(1, 512)), Profile(min=(1, 1), opt=(8, 64), max=(32, 128))
EIGHT = Profile(min=(8, 64), opt=(8, 64), max=(32, 128))


def test_without_profiles_only_the_length_counts() -> None:
    limits = ShapeLimits(longest=64)
    assert limits.fit(1000, 64) == (1000, 64) and limits.fit(1, 65) is None
    assert (limits.most_rows(64), limits.most_rows(65)) == (None, 0)


def test_no_profile_takes_the_largest_batch_of_one_with_the_length_of_another() -> None:
    limits = ShapeLimits(longest=512, profiles=(LONG, WIDE))
    assert limits.fit(32, 512) is None
    assert limits.fit(32, 128) == (32, 128) and limits.fit(1, 512) == (1, 512)
    assert (limits.most_rows(128), limits.most_rows(129), limits.most_rows(513)) == (32, 1, 0)


def test_the_tightest_profile_is_chosen() -> None:
    general = Profile(min=(1, 1), opt=(8, 128), max=(32, 512))
    limits = ShapeLimits(longest=512, profiles=(general, LONG, WIDE))
    assert limits.choose(1, 300) == (1, (1, 300))
    assert limits.choose(8, 100) == (2, (8, 100))
    assert limits.choose(8, 300) == (0, (8, 300))


def test_a_small_batch_is_widened_to_lower_bounds_where_nothing_takes_it_as_it_is() -> None:
    assert ShapeLimits(longest=512, profiles=(EIGHT,)).fit(3, 20) == (8, 64)
    assert ShapeLimits(longest=512, profiles=(EIGHT, WIDE)).choose(3, 20) == (1, (3, 20))


def test_whatever_is_fitted_some_profile_accepts() -> None:
    dice = random.Random(0)
    for _ in range(300):
        profiles = []
        for _ in range(dice.randint(1, 4)):
            batches, lengths = (sorted(dice.randint(1, top) for _ in range(3)) for top in (32, 512))
            profiles.append(Profile(min=(batches[0], lengths[0]), opt=(batches[1], lengths[1]), max=(batches[2], lengths[2])))
        limits = ShapeLimits(longest=512, profiles=tuple(profiles))
        for _ in range(30):
            batch, sequence = dice.randint(1, 40), dice.randint(1, 512)
            fitted = limits.fit(batch, sequence)
            most = limits.most_rows(sequence)
            assert most is not None and (fitted is not None) == (batch <= most)
            if fitted is not None:
                assert fitted[0] >= batch and fitted[1] >= sequence
                assert any(profile.accepts(*fitted) for profile in profiles)


def test_manifests_of_0_1_are_read() -> None:
    fields = {"family": "bert", "task": "fill-mask", "inputs": ["input_ids"], "outputs": ["logits"], "layers": 1, "heads": 1,
              "hidden": 8, "vocabulary": 9, "token_types": 1, "pad_id": 0, "max_length": 8, "text_length": 8, "parameters": 1}  # fmt: skip
    assert Spec.model_validate(fields | {"shift_free": True}).left_padding_invariant
    assert Spec.model_validate(fields | {"left_padding_invariant": True}).left_padding_invariant


def test_padded_inputs_are_those_that_the_model_takes() -> None:
    ids, mask = np.array([[5, 6, 3]]), np.array([[1, 1, 0]])
    found = TEXT.padded_inputs(ids, mask == 1)
    assert list(found) == list(TEXT.inputs) and {array.dtype for array in found.values()} == {np.dtype(np.int64)}
    assert found["attention_mask"].tolist() == mask.tolist() and not found["token_type_ids"].any()
    assert TEXT.padded_inputs(ids, mask, ids)["token_type_ids"].tolist() == ids.tolist()
    assert list(TWO_LABELS.padded_inputs(ids, mask)) == ["input_ids", "attention_mask"]
