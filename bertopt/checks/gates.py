"""Apply limits and waivers to what was measured of a stage: the one place that says whether it passes."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from bertopt.checks import coverage, margins, padding_patterns, parity, speed_limits
from bertopt.checks.measurements import StageMeasurements
from bertopt.core import Precision
from bertopt.errors import BertoptError, WrongAnswer
from bertopt.results import Blame, Comparison, Failure, Limits, Margin, Parity, Stage, Status, Waiver, nan_as_inf
from bertopt.results.fidelity import Rounding

#: Share of the weights of matrix products in a precision from which a model counts as being of it.
PROVEN = 0.25
#: How many times `rel_l2` a SPLADE may differ in float32: of logits up to 14 only what is above 0 counts, and all are rounded. MiniLM's six
#: layers, once, twice and four times in succession, differed by 1.4e-6, 6.4e-6 and 1.1e-5 between two kinds of attention; their mean, 2 to 5 times less.
SPARSE_ROOM = 5
#: Figures of `Rounding` that have a limit: what each measures, and which figure of the twin it is divided by.
_ROUNDING = {
    "error_ratio": ("the mean error on real texts", "that of the simulated rounding"),
    "worst_ratio": ("the largest error of one text or token", "the largest of the simulated rounding"),
    "parent_ratio": ("the mean difference from the parent", "the error of the simulated rounding"),
    "slope_error": ("the error of the outputs' slope", "the error of the simulated rounding"),
    "bias": ("the mean shift of a class or dimension", "that of the simulated rounding"),
    "column_ratio": ("the deviation of the errors of a class or dimension", "that of the simulated rounding"),
    "flip_margin": ("the reference's margin of a label that changed", "the error of the simulated rounding"),
    "rank_ratio": ("the loss of rank correlation", "that of the simulated rounding"),
}
#: Exit code of a run whose stage failed a gate.
FAILED = WrongAnswer.exit_code


@dataclass(frozen=True)
class GateOutcome:
    """The verdict on one stage. `exit_code` is the run's where the stage ends it."""

    status: Status
    reason: str | None = None
    exit_code: int = 0
    failures: tuple[Failure, ...] = ()
    """Every limit that is missed, waived or not."""
    waived: tuple[str, ...] = ()
    parity: Parity | None = None
    nearest: Margin | None = None
    """Of all limits, the one that is most used up."""
    log: str = ""
    """The worker's last lines, where it broke."""

    @classmethod
    def of_error(cls, error: BertoptError, status: Status = "failed") -> Self:
        """Return the outcome of a stage that could not be built or measured."""
        return cls(status, str(error), error.exit_code, log=error.log)


def judge(
    stage: str, measurements: StageMeasurements, limits: Limits, *, changes: Mapping[str, int], today: datetime.date,
    waivers: Sequence[Waiver] = (), allow_noop: bool = False, ancestors: Mapping[str, float] | None = None, size_bytes: int | None = None,
) -> GateOutcome:  # fmt: skip
    """Compare the measurements of `stage` with `limits`; `waivers` may cover misses until their last day.

    NaN never passes. `changes` are the counts that the pass claims, `ancestors` the rel_l2 that each earlier stage added, the checkpoint's
    child first. `size_bytes` is the size of the stage's files.
    """
    compared = _parity(stage, measurements, limits, ancestors or {}) if measurements.cases else None
    failures = _failures(measurements, limits, size_bytes)
    reasons, waived = [], []
    located = _located(failures, compared) if compared else None
    for failure in failures:
        place = _place(stage, compared) if compared and failure is located else ""
        waiver = next((w for w in waivers if (w.stage, w.metric) == (stage, failure.metric)), None)
        if waiver is None:
            reasons.append(f"{failure.text}{place}")
        elif waiver.expires < today:
            reasons.append(f"{failure.text} (its waiver expired on {waiver.expires}: {waiver.reason}){place}")
        elif waiver.limit is not None and _beyond(failure, waiver.limit, measurements, limits, size_bytes):
            reasons.append(f"{failure.text} (its waiver's limit is {waiver.limit:g}: {waiver.reason}){place}")
        else:
            failure.waiver = waiver
            to = "" if waiver.limit is None else f"to {waiver.limit:g} "
            waived.append(f"{failure.text}, waived {to}until {waiver.expires}: {waiver.reason}")
    status: Status = "failed" if reasons else "ok"
    reason = "; ".join(reasons) or None
    if reasons and measurements.proven is not None and measurements.proven < PROVEN:
        reason = f"{reason} (by float32's limits, since only {measurements.proven:.0%} of the products' weights are in the precision claimed)"
    if not reasons and not allow_noop and (reason := noop_reason(changes, measurements)):
        status = "noop"
    nearest = margins.nearest(measurements, compared, size_bytes, limits)
    return GateOutcome(status, reason, 0 if status == "ok" else FAILED, tuple(failures), tuple(waived), compared, nearest)


