"""Time a session on inputs that it has not seen, and keep some of the outputs computed while the clock ran."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bertopt.core import Session, Spec
from bertopt.spec import Text

if TYPE_CHECKING:
    from bertopt.core import Array

#: Most samples kept of one race, and most bytes of them; at least one is kept.
SAMPLES, SAMPLE_BYTES = 4, 32 * 2**20

#: Inputs of one run, and its outputs.
Sample = tuple[Mapping[str, "Array"], Mapping[str, "Array"]]


def random_inputs(spec: Spec, shape: tuple[int, int], rng: np.random.Generator) -> dict[str, Array]:
    """Return random inputs [B, S] without padding: new ones each time, so that no cached result fits."""
    types = np.zeros(shape, np.int64)
    if spec.token_types > 1:
        types[:, shape[1] // 2 :] = 1
    return spec.padded_inputs(spec.random_ids(shape, rng), np.ones(shape, np.int64), types)


def rotate_words(text: Text, by: int) -> Text:
    """Return a text (or the second one of a pair) with its words rotated: as much work, but another input."""
    words = (text if isinstance(text, str) else text[1]).split(" ")
    start = by % len(words)
    rotated = " ".join(words[start:] + words[:start])
    return rotated if isinstance(text, str) else (text[0], rotated)


class ReservoirSample:
    """A uniform random choice of the runs added."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng, self.kept, self._added = rng, list[Sample](), 0

    def add(self, sample: Sample) -> None:
        self._added += 1
        size = sum(array.nbytes for part in sample for array in part.values())
        room = max(1, min(SAMPLES, SAMPLE_BYTES // max(1, size)))
        if len(self.kept) < room:
            self.kept.append(sample)
        elif (place := int(self.rng.integers(self._added))) < len(self.kept):
            self.kept[place] = sample

    def take(self) -> list[Sample]:
        """Return the samples and start again."""
        kept, self.kept, self._added = self.kept, [], 0
        return kept


def time_steps(
    session: Session, batches: Sequence[Mapping[str, Array]], keep: int
) -> tuple[list[float], float, Sample]:
    """Run once on each of `batches` and return the milliseconds of each step, copies excluded; how many milliseconds of work of step number
    `keep` were unfinished when its clock stopped (how much longer its first fetch took than a second one); and that step's inputs and outputs.
    """
    step_ms: list[float] = []
    unfinished_ms, kept = 0.0, (batches[keep], dict[str, "Array"]())
    for number, inputs in enumerate(batches):
        session.load(inputs)
        start = time.perf_counter()
        session.step()
        end = time.perf_counter()
        step_ms.append(1e3 * (end - start))
        if number == keep:
            outputs = session.fetch()
            first = time.perf_counter()
            session.fetch()
            unfinished_ms = 1e3 * ((first - end) - (time.perf_counter() - first))
            # A copy: the session may use the same memory for its next outputs.
            kept = (inputs, {name: np.array(value) for name, value in outputs.items()})
    return step_ms, unfinished_ms, kept
