"""Hold what was found about a stage against its limits and the recipe's waivers, and say which pass is to blame."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from itertools import zip_longest

from bertopt.results import Blame, Failure, Limits, Stage, Waiver, nan_max


def failures(row: Stage, limits: Limits) -> list[Failure]:
    """Every way in which an examined stage misses what it must show. A comparison with NaN never passes.

    Where the model is its parent's (see `noop`), there is nothing that its pass could show.
    """
    found = [
        Failure(gate="effects", metric=None, text=f"the committed model must show {expected} {what}; found {got}")
        for what, (expected, got) in row.effects.items()
        if expected != got and row.changed is not False
    ]
    if row.parity:
        for text, metric in zip_longest(row.parity.failures, row.parity.failed):
            found.append(Failure(gate="parity", metric=metric, text=text))
    if limits.metric_drop_max is not None and row.quality and not (-row.quality.change <= limits.metric_drop_max):
        text = f"{row.quality.metric} may drop by at most {limits.metric_drop_max:g}; got {row.quality.change:+.4f}"
        found.append(Failure(gate="quality", metric=_waivable("metric_drop_max", row.quality.change), text=text))
    if limits.invariance_max is not None and row.invariance and not row.invariance.max_abs <= limits.invariance_max:
        value, where = row.invariance.max_abs, row.invariance.where
        text = f"one text's answer may vary with its company by at most {limits.invariance_max:g}; got {value:.6g} ({where})"
        found.append(Failure(gate="invariance", metric=_waivable("invariance_max", value), text=text))
    if row.ranking:
        for metric, value in (("spearman", row.ranking.spearman), ("top_k_overlap", row.ranking.top_k_overlap)):
            limit = getattr(limits, f"{metric}_min")
            if limit is not None and not value >= limit:
                text = f"{metric} must be at least {limit:g}; got {value:.6g}"
                found.append(Failure(gate="ranking", metric=_waivable(f"{metric}_min", value), text=text))
    return found


def unmeasurable(limits: Limits, quality: bool, ranking: bool) -> list[str]:
    """What is wrong with stating `limits` where there is no task metric, or no embeddings to rank."""
    found = []
    if limits.metric_drop_max is not None and not quality:
        found.append("metric_drop_max needs a classifier and labelled texts; give inputs.texts with labels, or drop it")
    for metric in ("spearman_min", "top_k_overlap_min"):
        if getattr(limits, metric) is not None and not ranking:
            found.append(f"{metric} needs a model that gives one embedding a text; drop it")
    return found


def noop(row: Stage) -> str | None:
    """Why an examined stage counts as one whose pass changed nothing, or None."""
    if row.changed is not False:
        return None
    missing = [f"{expected} {what}; found {got}" for what, (expected, got) in row.effects.items() if expected != got]
    shown = f"shows nothing of it: expected {', '.join(missing)}" if missing else "is its parent's"
    return (
        f"the pass claims {sum(row.changes.values())} changes, but the committed model {shown}; "
        "remove the step, or say allow_noop: true"
    )


def _waivable(metric: str, value: float) -> str | None:
    """NaN and infinity are no figures that somebody could accept."""
    return metric if math.isfinite(value) else None


def settle(row: Stage, limits: Limits, waivers: Sequence[Waiver], today: datetime.date) -> str | None:
    """Fill in the failures of an examined `row` and what is waived of them; the reason it fails, or None.

    A waiver holds through its last day; after it the failure says that it expired.
    """
    row.failures, row.waived = failures(row, limits), []
    reasons: list[str] = []
    for failure in row.failures:
        waiver = next((w for w in waivers if (w.stage, w.metric) == (row.name, failure.metric)), None)
        if waiver is None:
            reasons.append(failure.text)
        elif waiver.expires < today:
            reasons.append(f"{failure.text} (its waiver expired on {waiver.expires}: {waiver.reason})")
        else:
            failure.waiver = waiver
            row.waived.append(f"{failure.text}, waived until {waiver.expires}: {waiver.reason}")
    if not reasons:
        return None
    if row.parity and any(failure.gate == "parity" and failure.waiver is None for failure in row.failures):
        blame = row.parity.blame
        by = f", introduced by '{blame.stage}'" if blame and blame.stage != row.name else ""
        return f"{'; '.join(reasons)} at {row.parity.worst.where}{by}"
    return "; ".join(reasons)


def blame(line: Sequence[Stage]) -> Blame | None:
    """Which stage of `line`, the examined stages from the checkpoint's child to the one judged, differs most from its
    parent. The first of equals, and NaN before any number: a stage after the first NaN only inherits it."""
    known = [(row, row.parity.vs_parent.rel_l2) for row in line if row.parity and row.parity.vs_parent]
    last = line[-1].parity if line else None
    if not known or last is None:
        return None
    stage, added = max(known, key=lambda pair: math.inf if math.isnan(pair[1]) else pair[1])
    return Blame(stage=stage.name, rel_l2=added, total=nan_max(case.rel_l2 for case in last.cases))


def idle(waivers: Sequence[Waiver], rows: Sequence[Stage]) -> list[str]:
    """A warning for each waiver that covered nothing of a stage that was found good."""
    by_name = {row.name: row for row in rows if row.status == "ok"}
    return [
        f"the waiver of {waiver.metric} for '{waiver.stage}' covers nothing: the limit is kept; remove it"
        for waiver in waivers
        if waiver.stage in by_name and not any(waiver.metric == f.metric for f in by_name[waiver.stage].failures)
    ]
