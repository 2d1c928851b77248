"""Two contenders of a race that was not run, and what is known of them."""

from __future__ import annotations

import numpy as np

from bertopt.checks import latency
from bertopt.checks.latency import Contender, Turn


def raced(of: np.ndarray, to: np.ndarray, steal: np.ndarray | None = None) -> tuple[Contender, Contender]:
    """Two contenders with these medians, one per round, and the share of CPU time stolen in each."""
    shares = np.zeros((2, len(of))) if steal is None else steal
    a, b = (
        Contender(name, lambda _: Turn([]), rounds=[
            Turn([float(ms)] * 2, steal_share=float(share)) for ms, share in zip(medians, of_one, strict=True)
        ])
        for name, medians, of_one in (("a", of, shares[0]), ("b", to, shares[1]))
    )  # fmt: skip
    return a, b


def verdict(of: Contender, to: Contender) -> str:
    return latency.compare(of, to).ratio().verdict


def same(pair: tuple[Contender, Contender]) -> bool:
    """Whether both are known to be equally fast within 0.5 %."""
    found = latency.compare(*pair)
    return abs(found.log_ratio) + found.half_width <= 0.005