def _failures(measurements: StageMeasurements, limits: Limits, size_bytes: int | None) -> list[Failure]:
    return find_failures(measurements, limits) + speed_limits.failures(measurements, size_bytes, limits)


def _beyond(failure: Failure, limit: float, measurements: StageMeasurements, limits: Limits, size_bytes: int | None) -> bool:
    """Return whether the failure would remain if the limit of its metric were `limit`."""
    assert failure.metric is not None, "who waives names a metric"
    waived = limits.model_copy(update={failure.metric: limit})
    return any((left.gate, left.metric) == (failure.gate, failure.metric) for left in _failures(measurements, waived, size_bytes))


def _located(failures: Sequence[Failure], compared: Parity) -> Failure | None:
    """Return the failure of the metric that the worst case shows, or else the first one of parity."""
    # Those without a metric, and what was sampled under the clock, name their own place.
    of_parity = [one for one in failures if one.gate == "parity" and one.metric is not None and parity.UNDER_THE_CLOCK not in one.text]
    return next((one for one in of_parity if one.text.startswith(compared.worst.metric)), next(iter(of_parity), None))


def _place(stage: str, compared: Parity) -> str:
    """Return where the largest error is, and the stage that added most of it if it is another."""
    blamed = compared.blame.stage if compared.blame else stage
    return f" at {compared.worst.where}{f', introduced by {blamed!r}' if blamed != stage else ''}"


def noop_reason(changes: Mapping[str, int], measurements: StageMeasurements | None = None) -> str | None:
    """Return why a stage counts as unchanged by its pass, or None. Before it is measured, the pass's counts decide."""
    if not any(changes.values()):
        return "the pass changed nothing; remove the step, or state allow_noop: true"
    if measurements is None or shows_change(measurements) is not False:
        return None
    missing = [f"{expected} {what}, got {got}" for what, (expected, got) in _effects(measurements) if expected != got]
    shown = f"shows none of them: expected {', '.join(missing)}" if missing else "is its parent's"
    return (
        f"the pass claims {sum(changes.values())} changes, but the committed model {shown}; "
        "remove the step, or state allow_noop: true"
    )


def shows_change(measurements: StageMeasurements) -> bool | None:
    """Return whether the committed model differs from its parent's and shows any effect of its pass; None: not measured."""
    if measurements.changed is None:
        return None
    wanted = [got for expected, got in measurements.effects.values() if expected]
    return measurements.changed and (not wanted or any(wanted))


def find_failures(measurements: StageMeasurements, limits: Limits) -> list[Failure]:
    """Return every limit that a stage misses and every effect of its pass that is missing.

    Where the model is equal to its parent's (see `noop_reason`), effects are not looked at.
    """
    failures = [
        Failure(gate="effects", metric=None, text=f"the committed model must show {expected} {what}; got {got}")
        for what, (expected, got) in _effects(measurements)
        if expected != got and shows_change(measurements) is not False
    ]
    if measurements.cases:
        failures += parity.failures(measurements.cases, limits) + padding_patterns.failures(measurements.cases, limits)
    certificate = measurements.certificate
    if limits.certified and certificate and certificate.status == "contradicted":
        text = f"weights must be their parent's, rounded: {certificate.reason}"
        failures.append(Failure(gate="certificate", metric="certified", text=text))
    failures += rounding_failures(measurements.rounding, limits) if measurements.rounding else []
    if measurements.coverage:
        failures += coverage.failures(measurements.coverage, limits, measurements.rounding.error if measurements.rounding else None)
    quality, steady, ranking = measurements.quality, measurements.invariance, measurements.ranking
    if limits.metric_drop_max is not None and quality and not -quality.change <= limits.metric_drop_max:
        text = f"{quality.metric} may drop by at most {limits.metric_drop_max:g}; got {quality.change:+.4f}"
        failures.append(Failure.of_figure("quality", "metric_drop_max", quality.change, text))
    if limits.invariance_max is not None and steady and not steady.max_abs <= limits.invariance_max:
        text = (
            f"a text's output may change by at most {limits.invariance_max:g} when batched with other texts; "
            f"got {steady.max_abs:.6g} ({steady.where})"
        )
        failures.append(Failure.of_figure("invariance", "invariance_max", steady.max_abs, text))
    for metric, value in (("spearman", ranking.spearman), ("top_k_overlap", ranking.top_k_overlap)) if ranking else ():
        limit = getattr(limits, f"{metric}_min")
        if limit is not None and not value >= limit:
            text = f"{metric} must be at least {limit:g}; got {value:.6g}"
            failures.append(Failure.of_figure("ranking", f"{metric}_min", value, text))
    return failures


