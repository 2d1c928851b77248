"""Time a session on inputs it has not seen, and keep some of what it answered while the clock ran."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bertopt.core import Session, Spec

if TYPE_CHECKING:
    from bertopt.core import Array

#: At most so many samples are kept of one race, in at most so many bytes, but at least one.
SAMPLES, SAMPLE_BYTES = 4, 32 * 2**20

#: Inputs of one run, and its answers.
Sample = tuple[Mapping[str, "Array"], Mapping[str, "Array"]]


def fresh(spec: Spec, shape: tuple[int, int], dice: np.random.Generator) -> dict[str, Array]:
    """Random inputs [B, S] without padding. No two are alike, so that nothing remembered can be an answer."""
    ids = dice.integers(0, spec.vocabulary - 1, shape)
    # No valid token may be the padding token: RoBERTa counts its positions by it.
    ids += ids >= spec.pad_id
    types = np.zeros(shape, np.int64)
    if spec.token_types > 1:
        types[:, shape[1] // 2 :] = 1
    arrays = {"input_ids": ids, "attention_mask": np.ones(shape, np.int64), "token_type_ids": types}
    return {name: arrays[name] for name in spec.inputs}


def turned(text: str, by: int) -> str:
    """The same words, beginning with another one: as much work, but another input."""
    words = text.split(" ")
    start = by % len(words)
    return " ".join(words[start:] + words[:start])


class Keeper:
    """A random choice of the runs it was given, each as likely as any other."""

    def __init__(self, dice: np.random.Generator) -> None:
        self.dice, self.kept, self._given = dice, list[Sample](), 0

    def give(self, sample: Sample) -> None:
        self._given += 1
        room = max(1, min(SAMPLES, SAMPLE_BYTES // max(1, sum(a.nbytes for part in sample for a in part.values()))))
        if len(self.kept) < room:
            self.kept.append(sample)
        elif (place := int(self.dice.integers(self._given))) < len(self.kept):
            self.kept[place] = sample

    def take(self) -> list[Sample]:
        taken, self.kept, self._given = self.kept, [], 0
        return taken


def time_steps(
    session: Session, batches: Sequence[Mapping[str, Array]], keep: int
) -> tuple[list[float], float, Sample]:
    """Run once on each of `batches`: milliseconds of each step, copies outside.

    Also how many milliseconds longer the answers of step number `keep` took to fetch than fetching them again does:
    that much work was still to be done when its clock stopped. And that step's inputs and answers.
    """
    taken: list[float] = []
    late, kept = 0.0, (batches[keep], dict[str, "Array"]())
    for number, inputs in enumerate(batches):
        session.load(inputs)
        start = time.perf_counter()
        session.step()
        end = time.perf_counter()
        taken.append(1e3 * (end - start))
        if number == keep:
            answers = session.fetch()
            first = time.perf_counter()
            session.fetch()
            late = 1e3 * ((first - end) - (time.perf_counter() - first))
            # A copy: the session may use the same memory for its next answers.
            kept = (inputs, {name: np.array(value) for name, value in answers.items()})
    return taken, late, kept
