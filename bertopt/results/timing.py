"""How fast a stage is, and whether that is faster than another."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, computed_field

Verdict = Literal["FASTER", "SLOWER", "NO DIFFERENCE", "INCONCLUSIVE"]

#: Half-width of the band around 1.0 in which two stages count as equally fast.
DEAD_BAND = 0.02
#: An interval whose ends differ by more than this factor says nothing: [1.4, 350] does not mean "faster".
WIDEST = 3.0


def factor(value: float) -> str:
    """Return a speed-up in words: `1.98`, `350`, `>10,000`, `<0.01`; an interval that is so wide needs no digits."""
    usual = f"{value:.2f}" if value < 99.995 else f"{value:,.0f}"
    return ">10,000" if value > 10_000 else "<0.01" if 0 < value < 0.01 else usual


class Ratio(BaseModel, extra="ignore", ser_json_inf_nan="strings"):
    """How many times faster than the other: other's time / this one's, with a 95 % interval over paired rounds."""

    # `verdict` is in reports that are read back.

    ratio: float
    low: float
    high: float

    @property
    def too_wide(self) -> bool:
        """Whether the interval is so wide that it tells nothing, or is none."""
        return not self.high <= WIDEST * self.low

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> Verdict:
        if self.too_wide:
            return "INCONCLUSIVE"
        if self.low > 1 + DEAD_BAND:
            return "FASTER"
        if self.high < 1 - DEAD_BAND:
            return "SLOWER"
        if self.low >= 1 - DEAD_BAND and self.high <= 1 + DEAD_BAND:
            return "NO DIFFERENCE"
        return "INCONCLUSIVE"

    def __str__(self) -> str:
        return f"{self.verdict} {factor(self.ratio)}x [{factor(self.low)}, {factor(self.high)}]"

    def brief(self) -> str:
        """Return `FASTER 1.98x`, or `INCONCLUSIVE 0.66x to 1.47x`: one figure of such a ratio would be read as a result."""
        figures = f"{factor(self.low)}x to {factor(self.high)}x" if self.verdict == "INCONCLUSIVE" else f"{factor(self.ratio)}x"
        return f"{self.verdict} {figures}"


class Latency(BaseModel, extra="forbid", ser_json_inf_nan="strings"):
    """One timed case: a `shape` is the session's step alone; the `mix` is real texts through the Predictor."""

    kind: Literal["shape", "mix"]
    batch: int | None
    sequence: int | None
    n: int  # samples of a shape, texts of the mix
    p50_ms: float
    p90_ms: float
    p99_ms: float | None
    texts_per_s: float
    vs_reference: Ratio | None = None
    vs_parent: Ratio | None = None
    warning: str | None = None

    @property
    def what(self) -> str:
        """`end to end`, of real texts through the predictor, or `8 × 128`."""
        return "end to end" if self.kind == "mix" else f"{self.batch} × {self.sequence}"
