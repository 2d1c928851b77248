"""Put the outputs of batches back in the order of the texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from bertopt.core import Spec
from bertopt.modeling.packing import Batch
from bertopt.runtime.sparse import Weights

if TYPE_CHECKING:
    from bertopt.core import Array


class Collector:
    """The outputs of `count` texts: one array [N, D], or for each text an array of its tokens by output name.

    Of a SPLADE's only the weights that are not 0 are kept: whole, a thousand texts take 100 MB.
    """

    def __init__(self, spec: Spec, count: int) -> None:
        self.spec, self.count = spec, count
        self._dense = spec.granularity == "text" and not spec.sparse
        self.by_text: list[dict[str, Array]] = [] if self._dense else [{} for _ in range(count)]
        self._array: Array | None = None
        self._put = 0

    def put(self, start: int, batch: Batch, outputs: Mapping[str, Array]) -> None:
        """Add the outputs of a batch whose text number 0 is number `start` here."""
        self._put += len(batch.texts)
        if self._dense:
            values = batch.by_text(outputs[self.spec.outputs[0]])
            if self._array is None:
                self._array = np.empty((self.count, values.shape[-1]), np.float32)
            self._array[start + batch.texts] = values
            return
        for text, named in zip(batch.texts.tolist(), of_texts(self.spec, batch, outputs), strict=True):
            self.by_text[start + text] = named

    @property
    def array(self) -> Array:
        """The outputs [N, D] of a model with one vector for each text."""
        if self.spec.sparse:
            return np.stack([one.whole(self.spec.output_size) for one in self.weights])
        assert self._array is not None and self._put == self.count, f"{self._put} of {self.count} texts were run"
        return self._array

    @property
    def weights(self) -> list[Weights]:
        """The embeddings of a SPLADE."""
        assert self._put == self.count, f"{self._put} of {self.count} texts were run"
        return [Weights(**named) for named in self.by_text]


def of_texts(spec: Spec, batch: Batch, outputs: Mapping[str, Array]) -> list[dict[str, Array]]:
    """Return the outputs of each text of a batch by name, in the order of `batch.texts`: [D] (see `of_vectors`), or [S, …] of its tokens."""
    if spec.granularity == "text":
        return of_vectors(spec, batch.by_text(outputs[spec.outputs[0]]))
    ends = np.cumsum(batch.flat.lengths[batch.texts])[:-1]
    parts = [np.split(batch.by_token(outputs[name]), ends) for name in spec.outputs]
    return [dict(zip(spec.outputs, values, strict=True)) for values in zip(*parts, strict=True)]


def of_vectors(spec: Spec, vectors: Iterable[Array]) -> list[dict[str, Array]]:
    """Return each vector [D] under its output's name; of a SPLADE the fields of its `Weights`."""
    if spec.sparse:
        return [Weights.of(vector)._asdict() for vector in vectors]
    return [{spec.outputs[0]: vector} for vector in vectors]
