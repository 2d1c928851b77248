"""Numbers about a stage, and the verdicts derived from them. `Report` is the contract of `report.json`."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from bertopt.results.coverage import Coverage
from bertopt.results.fidelity import Certificate, Rounding
from bertopt.results.limits import Limits as Limits
from bertopt.results.margin import Gate as Gate
from bertopt.results.margin import Margin as Margin
from bertopt.results.margin import holds as holds
from bertopt.results.margin import is_least as is_least
from bertopt.results.timing import DEAD_BAND as DEAD_BAND
from bertopt.results.timing import Latency as Latency
from bertopt.results.timing import Ratio as Ratio
from bertopt.results.timing import factor as factor

Status = Literal["ok", "noop", "failed", "reverted", "unsupported", "unverified", "skipped"]


def nan_max(values: Iterable[float]) -> float:
    """Return the largest value, or NaN if any is NaN."""
    known = list(values)
    return math.nan if any(map(math.isnan, known)) else max(known)


def nan_min(values: Iterable[float]) -> float:
    """Return the smallest value, or NaN if any is NaN."""
    return -nan_max(-value for value in values)


def nan_as_inf(value: float) -> float:
    """Return `value`, or infinity for NaN: a key by which NaN is larger than any number."""
    return math.inf if math.isnan(value) else value


class _Result(BaseModel):
    # JSON has no NaN: it is written as the string "NaN" and read back as a float.
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")


#: The `padding` of a case that was sampled while a stage was timed.
TIMED = "timed"


class Case(_Result):
    """One probe batch compared. `compared` counts the vectors compared (texts, or valid tokens)."""

    batch: int
    sequence: int
    padding: str
    max_abs: float
    rel_l2: float
    cosine_min: float
    cosine_mean: float
    cosine_median: float | None = None  # not in older reports, nor where nothing is compared
    label_flips: int | None
    compared: int
    where: str
    finite: bool = True
    beside_padding: float | None = None
    """Median relative difference of the tokens one place from padding, or two, …: of the place and side where it is largest. Only where outputs
    have a vector for each token, and many tokens are at that place."""
    probe: str = ""
    """Name of the batch that `where` refers to; `row` is the row there, and `token` the token where outputs have one vector for each."""
    row: int | None = None
    token: int | None = None


class Worst(_Result):
    metric: str
    value: float
    limit: float
    where: str
    text: str | None = None
    """The text of the worst row, where the probe is real text."""
    tokens: list[str] | None = None
    """Its tokens (ids as text where the probe is random), the worst one marked by `token`."""
    token: int | None = None


class Invariance(_Result):
    """The largest change of a text's output when batched with others or padded differently, through the same stage."""

    max_abs: float
    cosine_min: float
    texts: int
    where: str


class Ranking(_Result):
    """Whether the embeddings rank texts as the reference's embeddings of the same texts do."""

    spearman: float
    """Spearman's rank correlation of all pairwise cosine similarities."""
    top_k_overlap: float
    """Mean share of each text's `k` nearest neighbours that are the reference's too."""
    k: int
    n: int


class Blame(_Result):
    """The stage, of this one and its ancestors, that added most of the difference (rel_l2 against its own parent)."""

    stage: str
    rel_l2: float
    total: float
    """This stage's rel_l2 against the reference."""


class Comparison(_Result):
    """Differences over all cases: the worst of each, NaN where any is NaN."""

    max_abs: float
    rel_l2: float
    cosine_min: float
    cosine_mean: float
    label_flips: int | None
    compared: int

    @classmethod
    def over(cls, cases: Sequence[Case]) -> Comparison:
        flips = [case.label_flips for case in cases if case.label_flips is not None]
        return cls(
            max_abs=nan_max(case.max_abs for case in cases), rel_l2=nan_max(case.rel_l2 for case in cases),
            cosine_min=nan_min(case.cosine_min for case in cases), cosine_mean=nan_min(case.cosine_mean for case in cases),
            label_flips=sum(flips) if flips else None, compared=sum(case.compared for case in cases),
        )  # fmt: skip


class Parity(_Result, extra="ignore"):  # reports of 0.1 repeat here the stage's failures
    passed: bool
    worst: Worst
    """The metric nearest to its limit, or farthest beyond it."""
    cases: list[Case]
    limits: Limits
    vs_parent: Comparison | None = None
    blame: Blame | None = None


