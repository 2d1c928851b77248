"""One-row batches padded to a few sizes, each captured once and replayed: one launch for a whole forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bertopt.core import Spec
from bertopt.modeling.packing import TEXT_ROOM
from bertopt.sessions.cuda_queue import Outputs, Queue

if TYPE_CHECKING:
    from bertopt.core import Array


@dataclass(frozen=True)
class Padded:
    """A batch as a graph takes it: arrays of its `size`, and the tokens and texts [1, T], [1, K] that were asked for."""

    size: int
    arrays: dict[str, Array]
    tokens: int
    texts: int


class TokenGraphs:
    """The graphs of `network`, one for each of `sizes` tokens, with a place for a text every `TEXT_ROOM` tokens.

    All read the same input memory and share one pool: captured from the largest on, as `ahead` does, they take little
    more than that one; captured as they are needed, smallest first, up to three or four times as much. Not for several
    threads at once: the session gives them turns.
    """

    def __init__(self, network: Any, spec: Spec, sizes: tuple[int, ...], device: torch.device, queue: Queue) -> None:
        self.network, self.spec, self.sizes, self._queue = network, spec, sizes, queue
        self._graphs: dict[int, tuple[Any, Outputs]] = {}
        self._memory = {
            name: torch.zeros(1, _length(name, sizes[-1]), dtype=torch.int64, device=device) for name in spec.network_inputs
        }

    @property
    def captured(self) -> int:
        return len(self._graphs)

    def pad(self, inputs: Mapping[str, Array]) -> Padded | None:
        """Return the batch padded to the smallest size that holds its tokens and texts, or None for more than any holds."""
        tokens, texts = inputs["input_ids"].shape[1], max(1, int(inputs["segment_ids"].max()))
        size = next((size for size in self.sizes if size >= tokens and size // TEXT_ROOM >= texts), None)
        if size is None:
            return None
        arrays = {}
        for name in self.spec.network_inputs:
            value = inputs[name][:, :texts] if name == "first_tokens" else inputs[name]
            fill = self.spec.pad_id if name == "input_ids" else 0
            arrays[name] = np.pad(value, ((0, 0), (0, _length(name, size) - value.shape[1])), constant_values=fill)
        return Padded(size, arrays, tokens, texts)

    def inputs(self, size: int) -> tuple[torch.Tensor, ...]:
        """Return the device's memory that the graph of `size` reads."""
        return tuple(tensor[:, : _length(name, size)] for name, tensor in self._memory.items())

    def run(self, batch: Padded) -> Outputs:
        """Replay on what was put into `inputs`. The outputs are valid until the next run."""
        self.capture(batch.size)
        replay, outputs = self._graphs[batch.size]
        replay()
        kept = batch.texts if self.spec.granularity == "text" else batch.tokens
        return tuple(output[:, :kept] for output in outputs)

    def capture(self, size: int) -> None:
        if size not in self._graphs:
            inputs = self.inputs(size)
            self._graphs[size] = self._queue.capture(lambda: self.network(*inputs))


def _length(name: str, size: int) -> int:
    return size // TEXT_ROOM if name == "first_tokens" else size
