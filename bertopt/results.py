"""Numbers about a stage, and the verdicts derived from them. `Report` is the contract of `report.json`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, computed_field

Status = Literal["ok", "noop", "failed", "reverted", "unsupported", "unverified", "skipped"]
Verdict = Literal["FASTER", "SLOWER", "NO DIFFERENCE", "INCONCLUSIVE"]

#: Half-width of the band around 1.0 in which two stages count as equally fast.
DEAD_BAND = 0.01


class _Result(BaseModel):
    # JSON has no NaN: it is written as the string "NaN" and read back as a float.
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")


class Limits(_Result):
    """What a stage may differ from the reference at most. None is not checked. NaN never passes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_abs: float | None = Field(None, ge=0, description="largest absolute difference of any compared element")
    rel_l2: float | None = Field(None, ge=0, description="largest relative L2 difference of any case")
    cosine_min: float | None = Field(None, ge=-1, le=1, description="smallest cosine of any compared vector")
    cosine_mean: float | None = Field(None, ge=-1, le=1, description="smallest mean cosine of any case")
    label_flips_max: float | None = Field(None, ge=0, le=1, description="largest share of top-1 labels that change")
    metric_drop_max: float | None = Field(None, ge=0, le=1, description="largest drop of the task metric")

    def over(self, other: Limits) -> Limits:
        """These limits where stated, else `other`'s."""
        return other.model_copy(update=self.model_dump(exclude_none=True))


class Case(_Result):
    """One probe batch compared. `compared` counts the vectors compared (texts, or valid tokens)."""

    batch: int
    sequence: int
    padding: str
    max_abs: float
    rel_l2: float
    cosine_min: float
    cosine_mean: float
    label_flips: int | None
    compared: int
    where: str
    finite: bool = True


class Worst(_Result):
    metric: str
    value: float
    limit: float
    where: str


class Comparison(_Result):
    """Differences over all cases."""

    max_abs: float
    rel_l2: float
    cosine_min: float
    cosine_mean: float
    label_flips: int | None
    compared: int


class Parity(_Result):
    passed: bool
    worst: Worst
    """The metric nearest to its limit, or farthest beyond it."""
    cases: list[Case]
    limits: Limits
    vs_parent: Comparison | None = None
    failures: list[str] = []


class Ratio(_Result):
    """How many times faster than the other: other's time / this one's, with a paired bootstrap 95 % interval."""

    model_config = ConfigDict(extra="ignore")  # `verdict` comes back when a report is read

    ratio: float
    low: float
    high: float

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> Verdict:
        if self.low > 1 + DEAD_BAND:
            return "FASTER"
        if self.high < 1 - DEAD_BAND:
            return "SLOWER"
        if self.low >= 1 - DEAD_BAND and self.high <= 1 + DEAD_BAND:
            return "NO DIFFERENCE"
        return "INCONCLUSIVE"

    def __str__(self) -> str:
        return f"{self.verdict} {self.ratio:.2f}x [{self.low:.2f}, {self.high:.2f}]"


class Latency(_Result):
    """One timed case: a `shape` is the session's step alone; the `mix` is real texts through the Predictor."""

    kind: Literal["shape", "mix"]
    batch: int | None
    sequence: int | None
    n: int
    """Samples (shape) or texts (mix)."""
    p50_ms: float
    p90_ms: float
    p99_ms: float | None
    texts_per_s: float
    vs_reference: Ratio | None = None
    vs_parent: Ratio | None = None
    warning: str | None = None


class Quality(_Result):
    metric: str
    value: float
    reference: float
    change: float
    n: int


class Stage(_Result):
    """One row of the report."""

    index: int
    name: str
    pass_: str | None = Field(None, alias="pass")
    after: str | None = None
    status: Status
    reason: str | None = None
    form: str | None = None
    precision: str | None = None
    changes: dict[str, int] = {}
    build_s: float | None = None
    size_bytes: int | None = None
    peak_rss_bytes: int | None = None
    peak_gpu_bytes: int | None = None
    path: str | None = None
    reused: bool = False
    facts: dict[str, Any] = {}
    parity: Parity | None = None
    latency: list[Latency] | None = None
    quality: Quality | None = None

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    def mix(self) -> Latency | None:
        return next((case for case in self.latency or [] if case.kind == "mix"), None)


class Delivered(_Result):
    stage: str
    path: str


class Report(_Result):
    schema_version: Literal[1] = 1
    bertopt_version: str
    recipe: dict[str, Any]
    environment: dict[str, Any]
    model: dict[str, Any]
    stages: list[Stage] = []
    delivered: Delivered | None = None
    wall_s: float = 0.0
    exit_code: int = 0
    reason: str | None = None

    def stage(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)
