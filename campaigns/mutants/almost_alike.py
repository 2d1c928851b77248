"""Models that take one text for another that is almost like it, and such as are wrong for many texts or callers at once.

Nearly all were delivered before the sweeps ran rows that are almost alike, packed rows of many texts, every length as one text, texts in
calls of their own, and the artefact in several threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from campaigns.mutants.conditions import _rows_where
from campaigns.mutants.plant import MEAN, SDPA, mutant

Named = dict[str, Any]
Key = Callable[[Any, Any], Any]

#: What a cache or a search for rows that are there twice takes for a text: its ids and token types.
KEYS: dict[str, tuple[str, Key]] = {
    "first_tokens": ("its types and first 8 tokens", lambda ids, types: (*types, *ids[:8])),
    "tokens_in_any_order": ("its types and its tokens in any order", lambda ids, types: (*types, *sorted(ids))),
    "ids_without_types": ("its ids without their types", lambda ids, types: tuple(ids)),
    "both_ends": ("its types and the three tokens at each end", lambda ids, types: (*types, *ids[:3], *ids[-3:])),
}


def _keys(named: Named, key: Key) -> list[Any]:
    arrays = [named["input_ids"].tolist(), named["token_type_ids"].tolist(), named["attention_mask"].sum(dim=1).tolist()]
    return [(length, key(ids[:length], types[:length])) for ids, types, length in zip(*arrays, strict=True)]


def _answers(network: Any, change: Callable[[Named, tuple[Any, ...]], tuple[Any, ...]]) -> None:
    network.register_forward_hook(lambda module, inputs, answers: change(dict(zip(network.inputs, inputs, strict=True)), answers))


def _kept(network: Any, key: Key) -> None:
    """The answers to one text are the last one's, if that had this key."""
    last: dict[Any, tuple[Any, ...]] = {}

    def change(named: Named, answers: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(named["input_ids"]) > 1:
            return answers
        (of,) = _keys(named, key)
        if of not in last:
            last.clear()
            last[of] = tuple(answer.clone() for answer in answers)
        return last[of]

    _answers(network, change)


def _computed_once(network: Any, key: Key) -> None:
    """Rows of one batch that have one key get the first one's answers."""

    def change(named: Named, answers: tuple[Any, ...]) -> tuple[Any, ...]:
        first: dict[Any, int] = {}
        rows = [first.setdefault(of, row) for row, of in enumerate(_keys(named, key))]
        return tuple(answer[rows] for answer in answers)

    _answers(network, change)


for _name, (_about, _key) in KEYS.items():

    def _plant(network: Any, key: Key = _key) -> None:
        _kept(network, key)

    _plant.__name__, _plant.__doc__ = f"kept_by_{_name}", f"A text alone gets the last one's answers if it has its length, {_about}."
    mutant("coverage", "plant_torch")(_plant)


@mutant("coverage", "plant_torch")
def computed_once_whatever_the_types(network: Any) -> None:
    """Rows of a batch that differ in their token types alone get the first one's answers."""
    _computed_once(network, KEYS["ids_without_types"][1])


@mutant("coverage", "plant_torch")
def one_text_of_37(network: Any) -> None:
    """Wrong for one text of 37 tokens, right for it in a batch."""
    _rows_where(network, lambda named: tuple(named["input_ids"].shape) == (1, 37))


@mutant("coverage", "plant_torch")
def a_batch_of_one_text(network: Any) -> None:
    """Wrong where a batch holds one text more than six times and nothing else."""
    _rows_where(network, lambda named: len(named["input_ids"]) > 6 and bool((named["input_ids"] == named["input_ids"][0]).all()))


@mutant("coverage", "plant_torch", on=MEAN, line=(SDPA, {"pass": "pack_sequences"}))
def texts_numbered_in_8_bits(network: Any) -> None:
    """Packed rows: of more than 128 texts in a batch the last row's get each other's embeddings."""

    def change(named: Named, answers: tuple[Any, ...]) -> tuple[Any, ...]:
        if int(named["segment_ids"].amax(dim=1).sum()) <= 128:
            return answers
        changed = answers[0].clone()
        changed[-1] = changed[-1].roll(1, dims=0)
        return (changed, *answers[1:])

    _answers(network, change)


@mutant("delivery", "plant_torch")
def in_a_third_thread(network: Any) -> None:
    """Wrong once more than two threads have called."""
    callers = set[int]()

    def wrong(named: Named) -> bool:
        callers.add(threading.get_ident())
        return len(callers) > 2

    _rows_where(network, wrong)
