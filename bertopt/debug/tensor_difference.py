"""How far a tensor is from the reference's on the tokens that count, and where errors jump."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bertopt.checks.probes import Probe
from bertopt.debug.findings import Row

if TYPE_CHECKING:
    from bertopt.core import Array

#: A jump is this many times the median contribution, and this share of the largest.
JUMP, SHARE = 5.0, 0.25
#: Rounding of float32: no contribution below it is a jump.
FLOOR = 1e-5


@dataclass(frozen=True)
class Difference:
    """How far two tensors are apart, and the place [row, token, element] of the largest absolute difference."""

    rel_l2: float
    max_abs: float
    row: int
    token: int | None
    element: int


def differ(got: Array, reference: Array, probe: Probe) -> Difference:
    """Compare [B, S, D] on valid tokens, or [B, D] on rows that have any. Whatever is not finite makes NaN."""
    mask = probe.inputs["attention_mask"].astype(bool)
    by_token = reference.ndim == 3
    where = np.argwhere(mask) if by_token else np.flatnonzero(probe.rows)[:, None]
    kept = mask if by_token else probe.rows
    a, b = got[kept].astype(np.float64), reference[kept].astype(np.float64)
    if not a.size:
        return Difference(0.0, 0.0, 0, 0 if by_token else None, 0)
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.abs(a - b)
    difference[~np.isfinite(a)] = np.nan
    # argmax of NaN is the first NaN: exactly the element to name.
    index, element = (int(i) for i in np.unravel_index(int(difference.argmax()), difference.shape))
    position = [int(i) for i in where[index]]
    return Difference(
        relative(difference, b), float(difference[index, element]), position[0], position[1] if by_token else None, element,
    )  # fmt: skip


def relative(difference: Array, reference: Array) -> float:
    """Return the norm of `difference`, relative to that of `reference`."""
    return float(np.linalg.norm(difference) / max(float(np.linalg.norm(reference)), 1e-12))


def first_jump(rows: Sequence[Row]) -> Row | None:
    """The first row whose own error is far beyond what the rest contribute, or None where none stands out.

    Far is `JUMP` times the median and `SHARE` of the largest, so that neither rounding nor a model's usual
    weak spot is named instead of the culprit.
    """
    if not rows:
        return None
    # What is not finite in a free run was so first where it began; a tensor fed alone may be computed otherwise.
    broken = next((row for row in rows if not (math.isfinite(row.own) and math.isfinite(row.total))), None)
    if broken is not None:
        return broken
    own = [row.own for row in rows]
    bound = max(JUMP * float(np.median(own)), SHARE * max(own), FLOOR)
    return next((row for row, value in zip(rows, own, strict=True) if value >= bound), None)
