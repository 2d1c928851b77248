"""Plan which texts share rows and which rows share batches, for the least predicted time over all streams."""

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

#: Fewest tokens of a batch: enough that a call's fixed cost is 1 / WORTH of the total, and at least SMALLEST.
WORTH, SMALLEST = 32, 256
#: Most rows or texts for which the best batches are searched for and rows of similar length tried; with more, simpler methods leave few gaps.
FEW = 96
#: Largest costs of a batch that are tried, relative to an equal share of the work for each stream.
CAPS = np.geomspace(0.2, 1.5, 24)
#: How many sizes of rows are tried, the largest first.
TRIED = 6
#: With more texts, one-row batches are filled in the texts' order: a better packing would take longer to find than a GPU takes to run them.
MANY_TEXTS = 1024
#: On a GPU the best batches of many rows are searched for too, with possible cuts every 1 / OF_BATCH of a full batch or 1 / OF_ALL of all tokens,
#: if there are at most MOST_CUTS.
OF_BATCH, OF_ALL, MOST_CUTS = 16, 64, 1024


@dataclass(frozen=True)
class Plan:
    """Rows; batches in the order in which to run them, each a range of the rows sorted by length, longest first; and the predicted time."""

    rows: Rows
    batches: list[tuple[int, int]]
    cost: float


def plan(spec: Spec, lengths: Array, costs: Costs, limits: BatchLimits) -> Plan:
    """Return the cheapest of a few plans for texts of `lengths` [N] tokens, N at least 1."""
    if costs.tokens_max is not None:
        limits = replace(limits, tokens=min(limits.tokens, costs.tokens_max))
    if spec.one_row:
        return _one_row(spec, lengths, costs, limits)
    if spec.layout == "packed" and spec.row_length is None:
        return _one_row_each(lengths, limits)
    found = (_batched(rows, costs, limits) for rows in _ways(spec, whole(lengths, limits.block), limits))
    return min(found, key=lambda each: each.cost)


def _one_row(spec: Spec, lengths: Array, costs: Costs, limits: BatchLimits) -> Plan:
    """Return batches of one row each, with attention within each text. Rows are filled up to the cheapest of the lengths that the session has
    graphs for; padding up to such a length is computed too."""
    longest, total = int(lengths.max()), int(lengths.sum())
    bounds = (spec.row_length or limits.tokens, limits.tokens, *limits.buckets[-1:])
    most = max(longest, min(bounds))
    sizes = {most, *(size for size in limits.buckets if max(longest, SMALLEST) <= size <= most)}
    # A graph has a fixed number of places for texts: each text takes at least the tokens of one place.
    room = np.maximum(lengths, packing.TEXT_ROOM) if limits.buckets else lengths
    attention = costs.pair * lengths.astype(float) ** 2

    def way(size: int) -> Plan:
        # With many texts every row is nearly full in any order.
        fit = packing.in_order if len(lengths) > MANY_TEXTS else packing.best_fit
        rows = fit(room, max(size, int(room.max())))
        count = len(rows.used)
        # Remove the gaps after texts that are shorter than their place.
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
    # More rows are more launches and no less work, so mostly nothing is gained; with many rows only the last one has gaps.
    if len(lengths) <= MANY_TEXTS and best.cost > 2 * costs.call + max(2 * costs.launch, total + float(attention.sum())):
        best = min((best, *(way(size) for size in tried[-TRIED:-1])), key=lambda each: each.cost)
    return best


def _one_row_each(lengths: Array, limits: BatchLimits) -> Plan:
    """Return batches of one row, filled with the texts in their order up to the limit: the row length makes no difference here."""
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
    """Return the batches of these rows that all streams finish earliest."""
    used = -np.sort(-rows.used)
    # A batch that takes twice as long as a launch keeps the device busy even if the next one is smaller.
    target = min(float(limits.tokens), max(SMALLEST, WORTH * costs.call, 2 * costs.launch))
    if len(used) > FEW and costs.launch and limits.streams == 1 and len(cuts := _places(used, limits)) <= MOST_CUTS:
        (batches,) = _cheapest(used, cuts, np.array([np.inf]), costs, limits)
        return _priced(rows, batches, costs, limits)
    if len(used) > FEW:
        # Every stream gets the same number of batches of about the same size.
        turns = max(1, round(used.sum() / (target * limits.streams)))
        share = min(float(limits.tokens), float(used.sum()) / (turns * limits.streams))
        return _priced(rows, list(_cut(used.tolist(), share, costs, limits)), costs, limits)
    if costs.launch and limits.streams == 1:
        # Smaller batches would not finish earlier: each costs a launch.
        caps = np.array([np.inf])
    else:
        most = costs.call + target * (1 + costs.pair * int(used[0]))
        share = float((used + costs.pair * used * used).sum()) / limits.streams
        caps = np.unique(np.minimum(most, costs.call + np.maximum(CAPS * share, costs.launch)))
    found = _cheapest(used, np.arange(len(used) + 1), caps, costs, limits)
    priced = (_priced(rows, batches, costs, limits) for batches in found)
    return min(priced, key=lambda each: each.cost)


def _priced(rows: Rows, batches: list[tuple[int, int]], costs: Costs, limits: BatchLimits) -> Plan:
    """Return the plan with its time until the last stream is done: the most expensive batches first, each on the first free stream."""
    used = -np.sort(-rows.used)
    price = {(low, high): costs.batch(high - low, int(used[low])) for low, high in batches}
    order = sorted(batches, key=lambda batch: -price[batch])
    loads = [0.0] * limits.streams
    for batch in order:
        loads[loads.index(min(loads))] += price[batch]
    return Plan(rows, order, max(loads))


def _places(used: Array, limits: BatchLimits) -> Array:
    """Return the rows at which batches may begin, and the end. Between two of them is a small batch or one row."""
    places, step = [0], min(limits.tokens // OF_BATCH, int(used.sum()) // OF_ALL)
    while places[-1] < len(used) and len(places) <= MOST_CUTS:
        width = int(used[places[-1]])
        places.append(min(len(used), places[-1] + max(1, min(step // width, limits.most_rows(width)))))
    return np.array(places)


def _cheapest(used: Array, cuts: Array, caps: Array, costs: Costs, limits: BatchLimits) -> Iterator[list[tuple[int, int]]]:
    """Yield for each cap the cheapest batches between cuts, in which only batches that cannot be split may cost more than the cap.

    `used` [R] is sorted, longest first. Dynamic programming over the beginning of the last batch, for all caps at once.
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
    """Yield batches of about `target` tokens, not counting padding; `used` is sorted, longest first."""
    # A batch also ends where further padding would cost more than another call.
    low, width, held, most_rows = 0, used[0], 0, limits.most_rows(used[0])
    for place, tokens in enumerate(used):
        count = place - low
        full = held + tokens / 2 > target or (count + 1) * width > limits.tokens or count == most_rows
        if count and (full or (count + 1) * width - held - tokens > costs.call + costs.launch):
            yield low, place
            low, width, held, most_rows = place, tokens, 0, limits.most_rows(tokens)
        held += tokens
    yield low, len(used)
