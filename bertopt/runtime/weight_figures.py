"""A few figures of each tensor of a torch network: whether two processes that opened one directory hold the same weights.

Weights may be computed when a stage is opened, on another number of threads, so that they differ in their last bits; a hash would.
Not seen: what leaves all figures of a tensor as they are, and differences below `TOLERANCE`: of one row of a million.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

from bertopt.core import Session

#: For each tensor, by name: its norm and projections.
Figures = dict[str, list[float]]

PROJECTIONS = 4
#: Difference of a figure, relative to the tensor's norm, beyond which it is another tensor.
TOLERANCE = 1e-3


def figures(session: Session) -> Figures | None:
    """Return the figures of what the torch network of `session` keeps; None for other forms, which are their files."""
    network: Any = getattr(session, "network", None)
    if not hasattr(network, "state_dict"):
        return None
    return {name: _of(value) for name, value in network.state_dict().items() if hasattr(value, "is_quantized") and not value.is_quantized}


def checksums(session: Session) -> dict[str, int]:
    """Return a checksum of each trained tensor of the torch network of `session`, and of each buffer that is stored with them, as a
    quantiser's ranges are; none for other forms. No call may change one: a little in each is much after a million."""
    network: Any = getattr(session, "network", None)
    if not hasattr(network, "named_parameters"):
        return {}
    import torch

    stored = network.state_dict(keep_vars=True).items()
    plain = ((name, value.detach()) for name, value in stored if type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_quantized)
    return {name: zlib.crc32(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data) for name, value in plain}


def difference(mine: Figures, theirs: Figures) -> str | None:
    """Return the name of a tensor that differs or that one lacks, or None."""
    for name in sorted(mine.keys() | theirs.keys()):
        a, b = mine.get(name), theirs.get(name)
        if a is None or b is None:
            return name
        size = max(a[0], b[0])
        if any(not math.isclose(x, y, rel_tol=0.0, abs_tol=TOLERANCE * size) for x, y in zip(a, b, strict=True)):
            return name
    return None


def _of(tensor: Any) -> list[float]:
    """The norm, and projections on products of random vectors: those are as small as a row and a column."""
    import torch

    # Masks hold the least number there is, whose square is infinite.
    matrix = tensor.detach().cpu().float().nan_to_num().clamp(-1e6, 1e6)
    matrix = matrix.reshape(matrix.shape[0] if matrix.dim() > 1 else 1, -1)
    generator = torch.Generator().manual_seed(0)
    left = torch.randn((PROJECTIONS, matrix.shape[0]), generator=generator, dtype=torch.float32)
    right = torch.randn((matrix.shape[1], PROJECTIONS), generator=generator, dtype=torch.float32)
    projected = (left * (matrix @ right).T).sum(dim=1)
    return [float(matrix.norm()), *projected.tolist()]