def rounding_failures(rounding: Rounding, limits: Limits) -> list[Failure]:
    """Return every figure relative to the twin that misses its limit."""
    failures = []
    for metric, (what, of) in _ROUNDING.items():
        value, limit = getattr(rounding, metric), getattr(limits, f"{metric}_max")
        if value is not None and limit is not None and not value <= limit:
            text = f"{metric}: {what} must be at most {limit:g} times {of}; got {value:.4g} times"
            failures.append(Failure.of_figure("rounding", f"{metric}_max", value, text))
    return failures


def judged_precision(claimed: Precision, proven: float | None) -> Precision:
    """Return the precision whose limits hold: the claimed one, or float32 where less than `PROVEN` of the weights shows it."""
    return claimed if proven is None or proven >= PROVEN else "float32"


def effective_limits(precision: Precision, *stated: Limits, peak: float = 0.0, sparse: bool = False) -> Limits:
    """Return the default limits of a precision, overridden by those `stated`, the most specific first.

    `peak` is the largest element of the reference's outputs: where float32 has too few digits for a default limit of an absolute difference,
    that limit grows. `sparse`: of a SPLADE, whose default limit of `rel_l2` is larger. Stated limits stay as they are.
    """
    limits = parity.DEFAULT_LIMITS[precision]
    least = parity.OF_PEAK * peak if math.isfinite(peak) else 0.0
    grown = {name: max(least, value) for name in ("max_abs", "invariance_max") if (value := getattr(limits, name)) is not None}
    if sparse and limits.rel_l2 is not None:
        grown["rel_l2"] = SPARSE_ROOM * limits.rel_l2
    limits = limits.model_copy(update=grown)
    for over in reversed(stated):
        limits = over.over(limits)
    return limits


def unmeasurable(limits: Limits, quality: bool, ranking: bool) -> list[str]:
    """Return what is wrong with `limits` where there is no task metric, or no embeddings to rank."""
    problems = []
    if limits.metric_drop_max is not None and not quality:
        problems.append(
            "metric_drop_max needs labelled texts, and labelled pairs for embeddings and questions; give inputs.texts with labels, or drop it"
        )
    for metric in ("spearman_min", "top_k_overlap_min"):
        if getattr(limits, metric) is not None and not ranking:
            problems.append(f"{metric} needs a model that gives one embedding for each text; drop it")
    return problems


def unused_waivers(waivers: Sequence[Waiver], rows: Sequence[Stage]) -> list[str]:
    """Return a warning for each waiver of a stage that passes without it."""
    passed = {row.name: row for row in rows if row.status == "ok"}
    return [
        f"the waiver of {waiver.metric} for '{waiver.stage}' is not needed: the stage keeps the limit; remove the waiver"
        for waiver in waivers
        if waiver.stage in passed and all(waiver.metric != failure.metric for failure in passed[waiver.stage].failures)
    ]


def blame(added: Mapping[str, float], total: float) -> Blame | None:
    """Return which of a stage and its ancestors added most to its difference from the reference, which is `total`.

    `added` is the rel_l2 of each against its own parent, the checkpoint's child first. NaN is larger than any number, and the first of
    equals is blamed: a stage after the first NaN only inherits it.
    """
    if not added:
        return None
    stage = max(added, key=lambda name: nan_as_inf(added[name]))
    return Blame(stage=stage, rel_l2=added[stage], total=total)


def _parity(stage: str, measurements: StageMeasurements, limits: Limits, ancestors: Mapping[str, float]) -> Parity:
    compared = parity.judge(measurements.cases, limits, measurements.vs_parent)
    own = {stage: measurements.vs_parent.rel_l2} if measurements.vs_parent else {}
    blamed = blame({**ancestors, **own}, Comparison.over(measurements.cases).rel_l2)
    return compared.model_copy(update={"blame": blamed})


def _effects(measurements: StageMeasurements) -> list[tuple[str, tuple[int, int]]]:
    return [*(measurements.effects | measurements.placed).items()]
