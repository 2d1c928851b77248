"""Fit the polynomials of src/kernel/polynomials.h and write it: python tools/fit_polynomials.py > src/kernel/polynomials.h

GELU is x * P(x) with P a distribution function: P(x) = 1/2 + x Q(x^2) for |x| <= limit, constant beyond. Q is fitted by
least squares, reweighted until the error of x * P(x) is level; the constraint P(limit) = 1 keeps the seam small.
"""

from __future__ import annotations

import math
import sys

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def erf_half(x: Floats) -> Floats:
    """Return the normal distribution function."""
    return np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x])


def tanh_half(x: Floats) -> Floats:
    """Return the tanh approximation of it, as in transformers' `gelu_new`."""
    return np.asarray(0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def fit_gelu(half: Floats, x: Floats, limit: float, degree: int) -> Floats:
    """Return the coefficients of Q."""
    y = half - 0.5
    weight = np.ones_like(x)
    seam = np.abs(x) > limit * (1 - 1e-9)
    for _ in range(400):
        basis = np.stack([x * (x / limit) ** (2 * i) for i in range(degree + 1)], 1)
        rows = (np.abs(x) + 0.05) * np.where(seam, 40.0, weight)
        q = np.linalg.lstsq(basis * rows[:, None], y * rows, rcond=None)[0]
        error = np.abs((basis @ q - y) * x)
        weight *= (1 + error / error.max()) ** 0.5
        weight /= weight.mean()
    return np.asarray(q / limit ** (2.0 * np.arange(degree + 1)))


def gelu_error(kind: int, q: Floats, limit: float) -> float:
    """Return the largest error of x * P(x) in float32 arithmetic, everywhere."""
    x = np.linspace(-8, 8, 200_001)
    c = np.clip(x, -limit, limit).astype(np.float32)
    t, p = c * c, np.full(c.shape, np.float32(q[-1]))
    for a in q[-2::-1]:
        p = p * t + np.float32(a)
    exact = x * (erf_half, tanh_half)[kind](x)
    return float(np.abs(x.astype(np.float32) * (np.float32(0.5) + c * p) - exact).max())


def fit_exp2(degree: int) -> Floats:
    """Return the coefficients of 2^f on [-1/2, 1/2], least relative error."""
    f = np.cos(np.pi * (np.arange(2000) + 0.5) / 2000) / 2
    y, weight = 2.0**f, np.ones_like(f)
    for _ in range(300):
        rows = weight / y
        c = np.linalg.lstsq(np.vander(f, degree + 1, increasing=True) * rows[:, None], y * rows, rcond=None)[0]
        error = np.abs(np.vander(f, degree + 1, increasing=True) @ c / y - 1)
        weight *= (1 + error / error.max()) ** 0.5
        weight /= weight.mean()
    return np.asarray(c)


def main() -> None:
    """Print the header."""
    write = sys.stdout.write
    write(
        "// Written by tools/fit_polynomials.py.\n\n// Q's coefficients, lowest first, then the limit; erf, then tanh.\n"
    )
    for degree, limit in ((5, 3.3), (7, 3.9)):
        write(f"alignas(64) constexpr float GELU_{degree}[2][{degree + 2}] = {{\n")
        for kind, function in enumerate((erf_half, tanh_half)):
            x = np.append(np.cos(np.pi * (np.arange(4000) + 0.5) / 4000) * limit, [limit, -limit])
            target = function(x)
            target[-2:] = 1, 0
            q = fit_gelu(target, x, limit, degree)
            numbers = ", ".join(f"{v:.9g}f" for v in [*q, limit])
            write(f"    {{{numbers}}},  // largest error {gelu_error(kind, q, limit):.1e}\n")
        write("};\n")
    write("\n// 2^f on [-1/2, 1/2], lowest first.\n")
    for degree in (3, 5):
        numbers = ", ".join(f"{v:.9g}f" for v in fit_exp2(degree))
        write(f"constexpr float EXP2_{degree}[] = {{{numbers}}};\n")


if __name__ == "__main__":
    main()
