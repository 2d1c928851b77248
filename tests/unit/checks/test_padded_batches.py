"""Models that are wrong by how a batch is padded, and where the sweeps see it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from bertopt.checks import padded_batches, sweep_plan
from bertopt.checks.probes import Probe
from tests.support.specs import MINILM, WHOLE

#: Masks [B, S] that a model was wrong for, and delivered.
FAULTS: dict[str, Callable[[np.ndarray], bool]] = {
    "many rows without padding": lambda mask: bool(mask.all()) and len(mask) > 8 and mask.shape[1] > 40,
    "every row of a few padded": lambda mask: 1 < len(mask) < 9 and 1 < mask.sum(axis=1).max() < mask.shape[1],
    "every row of many padded": lambda mask: len(mask) > 8 and 1 < mask.sum(axis=1).max() < mask.shape[1],
    "many rows without padding, no tiles": lambda mask: bool(mask.all()) and len(mask) > 8 and len(mask) % 8 != 0 and mask.shape[1] % 16 != 0 and mask.shape[1] > 40,
    "rows of one length": lambda mask: len(mask) > 8 and len(set(mask.sum(axis=1))) == 1 and not mask.all(),
    "longest first": lambda mask: len(mask) > 8 and mask.shape[1] > 24 and bool((np.diff(mask.sum(axis=1)) <= 0).all()) and not mask.all() and bool(mask[0].all()),
    "16 rows": lambda mask: len(mask) == 16 and mask.shape[1] > 40 and not mask.all(),
    "24 rows": lambda mask: len(mask) == 24 and mask.shape[1] > 16 and not mask.all(),
    "32 rows": lambda mask: len(mask) == 32 and mask.shape[1] > 16 and not mask.all(),
    "a multiple of 32 and one more": lambda mask: len(mask) > 1 and mask.shape[1] > 32 and mask.shape[1] % 32 == 1,
    "a multiple of 64": lambda mask: len(mask) > 1 and mask.shape[1] % 128 == 64,
    "padded to 128": lambda mask: 1 < len(mask) < 9 and mask.shape[1] == 128 and not mask.all(),
    "padded to 256": lambda mask: 1 < len(mask) < 9 and mask.shape[1] == 256 and not mask.all(),
    "mostly padding": lambda mask: len(mask) > 8 and mask.shape[1] > 24 and bool((mask.sum(axis=1) * 4 < mask.shape[1]).any()),
}


def _masks(every: bool) -> list[np.ndarray]:
    probes: list[Probe] = sweep_plan.plan(MINILM, 5, 8192, (101, 102)).of(False, WHOLE, every=every)
    return [probe.inputs["attention_mask"] for probe in probes]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_model_that_is_wrong_by_its_batches_padding_is_run_there(fault: str) -> None:
    assert any(map(FAULTS[fault], _masks(every=True)))
    assert len(_masks(every=False)) < 60, "stages that are not delivered run few batches"


def test_calls_of_pairs_alone_and_of_none_have_long_rows() -> None:
    """A model that was wrong for more than 8 rows of more than 40 tokens, none of which is a pair, was delivered; or all of which are."""
    types = [probe.inputs["token_type_ids"] for probe in sweep_plan.plan(MINILM, 5, 8192, (101, 102)).of(False, WHOLE)]
    long = [each.max(axis=1) > 0 for each in types if len(each) > 8 and each.shape[1] > 36]
    assert any(not pairs.any() for pairs in long) and any(pairs.all() for pairs in long) and any(0 < pairs.sum() < len(pairs) for pairs in long)
    assert all(each[:, 0].max() == 0 for each in types if len(each) > 8 and (each.max(axis=1) > 0).all() and each.shape[1] > 60), "pairs have a first text"


def test_documents_fill_a_batch_where_it_takes_seconds_at_most() -> None:
    """A model that was wrong for more than 8 rows of more than 256 tokens could be delivered."""
    reads_256, large = MINILM.model_copy(update={"text_length": 256}), MINILM.model_copy(update={"layers": 24, "hidden": 1024})
    for spec, most_tokens, expected in ((reads_256, 8192, 0), (MINILM, 8192, 1), (large, 8192, 0), (large, 65_536, 1), (MINILM, 65_536, 2)):
        for seed in range(20):
            plan = sweep_plan.plan(spec, seed, most_tokens, (101, 102))
            documents = [probe for probe in plan.of(True, WHOLE) if probe.name.endswith("documents")]
            assert len(documents) == expected and not {probe.name for probe in documents} & plan.first
            for probe, (least, most, tokens) in zip(documents, padded_batches.DOCUMENTS, strict=False):
                lengths = probe.inputs["attention_mask"].sum(axis=1)
                assert least <= len(lengths) <= most and lengths.min() >= 256 and 257 <= lengths.max() == probe.shape[1] <= 512
                assert lengths.max() * len(lengths) <= tokens


@pytest.mark.parametrize("longest", [1, 2, 3, 4, 5, 12, 512])
@pytest.mark.parametrize("most_tokens", [64, 8192])
def test_rows_are_padded_on_the_right_and_have_tokens(longest: int, most_tokens: int) -> None:
    spec = MINILM.model_copy(update={"max_length": longest, "text_length": longest})
    for seed in range(20):
        for what, mask in padded_batches.masks(spec, np.random.default_rng(seed), most_tokens):
            assert mask.shape[1] <= longest and (mask.size <= most_tokens or mask.shape[1] == 1)
            lengths = mask.sum(axis=1)
            assert lengths.min() >= min(padded_batches.SHORTEST, mask.shape[1]) and (np.diff(mask, axis=1) <= 0).all()
            whole, short = lengths.min() == mask.shape[1], lengths.max() < mask.shape[1]
            padded = {
                "rows without padding": whole, "rows without padding, no tiles": whole, "every row padded": short,
                "rows of one length, padded": short and lengths.min() == lengths.max(),
            }  # fmt: skip
            assert padded.get(what, lengths.max() == mask.shape[1] > lengths.min())
