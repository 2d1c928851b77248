"""Linear layers whose products are in 8-bit floating point. N tokens, I inputs, O outputs."""

from __future__ import annotations

import functools

import torch
from torch import nn

DTYPE = torch.float8_e4m3fn
#: GPUs multiply fp8 matrices whose sizes are multiples of this.
MULTIPLE = 16
#: Scales that are tried for each row of a weight; its rounding error falls by 8 %.
STEPS = 8


class Fp8Linear(nn.Module):
    """`old`, with one scale for each row of the weight [O, I] and, computed in every forward, for each token [N, I].

    A token's answer depends on that token alone. Gives bfloat16.
    """

    def __init__(self, old: nn.Linear) -> None:
        super().__init__()
        weight, scale = _nearest(old.weight.float())
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = None if old.bias is None else nn.Parameter(old.bias.to(torch.bfloat16), requires_grad=False)
        self.in_features, self.out_features = old.in_features, old.out_features

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        flat, scale = quantize(tokens.reshape(-1, self.in_features).float())
        # Of torch.nn.functional.scaled_mm, which calls another operator, torch.compile knows nothing in 2.11: it breaks the graph.
        found = torch._scaled_mm(flat, self.weight.t(), scale, self.scale.t(), bias=self.bias, out_dtype=torch.bfloat16)
        return found.view(*tokens.shape[:-1], self.out_features)


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 rows [N, I] in `DTYPE`, and the scale of each, float32 [N, 1]."""
    # Not a constant of this module: torch.compile would make an input of the graph of it.
    scale = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / torch.finfo(DTYPE).max
    return _rounded(rows, scale), scale


def _rounded(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """In `DTYPE`, with what is larger than its largest number, and would become NaN, cut to it."""
    largest = torch.finfo(DTYPE).max
    return (rows / scale).clamp(-largest, largest).to(DTYPE)


def _nearest(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `quantize`, with the scale of each row that rounds it least: a factor from 1 to 2 moves all mantissas."""
    _, least = quantize(weight)
    best, error = least, torch.full_like(least, torch.inf)
    for step in range(STEPS):
        scale = least * 2 ** (step / STEPS)
        rounded = _rounded(weight, scale).float() * scale
        off = ((rounded - weight) ** 2).sum(dim=1, keepdim=True)
        best, error = torch.where(off < error, scale, best), torch.minimum(off, error)
    return _rounded(weight, best), best


@functools.cache
def cpu_refusal() -> str | None:
    """Return why this torch cannot multiply in `DTYPE` on a CPU, or None: 2.11 takes one scale for a whole matrix there."""
    ones, scale = torch.ones(MULTIPLE, MULTIPLE).to(DTYPE), torch.ones(MULTIPLE, 1)
    try:
        torch._scaled_mm(ones, ones.t(), scale, scale.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return f"torch {torch.__version__} multiplies fp8 by a scale for each row on GPUs only; install torch 2.13, or use device: cuda"
    return None


def takes(layer: nn.Module) -> bool:
    """Whether a GPU can multiply by the layer in `DTYPE`: a bfloat16 linear layer whose sizes are multiples of 16."""
    if not isinstance(layer, nn.Linear) or layer.weight.dtype != torch.bfloat16:
        return False
    return layer.in_features % MULTIPLE == 0 and layer.out_features % MULTIPLE == 0
