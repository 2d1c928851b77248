"""Rank agreement: do the embeddings of a stage order texts as the reference's do?"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from bertopt.results import Ranking

if TYPE_CHECKING:
    from bertopt.core import Array

#: Texts whose pairwise similarities are ranked: 256 make 32,640 pairs.
MOST_TEXTS = 256
#: Below this there is no order to speak of.
FEWEST_TEXTS = 3
_TINY = 1e-12


def measure(got: Array, reference: Array) -> Ranking | None:
    """Spearman's rank correlation of all pairwise cosine similarities, and the mean overlap of each text's k nearest.

    Takes embeddings [N, H] of the same texts; k is 10, or N // 5 of fewer than 50. None below 3 texts; NaN where an
    embedding is not finite, or all similarities of one side are equal.
    """
    n = len(got)
    if n < FEWEST_TEXTS:
        return None
    k = min(10, max(1, n // 5))
    if not (np.isfinite(got).all() and np.isfinite(reference).all()):
        return Ranking(spearman=math.nan, top_k_overlap=math.nan, k=k, n=n)
    mine, theirs = _similarities(got), _similarities(reference)
    upper = np.triu_indices(n, 1)
    return Ranking(
        spearman=_correlation(ranks(mine[upper]), ranks(theirs[upper])),
        top_k_overlap=float(
            np.mean([len(a & b) / k for a, b in zip(_nearest(mine, k), _nearest(theirs, k), strict=True)])
        ),
        k=k, n=n,
    )  # fmt: skip


def ranks(values: Array) -> Array:
    """Ranks from 1; equal values share the mean of theirs."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[which])


def _similarities(vectors: Array) -> Array:
    """Cosines [N, N], rounded to where float32 embeddings still say something, so that equal texts tie on both sides."""
    wide = vectors.astype(np.float64)
    unit = wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), _TINY)
    return np.asarray(np.round(unit @ unit.T, 6))


def _nearest(similarities: Array, k: int) -> list[set[int]]:
    """The k most similar others of each text, the first of equals."""
    alone = similarities.copy()
    np.fill_diagonal(alone, -np.inf)
    return [set(row[:k].tolist()) for row in np.argsort(-alone, axis=1, kind="stable")]


def _correlation(a: Array, b: Array) -> float:
    """Pearson's, NaN where either side is constant."""
    a, b = a - a.mean(), b - b.mean()
    scale = math.sqrt(float((a * a).sum() * (b * b).sum()))
    return float((a * b).sum() / scale) if scale > 0 else math.nan
