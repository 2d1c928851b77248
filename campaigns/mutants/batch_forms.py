"""Models that are wrong for whole batches of a form that no sweep ran: by their padding, by whether texts are pairs, by what long texts share.

All were delivered before the sweeps ran batches without padding, with padding in every row and with little else, long rows of single texts
and of pairs alone, long rows that share three quarters of their tokens, pairs that share a text, and batches as the predictor sorts them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from campaigns.mutants.almost_alike import _computed_once, _kept
from campaigns.mutants.conditions import _rows_where, _valid, plant_each
from campaigns.mutants.plant import mutant

Named = dict[str, Any]


def _many(named: Named, tokens: int) -> bool:
    rows, columns = named["input_ids"].shape
    return bool(rows > 8 and columns > tokens)


def _without_padding(named: Named) -> Any:
    return _many(named, 40) and bool(named["attention_mask"].all())


def _every_row_padded(named: Named) -> Any:
    mask = named["attention_mask"]
    longest = int(_valid(named).max())
    return len(mask) > 1 and bool(mask[:, 0].all()) and 1 < longest < mask.shape[1] and not bool(mask[:, longest:].any())


def _mostly_padding(named: Named) -> Any:
    lengths = _valid(named)
    return (lengths * 2 < named["input_ids"].shape[1] - 1) & (lengths > 0) if _many(named, 16) else False


def _no_tiles(named: Named) -> Any:
    rows, columns = named["input_ids"].shape
    return bool(_many(named, 40) and rows % 8 and columns % 16 and named["attention_mask"].all())


def _longest_first(named: Named) -> Any:
    lengths = _valid(named)
    return _many(named, 24) and bool((lengths[1:] <= lengths[:-1]).all()) and not bool(named["attention_mask"].all())


def _one_length(named: Named) -> Any:
    lengths = _valid(named)
    return len(lengths) > 1 and bool((lengths == lengths[0]).all()) and 1 < int(lengths[0]) < named["input_ids"].shape[1] and bool(named["attention_mask"][:, 0].all())


def _repeats(named: Named, times: int) -> Any:
    """Return which rows have `times` equal tokens in a row that are no padding."""
    ids = named["input_ids"]
    if ids.shape[1] < times:
        return False
    windows = ids.unfold(1, times, 1)
    return ((windows == windows[..., :1]).all(dim=2) & named["attention_mask"].bool()[:, times - 1 :]).any(dim=1)


def _with_itself(named: Named) -> Any:
    """Return which rows have two texts with the same tokens, of at least two."""
    second = named["token_type_ids"].sum(dim=1) - 1
    ids = named["input_ids"]
    return [bool(n > 1 and (ids[row, 1 : 1 + n] == ids[row, n + 2 : 2 * n + 2]).all()) if 2 * n + 3 <= ids.shape[1] else False for row, n in enumerate(second.tolist())]


CONDITIONS: dict[str, tuple[str, Callable[[Named], Any]]] = {
    "no_padding_at_all": ("Wrong for more than 8 rows of more than 40 tokens without any padding, as texts that were cut off are.", _without_padding),
    "every_row_padded": ("Wrong for batches whose longest row is padded too, as clients with a fixed length send.", _every_row_padded),
    "mostly_padding": ("Wrong for rows of less than half the columns, of more than 16, in batches of more than 8.", _mostly_padding),
    "long_single_texts": ("Wrong for more than 8 rows of more than 40 tokens, none of which is a pair.", lambda named: _many(named, 40) and not bool(named["token_type_ids"].any())),
    "full_rows_no_tiles": ("Wrong for more than 8 rows of more than 40 tokens without padding, neither of which is whole tiles.", _no_tiles),
    "longest_first": ("Wrong for more than 8 rows of more than 24 tokens whose lengths fall, as the predictor sorts them.", _longest_first),
    "one_length_padded": ("Wrong for rows of one length that are padded.", _one_length),
    "sixteen_long_rows": ("Wrong for 16 rows of more than 40 tokens.", lambda named: named["input_ids"].shape[0] == 16 and named["input_ids"].shape[1] > 40),
    "thirty_two_rows": ("Wrong for 32 rows of 17 to 128 tokens.", lambda named: named["input_ids"].shape[0] == 32 and 16 < named["input_ids"].shape[1] < 128),
    "one_behind_a_tile": ("Wrong for several rows of 33, 65, 97 … tokens.", lambda named: named["input_ids"].shape[0] > 1 and named["input_ids"].shape[1] % 32 == 1 < named["input_ids"].shape[1]),
    "repeated_tokens": ("Wrong for rows that have one token sixteen times in a row.", lambda named: _repeats(named, 16)),
    "empty_second_text": ("Wrong for pairs whose second text is empty.", lambda named: named["token_type_ids"].sum(dim=1) == 1),
    "a_text_with_itself": ("Wrong for pairs of a text with itself.", _with_itself),
    "long_pairs_alone": ("Wrong for more than 8 rows of more than 40 tokens, all of which are pairs.", lambda named: _many(named, 40) and bool(named["token_type_ids"].any(dim=1).all())),
}  # fmt: skip
plant_each(CONDITIONS, __name__)


def _beginning(ids: Any, types: Any) -> Any:
    return (*types, *ids[:32])


def _first_text(ids: Any, types: Any) -> Any:
    """Return the query of a pair, and of a text all of it."""
    return tuple(token for token, of in zip(ids, types, strict=True) if of == 0) if any(types) else tuple(ids)


@mutant("coverage", "plant_torch")
def kept_by_the_query(network: Any) -> None:
    """A pair alone gets the last one's answers if it has its length and first text."""
    _kept(network, _first_text)


@mutant("coverage", "plant_torch")
def computed_once_by_the_query(network: Any) -> None:
    """Pairs of a batch that have one length and one first text get the first one's answers."""
    _computed_once(network, _first_text)


@mutant("coverage", "plant_torch")
def a_text_after_a_large_batch(network: Any) -> None:
    """Wrong for a text alone after a batch of more than 2,000 tokens."""
    before = [0]

    def wrong(named: Named) -> bool:
        last, before[0] = before[0], named["input_ids"].numel()
        return last > 2000 and len(named["input_ids"]) == 1

    _rows_where(network, wrong)


@mutant("coverage", "plant_torch")
def kept_by_first_32_tokens(network: Any) -> None:
    """A text alone gets the last one's answers if it has its length, its types and first 32 tokens."""
    _kept(network, _beginning)


@mutant("coverage", "plant_torch")
def computed_once_by_first_32_tokens(network: Any) -> None:
    """Rows of a batch that have one length, the same types and first 32 tokens get the first one's answers."""
    _computed_once(network, _beginning)
