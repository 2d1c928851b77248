"""Tokens beside padding, by their distance from it: what reads padding by mistake changes a few tokens of each row, never its median."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bertopt.checks.probes import Probe
from bertopt.results import nan_as_inf

if TYPE_CHECKING:
    from bertopt.core import Array

#: Furthest token from padding, in places, whose differences are measured: ConvBERT's convolutions read four to each side.
FURTHEST = 4
#: Fewest tokens at one distance: few vary too much.
FEWEST = 16


def largest_median(probe: Probe, differences: Array) -> float | None:
    """Return the median of the `differences` [N] of the compared tokens at one distance behind padding or before it, where it is largest.

    None where nowhere as many as `FEWEST` tokens are compared, NaN where one of them is NaN.
    """
    mask = probe.inputs["attention_mask"] == 1
    behind, before = _distances(mask), _distances(mask[:, ::-1])[:, ::-1]
    medians = [
        float(np.median(some))
        for places in (behind[probe.compared], before[probe.compared])
        for distance in range(1, FURTHEST + 1)
        if len(some := differences[places == distance]) >= FEWEST
    ]
    return max(medians, key=nan_as_inf) if medians else None


def _distances(mask: Array) -> Array:
    """Return how many places each token [B, S] is behind the last padding before it; 0 for padding, -1 where none is before it."""
    columns = np.broadcast_to(np.arange(mask.shape[1]), mask.shape)
    last = np.maximum.accumulate(np.where(mask, -1, columns), axis=1)
    return np.where(last < 0, -1, columns - last)
