"""Models that are wrong for batches of some rows whose texts all have about one length, for the one row that is a pair or is none, and after
large batches.

All were delivered while the number of rows and the length of most batches were drawn one by one: with most seeds no batch was of such rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from campaigns.mutants.conditions import _rows_where, _valid, plant_each
from campaigns.mutants.plant import mutant

Named = dict[str, Any]


def _texts(rows: range, tokens: range) -> Callable[[Named], bool]:
    """Return whether a batch has one of `rows` and all its texts one of `tokens`."""

    def wrong(named: Named) -> bool:
        lengths = _valid(named)
        return len(lengths) in rows and int(lengths.min()) in tokens and int(lengths.max()) in tokens

    return wrong


def _one_of_many(pair: bool) -> Callable[[Named], Any]:
    """Return which row is the only `pair`, or the only one that is none, of more than 8."""

    def wrong(named: Named) -> Any:
        alone = named["token_type_ids"].any(dim=1) == pair
        return alone & (len(alone) > 8) & (int(alone.sum()) == 1)

    return wrong


CONDITIONS: dict[str, tuple[str, Callable[[Named], Any]]] = {
    "many_short_texts": ("Wrong for more than 8 rows, all of 5 to 8 tokens.", _texts(range(9, 1000), range(5, 9))),
    "few_texts_of_a_sentence": ("Wrong for 5 to 8 rows, all of 9 to 16 tokens.", _texts(range(5, 9), range(9, 17))),
    "thirty_two_sentences": ("Wrong for 32 rows, all of 9 to 16 tokens.", _texts(range(32, 33), range(9, 17))),
    "thirty_two_paragraphs": ("Wrong for 32 rows, all of 41 to 128 tokens.", _texts(range(32, 33), range(41, 129))),
    "twenty_long_texts": ("Wrong for 17 to 31 rows of more than 128 tokens.", _texts(range(17, 32), range(129, 1000))),
    "one_single_text": ("Wrong for the only row of more than 8 that is no pair.", _one_of_many(False)),
    "one_pair": ("Wrong for the only pair among more than 8 rows.", _one_of_many(True)),
}  # fmt: skip
plant_each(CONDITIONS, __name__)


def _right_after(network: Any, tokens: int, what: Callable[[Named], bool]) -> None:
    """Plant `what` as wrong right after a batch of more than `tokens` tokens."""
    before = [0]

    def wrong(named: Named) -> bool:
        last, before[0] = before[0], named["input_ids"].numel()
        return last > tokens and what(named)

    _rows_where(network, wrong)


@mutant("coverage", "plant_torch")
def several_rows_after_a_large_batch(network: Any) -> None:
    """Wrong for 2 to 8 rows right after a batch of more than 2,000 tokens."""
    _right_after(network, 2000, lambda named: 1 < len(named["input_ids"]) <= 8)


@mutant("coverage", "plant_torch")
def a_long_text_after_a_large_batch(network: Any) -> None:
    """Wrong for one text of more than 128 tokens right after a batch of more than 1,000 tokens."""
    _right_after(network, 1000, lambda named: len(named["input_ids"]) == 1 and named["input_ids"].shape[1] > 128)
