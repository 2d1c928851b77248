"""Which texts are run together: rows, and batches of rows, for the least predicted time over all streams."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from bertopt.core import Spec
from bertopt.modeling import packing
from bertopt.modeling.packing import Rows, best_fit, singly, spread, whole
from bertopt.runtime.batch_limits import BatchLimits
from bertopt.runtime.cost_model import Costs

if TYPE_CHECKING:
    from bertopt.core import Array

#: Least tokens of a batch: as many as make starting it 1 / WORTH of its cost, but at least SMALLEST.
WORTH, SMALLEST = 32, 256
#: Most rows or texts for which the best batches are sought and rows of nearly one length tried; with more, simpler ways leave
#: no gaps anyway.
FEW = 96
#: What a batch may cost at most, in a stream's even share of the work: which of these gives the best batches is tried.
CAPS = np.geomspace(0.2, 1.5, 24)
#: How many sizes of rows are tried, the largest first.
TRIED = 6
#: Texts that are laid into one-row batches in their order, where there are more: finding the best places would take longer
#: than a GPU takes to run them.
MANY_TEXTS = 1024
#: For a device that a call launches the best batches of many rows are sought, too, among cuts at every such share of a full
#: batch or of all the tokens, while these are at most MOST_CUTS.
OF_BATCH, OF_ALL, MOST_CUTS = 16, 64, 1024


@dataclass(frozen=True)
class Plan:
    """Rows; batches of them in the order to run, each from one place to another in the rows' order by length, longest first;
    and the predicted time."""

    rows: Rows
    batches: list[tuple[int, int]]
    cost: float


def plan(spec: Spec, lengths: Array, costs: Costs, limits: BatchLimits) -> Plan:
    """Return the cheapest of a few ways to run texts of `lengths` [N] tokens, N at least 1."""
    if costs.tokens_max is not None:
        limits = replace(limits, tokens=min(limits.tokens, costs.tokens_max))
    if spec.one_row:
        return _one_row(spec, lengths, costs, limits)
    if spec.layout == "packed" and spec.row_length is None:
        return _one_row_each(lengths, limits)
    found = (_batched(rows, costs, limits) for rows in _ways(spec, whole(lengths, limits.block), limits))
    return min(found, key=lambda each: each.cost)


def _one_row(spec: Spec, lengths: Array, costs: Costs, limits: BatchLimits) -> Plan:
    """Batches of one row each, whose attention goes from text to text. Rows are filled up to one of the sizes that the
    session has graphs of, the one that costs least: padding up to a graph's size is computed too."""
    longest, total = int(lengths.max()), int(lengths.sum())
    bounds = (spec.row_length or limits.tokens, limits.tokens, *limits.buckets[-1:])
    most = max(longest, min(bounds))
    sizes = {most, *(size for size in limits.buckets if max(longest, SMALLEST) <= size <= most)}
    # A text takes at least its share of a graph's places for texts.
    room = np.maximum(lengths, packing.TEXT_ROOM) if limits.buckets else lengths
    attention = costs.pair * lengths.astype(float) ** 2

    def way(size: int) -> Plan:
        # Of many texts every row is nearly full whatever lies in it.
        fit = packing.in_order if len(lengths) > MANY_TEXTS else packing.best_fit
        rows = fit(room, max(size, int(room.max())))
        count = len(rows.used)
        # Without the gaps that the room leaves behind short texts.
        order = np.lexsort((rows.column, rows.row))
        used = np.bincount(rows.row, weights=lengths, minlength=count).astype(np.int64)
        column = np.empty(len(lengths), np.int64)
        column[order] = np.cumsum(lengths[order]) - lengths[order] - (np.cumsum(used) - used)[rows.row[order]]
        filled = np.bincount(rows.row, weights=room, minlength=count)
        run = np.maximum(used, [limits.bucket(int(tokens)) for tokens in filled])
        work = run + np.bincount(rows.row, weights=attention, minlength=count)
        cost = float((costs.call + np.maximum(work, costs.launch)).sum())
        return Plan(Rows(rows.row, column, used), [(place, place + 1) for place in range(count)], cost)

    tried = sorted(size for size in sizes if size <= 2 * total) or [min(sizes)]
    best = way(tried[-1])
    # Two rows are two launches and no less work: mostly there is nothing to look for, and of many rows only the last has gaps.
    if len(lengths) <= MANY_TEXTS and best.cost > 2 * costs.call + max(2 * costs.launch, total + float(attention.sum())):
        best = min((best, *(way(size) for size in tried[-TRIED:-1])), key=lambda each: each.cost)
    return best


def _one_row_each(lengths: Array, limits: BatchLimits) -> Plan:
    """One row, the texts in their order, for each batch of as many tokens as it may have: nothing depends on the rows."""
    row, column = np.zeros(len(lengths), np.int64), np.cumsum(lengths) - lengths
    used = [0]
    if int(lengths.sum()) > limits.tokens:
        for text, length in enumerate(lengths.tolist()):
            if used[-1] and used[-1] + length > limits.tokens:
                used.append(0)
            row[text], column[text] = len(used) - 1, used[-1]
            used[-1] += length
    else:
        used = [int(lengths.sum())]
    return Plan(Rows(row, column, np.array(used, np.int64)), [(n, n + 1) for n in range(len(used))], float(lengths.sum()))


