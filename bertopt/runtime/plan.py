"""Which texts are run together: rows, and batches of rows, for the least predicted time over all streams."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bertopt.core import Spec
from bertopt.packing import Rows, best_fit, singly, spread, whole
from bertopt.runtime.costs import Costs

if TYPE_CHECKING:
    from bertopt.core import Array

#: A batch has so many tokens that starting it is 1 / WORTH of its cost, but at least SMALLEST.
WORTH, SMALLEST = 32, 256
#: Rows of nearly one length are tried for at most so many texts; beyond, best fit leaves no gaps anyway.
FEW = 96
#: Of a stream's even share of the tokens, how much a batch may have: which is best is tried for few rows.
SHARES = (1.0, 1.1, 1.25, 1.5)


@dataclass(frozen=True)
class Room:
    """What bounds a batch: rows in it, tokens in it, tokens of one row; how many run at once; and the tokens of which
    each text takes a whole number."""

    rows: int
    tokens: int
    length: int
    streams: int = 1
    block: int = 1


@dataclass(frozen=True)
class Plan:
    """Rows, longest first, and where each batch of them ends."""

    rows: Rows
    ends: list[int]
    cost: float


def plan(spec: Spec, lengths: Array, costs: Costs, room: Room) -> Plan:
    """The cheapest of a few ways to run texts of `lengths` [N] tokens, N at least 1."""
    found = (each for rows in _ways(spec, whole(lengths, room.block), room) for each in _groupings(rows, costs, room))
    return min(found, key=lambda each: each.cost)


def _ways(spec: Spec, lengths: Array, room: Room) -> Iterator[Rows]:
    if spec.layout == "padded":
        yield singly(lengths)
        return
    total, longest = int(lengths.sum()), int(lengths.max())
    full = min(spec.row_length or room.length, room.length, max(longest, room.tokens))
    # Longer rows are fewer calls or fuller rows, shorter ones less attention. A text longer than a row has one of its own.
    yield singly(lengths)
    for length in dict.fromkeys((full, min(full, max(longest, full // 2)))):
        yield best_fit(lengths, length)
        if len(lengths) <= FEW:
            # One row for each stream, or two, …
            rows = spread(lengths, room.streams * -(-total // (room.streams * length)))
            if int(rows.used.max()) <= max(length, longest):
                yield rows


def _groupings(rows: Rows, costs: Costs, room: Room) -> Iterator[Plan]:
    used: list[int] = (-np.sort(-rows.used)).tolist()
    target = min(float(room.tokens), max(SMALLEST, WORTH * costs.call))
    # Every stream gets as many batches as the others, and all about as large: padding, which is not known yet, and whole
    # rows make them larger than their share of the tokens.
    turns = max(1, round(sum(used) / (target * room.streams)))
    share = sum(used) / (turns * room.streams)
    few = len(used) <= FEW
    for more in SHARES if few and room.streams > 1 else SHARES[:1]:
        for waste in (costs.call, float(room.tokens)) if few else (costs.call,):
            yield _priced(rows, list(_cut(used, min(float(room.tokens), share * more), waste, room)), costs, room)


def _priced(rows: Rows, cut: list[tuple[int, int]], costs: Costs, room: Room) -> Plan:
    """The time until the last stream is done, each batch going to the stream that is free first."""
    ends: list[int] = []
    loads = [0.0] * room.streams
    for count, width in cut:
        ends.append((ends[-1] if ends else 0) + count)
        loads[loads.index(min(loads))] += costs.batch(count, width)
    return Plan(rows, ends, max(loads))


def _cut(used: list[int], target: float, most: float, room: Room) -> Iterator[tuple[int, int]]:
    """Rows and width of each batch of about `target` tokens, of which `most` are padding; `used` is sorted, longest first."""
    # Padding that would cost more than another call is not computed.
    count, width, waste = 0, used[0], 0
    for tokens in used:
        full = (count + 0.5) * width > target or (count + 1) * width > room.tokens or count == room.rows
        if count and (full or waste + width - tokens > most):
            yield count, width
            count, width, waste = 0, tokens, 0
        count += 1
        waste += width - tokens
    yield count, width
