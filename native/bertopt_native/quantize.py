"""Weights to int8 and bf16, in numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def to_bf16(a: Floats) -> NDArray[np.uint16]:
    """Return the bits of `a` as bf16, rounded to nearest even."""
    bits = np.ascontiguousarray(a, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def channel_scales(weight: Floats, candidates: int = 16) -> Floats:
    """Return a scale [N] for every channel of `weight` [N, K]: the one with least squared error from 0.7 to 1 of the range."""
    full = np.abs(weight).max(1) / np.float32(127)
    full = np.where(full > 0, full, np.float32(1)).astype(np.float32)
    best_error = np.full(len(weight), np.inf)
    best = full.copy()
    for fraction in np.linspace(0.7, 1.0, candidates, dtype=np.float32):
        scale = full * fraction
        q = np.clip(np.rint(weight / scale[:, None]), -127, 127)
        q *= scale[:, None]
        q -= weight
        error = np.einsum("nk,nk->n", q, q)
        better = error < best_error
        best_error[better], best[better] = error[better], scale[better]
    return best


def to_int8(weight: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Return `weight` [N, K] as symmetric int8 and its scales [N]."""
    blocks = [weight[i : i + 256] for i in range(0, len(weight), 256)]  # so that the candidates stay in the cache
    scale = np.concatenate([channel_scales(b) for b in blocks])
    return np.clip(np.rint(weight / scale[:, None]), -127, 127).astype(np.int8), scale
