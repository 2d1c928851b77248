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
        return {"indices": self.indices.tolist(), "values": self.values.astype(str).astype(float).tolist()}
