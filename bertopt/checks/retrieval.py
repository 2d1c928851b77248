"""How well scores order the passages of each query: nDCG@10 and recall@10, for labelled pairs that share their first text.

Not looked at: passages without a label, of which a corpus has most, and the order of queries with one passage or equal labels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from bertopt.core import Array

#: Number of best passages that count.
TOP = 10


def rows_by_query(queries: Sequence[str], relevance: Array) -> list[Array]:
    """Return the rows of each query that has passages of different relevance [N], in order; none where a label is negative."""
    rows = defaultdict[str, list[int]](list)
    for row, query in enumerate(queries):
        rows[query].append(row)
    ranked = [np.array(some) for some in rows.values() if np.ptp(relevance[some]) > 0]
    return ranked if (relevance >= 0).all() else []


def ndcg(relevance: Array, scores: Array) -> float:
    """Return the nDCG of one query's passages [N] (Järvelin and Kekäläinen 2002): gains in the order of the scores, discounted by log2 of
    the rank, relative to the best order. Passages with equal scores share their ranks. NaN where a score is NaN."""
    worth = np.where(np.arange(len(scores)) < TOP, 1 / np.log2(np.arange(len(scores)) + 2), 0)
    return _gained(worth, relevance, scores) / float((np.sort(relevance)[::-1] * worth).sum())


def recall(relevance: Array, scores: Array) -> float:
    """Return the share of one query's relevant passages (above 0) that are among the first `TOP`. NaN where a score is NaN."""
    relevant = (relevance > 0).astype(float)
    return _gained(np.where(np.arange(len(scores)) < TOP, 1.0, 0), relevant, scores) / float(relevant.sum())


def _gained(worth: Array, gains: Array, scores: Array) -> float:
    """Return the sum of the gains [N], each times the weight of its rank [N]; passages with equal scores get the mean of their weights."""
    if np.isnan(scores).any():
        return float("nan")
    _, of, counts = np.unique(-scores, return_inverse=True, return_counts=True)
    ends, sums = np.cumsum(counts), np.concatenate([[0.0], np.cumsum(worth)])
    return float((gains * ((sums[ends] - sums[ends - counts]) / counts)[of]).sum())
