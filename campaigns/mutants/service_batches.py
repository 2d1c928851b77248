"""Batches that services make, and memory that is read before it is written.

Of the conditions the sweeps met `five_copies` and `short_to_long` with no seed before, `one_short_row` and rows padded to a tile with few.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from campaigns.mutants.almost_alike import _answers
from campaigns.mutants.conditions import _valid, plant_each
from campaigns.mutants.plant import mutant

Named = dict[str, Any]
#: Ids that frame a text, and of the mask.
BEGIN, END, MASK = 2, 3, 4


def _rising(named: Named) -> bool:
    steps = _valid(named).diff()
    return len(steps) > 7 and bool((steps >= 0).all()) and bool((steps > 0).any())


def _first_text_longer(named: Named) -> Any:
    second = (named["token_type_ids"] * named["attention_mask"]).sum(dim=1)
    return (second > 0) & (_valid(named) > 3 * second)


def _special_alone(named: Named) -> Any:
    ids = named["input_ids"]
    special = (ids == BEGIN) | (ids == END) | (ids == MASK) | (named["attention_mask"] == 0)
    return special.all(dim=1) & (_valid(named) > 2)


def _five_copies(named: Named) -> Any:
    ids = named["input_ids"]
    return ((ids[:, None] == ids[None]).all(dim=2).sum(dim=1) > 4) & bool((ids != ids[0]).any())


def _one_short(named: Named) -> Any:
    lengths = _valid(named)
    return (lengths < 6) & (int((lengths > 20).sum()) == len(lengths) - 1) & (len(lengths) > 1)


CONDITIONS: dict[str, tuple[str, Callable[[Named], Any]]] = {
    "first_text_longer": ("Wrong for pairs whose first text is more than twice as long as the second.", _first_text_longer),
    "special_tokens_alone": ("Wrong for texts of written special tokens alone.", _special_alone),
    "five_copies": ("Wrong for rows that stand in a batch five times or more, beside others.", _five_copies),
    "short_to_long": ("Wrong for more than 8 rows whose lengths rise.", _rising),
    "one_short_row": ("Wrong for a row of fewer than 6 tokens beside rows that are all longer than 20.", _one_short),
    "short_row_padded_to_64": (
        "Wrong for rows of fewer than 10 tokens in batches of 64 columns.",
        lambda named: (_valid(named) < 10) & (named["input_ids"].shape[1] == 64) & (len(named["input_ids"]) > 1),
    ),
}  # fmt: skip
plant_each(CONDITIONS, __name__)


@mutant("parity", "plant_torch")
def read_before_written(network: Any) -> None:
    """Numbers of a large buffer that nobody wrote are added to the logits: zeros, where memory is fresh from the kernel."""
    import torch

    network.planted = torch.empty(1 << 20)
    _answers(network, lambda named, answers: (answers[0] + network.planted[: answers[0].shape[1]].nan_to_num(0, 0, 0).clamp(-9, 9), *answers[1:]))
