"""Put the outputs of batches back in the order of the texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from bertopt.core import Spec
from bertopt.modeling.packing import Batch

if TYPE_CHECKING:
    from bertopt.core import Array


class Collector:
    """The outputs of `count` texts: one array [N, D], or for each text an array of its tokens by output name."""

    def __init__(self, spec: Spec, count: int) -> None:
        self.spec, self.count = spec, count
        self.by_text: list[dict[str, Array]] = []
        self._array: Array | None = None
        self._put = 0
        if spec.granularity != "text":
            self.by_text = [{} for _ in range(count)]

    def put(self, start: int, batch: Batch, outputs: Mapping[str, Array]) -> None:
        """Add the outputs of a batch whose text number 0 is number `start` here."""
        if self.spec.granularity == "text":
            values = batch.by_text(outputs[self.spec.outputs[0]])
            if self._array is None:
                self._array = np.empty((self.count, values.shape[-1]), np.float32)
            self._array[start + batch.texts] = values
            self._put += len(batch.texts)
            return
        ends = np.cumsum(batch.flat.lengths[batch.texts])[:-1]
        for name in self.spec.outputs:
            parts = np.split(batch.by_token(outputs[name]), ends)
            for text, part in zip(batch.texts.tolist(), parts, strict=True):
                self.by_text[start + text][name] = part

    @property
    def array(self) -> Array:
        """The outputs [N, D] of a model with one vector for each text."""
        assert self._array is not None and self._put == self.count, f"{self._put} of {self.count} texts were run"
        return self._array
