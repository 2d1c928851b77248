"""A few figures of each tensor of a torch network, to check that two processes that opened one directory hold the same weights.

A hash would not do: weights that are computed when a stage is opened may differ in their last bits with the number of threads. Not seen:
changes that leave all figures of a tensor as they are or move them by less than `TOLERANCE`, such as one row of a million.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

from bertopt.core import Session

#: For each tensor, by name: its norm and projections.
Figures = dict[str, list[float]]

PROJECTIONS = 4
#: Largest difference of a figure, relative to the tensor's norm, between equal tensors.
TOLERANCE = 1e-3


def figures(session: Session) -> Figures | None:
    """Return the figures of the tensors of `session`'s torch network; None for other forms, whose weights are in their files."""
    network: Any = getattr(session, "network", None)
    if not hasattr(network, "state_dict"):
        return None
    return {name: _of(value) for name, value in network.state_dict().items() if hasattr(value, "is_quantized") and not value.is_quantized}


def checksums(session: Session) -> dict[str, int]:
    """Return a checksum of each parameter and stored buffer (such as a quantiser's ranges) of `session`'s torch network; empty for other
    forms. Calls must not change them: small changes would add up."""
    network: Any = getattr(session, "network", None)
    if not hasattr(network, "named_parameters"):
        return {}
    import torch

    stored = network.state_dict(keep_vars=True).items()
    plain = ((name, value.detach()) for name, value in stored if type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_quantized)
    return {name: zlib.crc32(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data) for name, value in plain}


def difference(mine: Figures, theirs: Figures) -> str | None:
    """Return the name of a tensor that differs or that only one has, or None."""
    for name in sorted(mine.keys() | theirs.keys()):
        a, b = mine.get(name), theirs.get(name)
        if a is None or b is None:
            return name
        size = max(a[0], b[0])
        if any(not math.isclose(x, y, rel_tol=0.0, abs_tol=TOLERANCE * size) for x, y in zip(a, b, strict=True)):
            return name
    return None


def _of(tensor: Any) -> list[float]:
    """Return the norm of a tensor, and its projections on outer products of random vectors, which need little memory."""
    import torch

    # Masks hold the lowest float, whose square is infinite.
    matrix = tensor.detach().cpu().float().nan_to_num().clamp(-1e6, 1e6)
    matrix = matrix.reshape(matrix.shape[0] if matrix.dim() > 1 else 1, -1)
    generator = torch.Generator().manual_seed(0)
    left = torch.randn((PROJECTIONS, matrix.shape[0]), generator=generator, dtype=torch.float32)
    right = torch.randn((matrix.shape[1], PROJECTIONS), generator=generator, dtype=torch.float32)
    projected = (left * (matrix @ right).T).sum(dim=1)
    return [float(matrix.norm()), *projected.tolist()]