class Quality(_Result):
    metric: str
    value: float
    reference: float
    change: float
    n: int
    low: float | None = None
    high: float | None = None
    change_low: float | None = None
    change_high: float | None = None
    """95 % intervals, of `value` and of `change`: paired, the same texts answered by both."""
    others: list[Quality] = []  # further metrics of the task, which no limit holds


class Waiver(_Result, frozen=True):
    """A limit that a stage is known to miss, accepted for a reason until a day."""

    stage: str
    metric: str
    reason: str = Field(min_length=1)
    expires: datetime.date
    """Last day on which it holds."""
    limit: float | None = None
    """What holds in place of the limit until then; None: a miss of any size is accepted."""


class Failure(_Result):
    """One limit that a stage misses, or one effect that it does not show."""

    gate: Gate
    metric: str | None
    """The field of Limits; None: no waiver can cover it."""
    text: str
    waiver: Waiver | None = None
    """The waiver that covers it."""

    @classmethod
    def of_figure(cls, gate: Gate, metric: str, value: float, text: str) -> Failure:
        """Return the failure of a figure that misses its limit. NaN and infinity cannot be waived."""
        return cls(gate=gate, metric=metric if math.isfinite(value) else None, text=text)


class Stage(_Result, populate_by_name=True):
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
    effects: dict[str, tuple[int, int]] = {}
    """What the committed model shows of the pass: counts expected and seen."""
    changed: bool | None = None
    """Whether the committed model differs from its parent's and shows any effect of its pass. None: not measured."""
    waived: list[str] = []
    """Failures that a waiver covers, with its reason and last day."""
    failures: list[Failure] = []
    """Every limit that is missed, waived or not."""
    invariance: Invariance | None = None
    ranking: Ranking | None = None
    coverage: Coverage | None = None
    rounding: Rounding | None = None
    proven: float | None = None
    """Share of the products' weights in the claimed precision. None: not measured, or the runtime does not say."""
    certificate: Certificate | None = None
    parity: Parity | None = None
    latency: list[Latency] | None = None
    quality: Quality | None = None
    nearest: Margin | None = None
    """The figure that is nearest to its limit. None where nothing was limited, and in reports of 0.1."""

    def mix(self) -> Latency | None:
        """Return the end-to-end timing on real texts, None where there is none."""
        return next((case for case in self.latency or [] if case.kind == "mix"), None)

    def speed_up(self) -> Ratio | None:
        """Return how many times faster than the checkpoint it is end to end, None where that was not timed validly."""
        mix = self.mix()
        return mix.vs_reference if mix else None

    def slow(self) -> str | None:
        """Return a sentence where the stage is slower end to end than the checkpoint, or was not timed validly."""
        texts = self.mix() if self.index else None
        if texts and texts.vs_reference is None and texts.warning:
            return f"its timing is not valid: {texts.warning}"
        slower = texts and texts.vs_reference and texts.vs_reference.verdict == "SLOWER"
        return f"it is {texts.vs_reference} against the checkpoint" if texts and slower else None


class Delivered(_Result):
    stage: str
    path: str


class HeadToHead(_Result):
    """A race of two stages against each other, end to end on the recipe's texts."""

    stage: str
    other: str
    ratio: Ratio
    """How many times faster `stage` is than `other`."""


class Report(_Result):
    schema_version: Literal[1] = 1
    bertopt_version: str
    recipe: dict[str, Any]
    environment: dict[str, Any]
    model: dict[str, Any]
    stages: list[Stage] = []
    baselines: dict[str, list[Latency]] = {}
    """On a GPU: the checkpoint in plain torch, with TF32 products and in bfloat16, against the fp32 reference."""
    head_to_head: list[HeadToHead] = []
    """With `deliver: fastest`, races of those stages of which the races against the checkpoint did not tell which is the fastest."""
    delivered: Delivered | None = None
    wall_s: float = 0.0
    exit_code: int = 0
    reason: str | None = None

    def delivers(self, stage: Stage) -> bool:
        """Whether this row is the stage that was delivered."""
        return self.delivered is not None and self.delivered.stage == stage.name

    def stage(self, name: str) -> Stage:
        """Return the row of that name. Raises KeyError where there is none."""
        found = next((stage for stage in self.stages if stage.name == name), None)
        if found is None:
            raise KeyError(f"no stage '{name}'; the report has {', '.join(stage.name for stage in self.stages) or 'none'}")
        return found
