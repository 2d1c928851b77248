"""Sparse embeddings, of SPLADE models: the weights that are not 0 and their ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bertopt.core import Array


class Weights(NamedTuple):
    """A text's sparse embedding."""

    indices: NDArray[np.int64]
    """Ids of the vocabulary whose weights are not 0, ascending, [K]."""
    values: Array
    """Their weights, float32 [K]."""

    @classmethod
    def of(cls, vector: Array) -> Weights:
        """Return those of an embedding [V]."""
        indices = np.flatnonzero(vector)
        return cls(indices, vector[indices].astype(np.float32))

    def whole(self, size: int) -> Array:
        """Return the embedding [size]."""
        vector = np.zeros(size, np.float32)
        vector[self.indices] = self.values
        return vector

    def answer(self) -> dict[str, list[Any]]:
        """Return them as JSON takes them, and as databases of sparse vectors do; the values in the fewest digits that give the same float32."""
        return {"indices": self.indices.tolist(), "values": _in_fewest_digits(self.values).tolist()}


@np.errstate(all="ignore")
def _in_fewest_digits(values: Array) -> NDArray[np.float64]:
    """Return for each of `values` [K], above 0, the decimal number of fewest digits that rounds to the same float32, as `str` of a float32
    has it, in a tenth of the time."""
    exact = values.astype(np.float64)
    magnitude = np.floor(np.log10(exact))
    found = exact.copy()
    left = np.arange(len(values))
    # Nine significant digits tell all float32 apart; six find every number that has no more.
    for digits in range(6, 10):
        scale = 10.0 ** (digits - 1 - magnitude[left])
        found[left] = np.rint(exact[left] * scale) / scale
        left = left[found[left].astype(np.float32) != values[left]]
    found[left] = exact[left]
    return found