def _ways(spec: Spec, lengths: Array, limits: BatchLimits) -> Iterator[Rows]:
    if spec.layout == "padded":
        yield singly(lengths)
        return
    total, longest = int(lengths.sum()), int(lengths.max())
    full = min(spec.row_length or limits.length, limits.length, max(longest, limits.tokens))
    # Longer rows are fewer calls or fuller rows, shorter ones less attention. A text longer than a row has a row to itself.
    yield singly(lengths)
    for length in dict.fromkeys((full, min(full, max(longest, full // 2)))):
        yield best_fit(lengths, length)
        if len(lengths) <= FEW:
            # One row for each stream, or two, …
            rows = spread(lengths, limits.streams * -(-total // (limits.streams * length)))
            if int(rows.used.max()) <= max(length, longest):
                yield rows


def _batched(rows: Rows, costs: Costs, limits: BatchLimits) -> Plan:
    """The batches that are done first on all streams."""
    used = -np.sort(-rows.used)
    # A batch that takes twice its launch keeps the device at its rate although the next one may be smaller.
    target = min(float(limits.tokens), max(SMALLEST, WORTH * costs.call, 2 * costs.launch))
    if len(used) > FEW and costs.launch and limits.streams == 1 and len(cuts := _places(used, limits)) <= MOST_CUTS:
        (batches,) = _cheapest(used, cuts, np.array([np.inf]), costs, limits)
        return _priced(rows, batches, costs, limits)
    if len(used) > FEW:
        # Every stream gets as many batches as the others, and all about as large.
        turns = max(1, round(used.sum() / (target * limits.streams)))
        share = min(float(limits.tokens), float(used.sum()) / (turns * limits.streams))
        return _priced(rows, list(_cut(used.tolist(), share, costs, limits)), costs, limits)
    if costs.launch and limits.streams == 1:
        # Smaller batches would end no sooner: each costs a launch.
        caps = np.array([np.inf])
    else:
        most = costs.call + target * (1 + costs.pair * int(used[0]))
        share = float((used + costs.pair * used * used).sum()) / limits.streams
        caps = np.unique(np.minimum(most, costs.call + np.maximum(CAPS * share, costs.launch)))
    found = _cheapest(used, np.arange(len(used) + 1), caps, costs, limits)
    priced = (_priced(rows, batches, costs, limits) for batches in found)
    return min(priced, key=lambda each: each.cost)


def _priced(rows: Rows, batches: list[tuple[int, int]], costs: Costs, limits: BatchLimits) -> Plan:
    """The time until the last stream is done: dearest batches first, each to the stream that is free first."""
    used = -np.sort(-rows.used)
    price = {(low, high): costs.batch(high - low, int(used[low])) for low, high in batches}
    order = sorted(batches, key=lambda batch: -price[batch])
    loads = [0.0] * limits.streams
    for batch in order:
        loads[loads.index(min(loads))] += price[batch]
    return Plan(rows, order, max(loads))


def _places(used: Array, limits: BatchLimits) -> Array:
    """Return places to cut at, first and last included. What is between two is a small batch, or one row."""
    places, step = [0], min(limits.tokens // OF_BATCH, int(used.sum()) // OF_ALL)
    while places[-1] < len(used) and len(places) <= MOST_CUTS:
        width = int(used[places[-1]])
        places.append(min(len(used), places[-1] + max(1, min(step // width, limits.most_rows(width)))))
    return np.array(places)


def _cheapest(used: Array, cuts: Array, caps: Array, costs: Costs, limits: BatchLimits) -> Iterator[list[tuple[int, int]]]:
    """For each cap the batches between places to cut at that cost least in all, none more than it but the smallest.

    `used` [R] is sorted, longest first. By dynamic programming over where the last batch begins, for all caps at once.
    """
    count = len(cuts) - 1
    longest = used[cuts[:-1]]
    rows, width = cuts[None, 1:] - cuts[:-1, None], longest[:, None].astype(float)
    price = costs.batch(rows, width)
    most_rows = np.array([limits.most_rows(length) for length in longest.tolist()])[:, None]
    price[(rows < 1) | (rows > most_rows) | ((rows > 1) & (rows * width > limits.tokens))] = np.inf
    least = np.zeros((len(caps), count + 1))
    begin = np.zeros((len(caps), count + 1), np.int64)
    for end in range(1, count + 1):
        last = price[:end, end - 1]
        allowed = last <= caps[:, None]
        allowed[:, -1] = True
        total = np.where(allowed, least[:, :end] + last, np.inf)
        begin[:, end] = total.argmin(axis=1)
        least[:, end] = total.min(axis=1)
    for froms in begin.tolist():
        batches, end = [], count
        while end:
            batches.append((int(cuts[froms[end]]), int(cuts[end])))
            end = froms[end]
        yield batches


def _cut(used: list[int], target: float, costs: Costs, limits: BatchLimits) -> Iterator[tuple[int, int]]:
    """Batches of about `target` tokens besides padding; `used` is sorted, longest first."""
    # Padding that would cost more than another call is not computed.
    low, width, held, most_rows = 0, used[0], 0, limits.most_rows(used[0])
    for place, tokens in enumerate(used):
        count = place - low
        full = held + tokens / 2 > target or (count + 1) * width > limits.tokens or count == most_rows
        if count and (full or (count + 1) * width - held - tokens > costs.call + costs.launch):
            yield low, place
            low, width, held, most_rows = place, tokens, 0, limits.most_rows(tokens)
        held += tokens
    yield low, len(used)
