"""Compare how embeddings rank texts: do those of a stage order them as the reference's do?"""

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
    """Return Spearman's rank correlation of all pairwise cosine similarities, and the mean overlap of each text's k nearest.

    Takes embeddings [N, H] of the same texts; k is 10, or N // 5 of fewer than 50. None below 3 texts, or where all
    similarities of the reference are equal; NaN where an embedding is not finite, or all similarities of the other are equal.
    """
    n = len(got)
    if n < FEWEST_TEXTS:
        return None
    k = min(10, max(1, n // 5))
    if not (np.isfinite(got).all() and np.isfinite(reference).all()):
        return Ranking(spearman=math.nan, top_k_overlap=math.nan, k=k, n=n)
    mine, theirs = _similarities(got), _similarities(reference)
    upper = np.triu_indices(n, 1)
    if np.ptp(theirs[upper]) == 0:
        return None
    return Ranking(
        spearman=_spearman(mine[upper], theirs[upper]),
        top_k_overlap=float(
            np.mean([len(a & b) / k for a, b in zip(_nearest(mine, k), _nearest(theirs, k), strict=True)])
        ),
        k=k, n=n,
    )  # fmt: skip


def rank_loss(got: Array, reference: Array) -> float | None:
    """Return 1 - Spearman's rank correlation of the similarities of at most `MOST_TEXTS` texts; None where `measure` is."""
    found = measure(got[:MOST_TEXTS], reference[:MOST_TEXTS])
    return None if found is None else 1 - found.spearman


def _spearman(a: Array, b: Array) -> float:
    """NaN where `a` is constant."""
    from scipy.stats import spearmanr

    return math.nan if np.ptp(a) == 0 else float(spearmanr(a, b).statistic)


def _similarities(vectors: Array) -> Array:
    """Cosines [N, N], rounded to where float32 embeddings still say something, so that equal texts tie for both models."""
    wide = vectors.astype(np.float64)
    unit = wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), _TINY)
    return np.asarray(np.round(unit @ unit.T, 6))


def _nearest(similarities: Array, k: int) -> list[set[int]]:
    """The k most similar others of each text, the first of equals."""
    alone = similarities.copy()
    np.fill_diagonal(alone, -np.inf)
    return [set(row[:k].tolist()) for row in np.argsort(-alone, axis=1, kind="stable")]
