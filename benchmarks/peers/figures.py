"""From turns to figures: rates, ratios with intervals, fidelity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertopt.checks.ratio import estimate

#: A turn: `round`, `scenario`, `contender`, `texts`, `seconds`, and milliseconds of its calls `p50_ms`, `p90_ms`.
Turn = Mapping[str, Any]
#: Mean cosine from which a contender is near-lossless.
NEAR_LOSSLESS = 0.9999
#: Systematic difference between two processes that run the same model (measured): half-width that every interval has.
PROCESS_BIAS = 0.018
#: The scenario judged by the time of one call, and the one by CPU time, which other processes disturb less.
BY_CALL, BY_CPU = "short query", "one thread"


def cost(turn: Turn) -> float:
    """Milliseconds that are compared: of the median call for short queries, CPU time of a text on one thread, else of a text."""
    if turn["scenario"] == BY_CALL:
        return float(turn["p50_ms"])
    return float(1e3 * turn["cpu_s" if turn["scenario"] == BY_CPU else "seconds"] / turn["texts"])


def costs(turns: Sequence[Turn], scenario: str, contender: str) -> dict[int, float]:
    """Milliseconds by round."""
    return {t["round"]: cost(t) for t in turns if t["scenario"] == scenario and t["contender"] == contender}


def middle(turns: Sequence[Turn], scenario: str, contender: str) -> float | None:
    """Median milliseconds, or None where it never ran."""
    found = costs(turns, scenario, contender)
    return float(np.median(list(found.values()))) if found else None


def ratio(of: Mapping[int, float], to: Mapping[int, float]) -> dict[str, Any] | None:
    """How many times faster `of` is than `to`, paired by round, with its 95 % interval (see `ratio.estimate`), None
    below two common rounds."""
    common = sorted(of.keys() & to.keys())
    if len(common) < 2:
        return None
    logs = np.log([to[r] for r in common]) - np.log([of[r] for r in common])
    interval = estimate(logs)
    centre, half = interval.log_ratio, math.hypot(interval.half_width, PROCESS_BIAS)
    return {
        "ratio": math.exp(centre), "low": math.exp(centre - half), "high": math.exp(centre + half), "rounds": len(common)
    }  # fmt: skip


def fidelity(found: Any, reference: Any, truth: Sequence[str]) -> dict[str, float]:
    """Vectors against the float32 ones by cosine, labels against the reference's labels and the true ones. Raises
    ValueError where they are not comparable or not finite."""
    if isinstance(found, list):
        if not len(found) == len(reference) == len(truth):
            raise ValueError(f"expected {len(truth)} labels; got {len(found)}")
        return {
            "accuracy": float(np.mean([a == b for a, b in zip(found, truth, strict=True)])),
            "agreement": float(np.mean([a == b for a, b in zip(found, reference, strict=True)])),
        }
    cosines = cosine(found, reference)
    return {"cosine_mean": float(cosines.mean()), "cosine_min": float(cosines.min())}


def cosine(found: NDArray[np.float32], reference: NDArray[np.float32]) -> NDArray[np.float64]:
    """Cosines [N] of the rows of two arrays [N, H]."""
    if found.shape != reference.shape:
        raise ValueError(f"expected vectors of shape {list(reference.shape)}; got {list(found.shape)}")
    a, b = found.astype(np.float64), reference.astype(np.float64)
    cosines = (a * b).sum(axis=1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
    if not np.isfinite(cosines).all():
        raise ValueError(f"{int((~np.isfinite(cosines)).sum())} of {len(cosines)} vectors are zero or not finite")
    return np.asarray(cosines)


def near_lossless(contender: Mapping[str, Any]) -> bool:
    return bool(contender.get("fidelity", {}).get("cosine_mean", 0.0) >= NEAR_LOSSLESS)


def best_peer(race: Mapping[str, Any], scenario: str, near: bool = False) -> str | None:
    """The fastest peer of a scenario, of the near-lossless ones with `near`."""
    ranked = [
        (time, name)
        for name, contender in race["contenders"].items()
        if contender["peer"] and (not near or near_lossless(contender))
        if (time := middle(race["turns"], scenario, name)) is not None
    ]
    return min(ranked)[1] if ranked else None


def figures(race: Mapping[str, Any], scenario: str) -> list[dict[str, Any]]:
    """One row for each contender that ran: its cost, texts/s, and ratios to the best peer and the best near-lossless one."""
    best, best_near = best_peer(race, scenario), best_peer(race, scenario, near=True)
    rows = []
    for name, contender in race["contenders"].items():
        mine = costs(race["turns"], scenario, name)
        if not mine:
            continue
        time = float(np.median(list(mine.values())))
        row: dict[str, Any] = {"contender": name, "peer": contender["peer"], "ms": time, "texts_per_s": 1e3 / time}
        row["best"] = best == name
        for key, other in (("vs_best", best), ("vs_near_lossless", best_near if near_lossless(contender) else None)):
            row[key] = None if other in (None, name) else ratio(mine, costs(race["turns"], scenario, other or ""))
        rows.append(row)
    return rows


def beaten(turns: Sequence[Turn], scenario: str, contenders: Sequence[str], after: int, share: float) -> set[str]:
    """Who took over `share` times as long as the fastest in at least `after` rounds: more rounds would tell nothing."""
    found = {name: costs(turns, scenario, name) for name in contenders}
    medians = {name: float(np.median(list(c.values()))) for name, c in found.items() if len(c) >= after}
    if not medians:
        return set()
    return {name for name, time in medians.items() if time > share * min(medians.values())}
