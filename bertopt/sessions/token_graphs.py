"""CUDA graphs of one-row batches padded to a few sizes: a whole forward pass is one launch."""

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


#: Graphs of at least `MANY` tokens are captured with fewer places for texts, too: attention starts blocks for every place,
#: also for those without a text, 1,024 of them in a row of 16,384 tokens. What that costs has not been measured.
MANY, ROOMS = 1024, (4 * TEXT_ROOM, 2 * TEXT_ROOM, TEXT_ROOM)


@dataclass(frozen=True)
class Padded:
    """A batch as a graph takes it: arrays of `size` tokens with `places` for texts, and the tokens and texts [1, T], [1, K]
    that were asked for."""

    size: int
    places: int
    arrays: dict[str, Array]
    tokens: int
    texts: int


class TokenGraphs:
    """The graphs of `network`, for each of `sizes` tokens, with a place for a text every `TEXT_ROOM` tokens, or fewer where
    fewer do.

    All read the same input memory and share one pool: captured from the largest on, as `ahead` does, they take little
    more than that one; captured as they are needed, smallest first, up to three or four times as much. Not for several
    threads at once: the session gives them turns.
    """

    def __init__(self, network: Any, spec: Spec, sizes: tuple[int, ...], device: torch.device, queue: Queue) -> None:
        self.network, self.spec, self.sizes, self._queue = network, spec, sizes, queue
        self._graphs: dict[tuple[int, int], tuple[Any, Outputs]] = {}
        self._memory = {
            name: torch.zeros(1, _length(name, sizes[-1], sizes[-1] // TEXT_ROOM), dtype=torch.int64, device=device)
            for name in spec.network_inputs
        }

    @property
    def captured(self) -> int:
        """Sizes of which there is a graph."""
        return len({size for size, _ in self._graphs})

    def pad(self, inputs: Mapping[str, Array]) -> Padded | None:
        """Return the batch padded to the smallest size that holds its tokens and texts, or None for more than any holds."""
        tokens, texts = inputs["input_ids"].shape[1], max(1, int(inputs["segment_ids"].max()))
        size = next((size for size in self.sizes if size >= tokens and size // TEXT_ROOM >= texts), None)
        if size is None:
            return None
        places = next(places for places in self._places(size) if places >= texts)
        arrays = {}
        for name in self.spec.network_inputs:
            value = inputs[name][:, :texts] if name == "first_tokens" else inputs[name]
            fill = self.spec.pad_id if name == "input_ids" else 0
            arrays[name] = np.full((1, _length(name, size, places)), fill, np.int64)
            arrays[name][:, : value.shape[1]] = value
        return Padded(size, places, arrays, tokens, texts)

    def inputs(self, size: int, places: int) -> tuple[torch.Tensor, ...]:
        """Return the device's memory that the graph of `size` tokens with `places` reads."""
        return tuple(tensor[:, : _length(name, size, places)] for name, tensor in self._memory.items())

    def run(self, batch: Padded) -> Outputs:
        """Replay on what was put into `inputs`. The outputs are valid until the next run."""
        replay, outputs = self._captured(batch.size, batch.places)
        replay()
        kept = batch.texts if self.spec.granularity == "text" else batch.tokens
        return tuple(output[:, :kept] for output in outputs)

    def capture_all(self) -> None:
        """Capture every graph, from the largest on."""
        for size in reversed(self.sizes):
            for places in reversed(self._places(size)):
                self._captured(size, places)

    def _captured(self, size: int, places: int) -> tuple[Any, Outputs]:
        if (size, places) not in self._graphs:
            inputs = self.inputs(size, places)
            self._graphs[size, places] = self._queue.capture(lambda: self.network(*inputs))
        return self._graphs[size, places]

    @staticmethod
    def _places(size: int) -> list[int]:
        """How many places for texts there are graphs with, ascending."""
        return [size // room for room in (ROOMS if size >= MANY else (TEXT_ROOM,))]


def _length(name: str, size: int, places: int) -> int:
    return places if name == "first_tokens" else size
