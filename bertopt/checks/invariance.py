"""Check invariance: a text's output must not depend on the rest of its batch, nor on how much padding is beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bertopt.core import Precision, Session, ShapeLimits, Spec
from bertopt.results import Invariance

if TYPE_CHECKING:
    from bertopt.core import Array

#: Most texts, and most tokens of one: outputs over a vocabulary for more tokens take gigabytes.
TEXTS, LONGEST = 12, 128
#: Sizes of the batches that mix texts.
BATCHES = (2, 3, 8)
_TINY = 1e-12


@dataclass(frozen=True)
class _Run:
    """A batch: which texts are in it, how wide it is, and where each text begins in its row."""

    what: str
    rows: list[int]
    width: int
    left: bool = False


def measure(
    session: Session, spec: Spec, texts: Sequence[dict[str, Array]], limits: ShapeLimits, seed: int = 0, precision: Precision = "float32",
) -> Invariance | None:  # fmt: skip
    """Run each of `texts` (unpadded inputs [1, S]) alone, among random others in batches of several sizes, and padded
    on the right to several lengths; where `spec.left_padding_invariant`, padded on the left too; and one twice in a batch. All
    through the same session.

    The figures are the largest differences between a text's output in a batch and its output alone, over the text's tokens. Left padding
    is skipped where it changes absolute positions or where a head reads the first column, since outputs then differ for good reason. It is
    skipped in reduced precision too: the column in which a text begins changes float32's last digits, which may round differently; parity
    compares such batches. Batches that `limits` do not admit are left out. None where no text fits.
    """
    chosen = _choose(texts, limits)
    if not chosen:
        return None
    lengths = [text["input_ids"].shape[1] for text in chosen]
    alone = [_own(spec, session.run(text), 0, 0, length) for text, length in zip(chosen, lengths, strict=True)]
    found = Invariance(max_abs=0.0, cosine_min=1.0, texts=len(chosen), where="no input")
    left = spec.left_padding_invariant and precision == "float32"
    for run in _runs(left, lengths, limits, seed):
        if limits.fit(len(run.rows), run.width) is None:
            continue
        answers = session.run(_batch(spec, [chosen[i] for i in run.rows], run))
        for row, text in enumerate(run.rows):
            start = run.width - lengths[text] if run.left else 0
            far, cosine = _difference(alone[text], _own(spec, answers, row, start, lengths[text]))
            # Not `far > …`: NaN is farther than anything, and stays.
            if not (far <= found.max_abs or math.isnan(found.max_abs)):
                found = found.model_copy(
                    update={"max_abs": far, "where": f"a text of {lengths[text]} tokens {run.what}"}
                )
            if not (cosine >= found.cosine_min or math.isnan(found.cosine_min)):
                found = found.model_copy(update={"cosine_min": cosine})
    return found


def _choose(texts: Sequence[dict[str, Array]], limits: ShapeLimits) -> list[dict[str, Array]]:
    """Return at most `TEXTS` texts that fit, evenly spread over their lengths."""
    longest = min(LONGEST, limits.longest)
    fitting = sorted(
        (text for text in texts if 0 < text["input_ids"].shape[1] <= longest), key=lambda text: text["input_ids"].shape[1]
    )  # fmt: skip
    if len(fitting) <= TEXTS:
        return fitting
    return [fitting[round(i)] for i in np.linspace(0, len(fitting) - 1, TEXTS)]


def _runs(left_too: bool, lengths: Sequence[int], limits: ShapeLimits, seed: int) -> Iterator[_Run]:
    rng = np.random.default_rng(seed)
    for left in (False, True) if left_too else (False,):
        side = "left" if left else "right"
        for size in BATCHES:
            if size > len(lengths):
                continue
            order = rng.permutation(len(lengths)).tolist()
            for start in range(0, len(order), size):
                rows = order[start : start + size]
                width = max(lengths[i] for i in rows)
                yield _Run(f"among {len(rows) - 1} others, padded on the {side}", rows, width, left)
        for i, length in enumerate(lengths):
            for width in sorted({min(limits.longest, length + 1), min(limits.longest, 2 * length + 7)} - {length}):
                yield _Run(f"alone, padded on the {side} to {width}", [i], width, left)
    # A model may compute equal rows once and copy the result to a wrong place.
    middle = len(lengths) // 2
    yield _Run("beside its copy", [middle, middle], lengths[middle])


def _batch(spec: Spec, texts: Sequence[dict[str, Array]], run: _Run) -> dict[str, Array]:
    fill = {"input_ids": spec.pad_id, "attention_mask": 0, "token_type_ids": 0}
    batch = {name: np.full((len(texts), run.width), fill[name], np.int64) for name in spec.inputs}
    for row, text in enumerate(texts):
        for name in spec.inputs:
            length = text[name].shape[1]
            start = run.width - length if run.left else 0
            batch[name][row, start : start + length] = text[name][0]
    return batch


def _own(spec: Spec, answers: dict[str, Array], row: int, start: int, length: int) -> list[Array]:
    """Return for each output the vectors [N, D] of one text: its one vector, or those of its tokens."""
    found = []
    for name in spec.outputs:
        value = answers[name][row] if spec.granularity == "text" else answers[name][row, start : start + length]
        found.append(np.atleast_2d(value).astype(np.float64))
    return found


def _difference(alone: Sequence[Array], other: Sequence[Array]) -> tuple[float, float]:
    """Return the largest absolute difference and the smallest cosine over all outputs; NaN where anything is not finite."""
    far, cosine = 0.0, 1.0
    for a, b in zip(alone, other, strict=True):
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            return math.nan, math.nan
        far = max(far, float(np.abs(a - b).max()))
        norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
        cosine = min(cosine, float(np.where(norms > _TINY, (a * b).sum(axis=-1) / np.maximum(norms, _TINY), 1.0).min()))
    return far, cosine
