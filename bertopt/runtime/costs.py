"""What a run costs, measured in tokens, so that batches and rows can be chosen."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bertopt import packing
from bertopt.core import Session, Spec

#: Shapes [B, S] timed: a small one, one of many tokens, and (packed) as many tokens in longer rows, whose attention costs more.
SMALL, WIDE, LONG = (2, 16), (8, 32), (1, 256)
#: A shape is timed again until it has taken this long, at least and at most so many times.
ENOUGH_S, FEWEST, MOST = 0.03, 3, 12
#: A call costs no more than so many tokens: what says more was disturbed. On a GPU, where it may, batches are full anyway.
HIGHEST_CALL = 512.0
#: Work in Python for one batch, which `Session.run` does not show (arrays, answers).
AROUND_S = 1e-4


@dataclass(frozen=True)
class Costs:
    """A batch of R rows with L tokens each costs `call` + R (L + `pair` L²) tokens."""

    call: float = 64.0
    pair: float = 0.0

    def batch(self, rows: int, length: int) -> float:
        return self.call + rows * (length + self.pair * length * length)


def expected(spec: Spec) -> Costs:
    """Without measuring. A layer does about 24 H² operations for a token and 4 H for each pair of tokens in attention
    (Hoffmann et al. 2022, appendix F)."""
    return Costs(pair=1 / (6 * spec.hidden))


def measure(session: Session, spec: Spec, max_shape: tuple[int, int] | None) -> Costs:
    """Time `session` (which takes `spec.network_inputs`) on two shapes, or three where it is packed: as long as 1,000
    tokens or more take. Where times make no sense, as on a machine busy with something else, `expected` fills in."""
    known = expected(spec)
    rows, longest = max_shape or (WIDE[0], spec.max_length)
    shapes = [(min(b, rows), min(s, longest, spec.max_length)) for b, s in (SMALL, WIDE, LONG)]
    (small, wide, long) = ([b * s for b, s in shapes][i] for i in range(3))
    dice = np.random.default_rng(0)
    small_s, wide_s = (_seconds(session, spec, shape, dice) for shape in shapes[:2])
    if wide <= small or wide_s <= small_s:
        return known
    pair = known.pair
    if spec.layout == "packed" and long == wide and shapes[2][1] > shapes[1][1]:
        # As many tokens, in rows of another length: what is more is attention.
        more = _seconds(session, spec, shapes[2], dice) / wide_s - 1
        pair = float(np.clip(more / (shapes[2][1] - shapes[1][1]), pair / 4, pair * 16))
    token_s = (wide_s - small_s) / (wide - small)
    call = max(0.0, small_s - small * token_s + AROUND_S) / token_s
    return Costs(call=min(call, HIGHEST_CALL), pair=pair)


def _seconds(session: Session, spec: Spec, shape: tuple[int, int], dice: np.random.Generator) -> float:
    """The shortest run on random texts that fill [B, S], after one to warm up."""
    best, spent = np.inf, 0.0
    for number in range(MOST + 1):
        inputs = _random(spec, shape, dice)
        start = time.perf_counter()
        session.run(inputs)
        taken = time.perf_counter() - start
        if number:
            best, spent = min(best, taken), spent + taken
            if spent >= ENOUGH_S and number >= FEWEST:
                break
    return float(best)


def _random(spec: Spec, shape: Sequence[int], dice: np.random.Generator) -> dict[str, np.ndarray]:
    rows, length = shape
    lengths = np.full(rows, length)
    flat = packing.flat(spec, dice.integers(0, spec.vocabulary, rows * length), None, lengths)
    (batch,) = packing.batches(spec, flat, packing.singly(lengths), [rows])
    return batch.inputs
