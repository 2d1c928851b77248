"""Which vectors of scores give other labels than the reference's; labels that tie there count as the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from bertopt.core import Array

#: Two labels tie that differ by at most this share of the largest deviation from the vector's mean, and 8 float32 steps of its
#: largest element: scores of 1000.000 to 1000.005 have an order.
TIE, TIE_STEPS = 1e-5, 8


def of_sets(got: Array, reference: Array) -> Array:
    """Return for each vector [N, D] whether its set of labels (scores above one half) differs; a score of one half counts as either."""
    ties = TIE * np.abs(reference).max(axis=-1, keepdims=True, initial=0.0)
    return np.asarray((((got > 0) != (reference > 0)) & (np.abs(reference) > ties) | np.isnan(got)).any(axis=-1))


def of_best(got: Array, reference: Array) -> Array:
    """Return for each vector [N, D] whether its best label differs and does not tie with the reference's."""
    if reference.shape[-1] < 2:
        return np.zeros(len(reference), bool)
    chosen = np.take_along_axis(reference, got.argmax(axis=-1, keepdims=True), axis=-1)[..., 0]
    spread = np.abs(reference - reference.mean(axis=-1, keepdims=True)).max(axis=-1, initial=0.0)
    ties = TIE * spread + TIE_STEPS * np.finfo(np.float32).eps * np.abs(reference).max(axis=-1, initial=0.0)
    other = got.argmax(axis=-1) != reference.argmax(axis=-1)
    return np.asarray(other & ((reference.max(axis=-1) - chosen > ties) | np.isnan(got).any(axis=-1)))
