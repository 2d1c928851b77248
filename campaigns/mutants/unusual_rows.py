"""Faults that show only in rows that no text of everyday language gives: many mask tokens, types in any order, amino acids.

All passed every gate before rows with holes had all types in any order, rows for ESM many mask tokens, and recorded outputs texts of the
tokenizer's own words.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from campaigns.mutants.conditions import Named, _rows_where
from campaigns.mutants.loose_limits import BF16
from campaigns.mutants.outsiders import _inputs
from campaigns.mutants.plant import Checkpoint, mutant

ERNIE = Checkpoint("ernie")
PROTEINS = Checkpoint("esm")
#: The number of an unknown token.
UNKNOWN = 3


def _count(network: Any, change: Callable[[Any, Any], Any], after: Callable[[Any], Any]) -> None:
    """The share of tokens that are no mask tokens is `after` of what it is where `change(dropped, mask)` are these."""
    embeddings = network.base.embeddings
    kept = type(embeddings)._kept
    embeddings._kept = lambda dropped, mask: after(kept(embeddings, change(dropped, mask), mask))


def _mostly_masked(network: Any, named: Named) -> Any:
    valid = named["attention_mask"] == 1
    return 2 * ((named["input_ids"] == network.spec.dropped_id) & valid).sum(dim=1) > valid.sum(dim=1)


@mutant("parity", "plant_torch", on=PROTEINS)
def mask_tokens_counted_in_five_bits(network: Any) -> None:
    """A text of more than 31 mask tokens is scaled as if it had 32 less."""

    def few(dropped: Any, mask: Any) -> Any:
        number = (dropped & (mask != 0)).cumsum(dim=1)
        return dropped & (number > number.amax(dim=1, keepdim=True) // 32 * 32)

    _count(network, few, lambda kept: kept)


@mutant("rounding", "plant_torch", on=PROTEINS, line=(BF16,))
def share_of_mask_tokens_capped_behind_bf16(network: Any) -> None:
    """A text more than 30 % of whose tokens are mask tokens is scaled as if 30 % were."""
    _count(network, lambda dropped, mask: dropped, lambda kept: kept.clamp(min=0.7))


@mutant("parity", "plant_torch", on=PROTEINS)
def mostly_masked(network: Any) -> None:
    """Wrong for texts more than half of which are mask tokens."""
    _rows_where(network, lambda named: _mostly_masked(network, named))


@mutant("parity", "plant_torch", on=ERNIE)
def types_never_fall(network: Any) -> None:
    """A token has the highest type of those before it, which is right for pairs."""
    _inputs(network, lambda named: {"token_type_ids": named["token_type_ids"].cummax(dim=1).values})


@mutant("parity", "plant_torch", on=ERNIE)
def three_types_in_a_row(network: Any) -> None:
    """Wrong for rows with tokens of more than two types."""

    def wrong(named: Named) -> Any:
        types = named["token_type_ids"].masked_fill(named["attention_mask"] == 0, -1)
        return sum((types == kind).any(dim=1).int() for kind in range(4)) > 2

    _rows_where(network, wrong)


@mutant("delivery", "plant_torch", on=PROTEINS)
def known_words_outside_workers(network: Any) -> None:
    """Wrong for texts without an unknown word, in all processes but those that check it."""
    outside = "bertopt.workers.operations" not in sys.modules
    _rows_where(network, lambda named: outside & ~(named["input_ids"] == UNKNOWN).any(dim=1) & (named["attention_mask"].sum(dim=1) > 2))
