"""Compare two results of a stage: which figures got worse by more than the tolerance. Loads no model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from bertopt.results import Comparison, Latency, Limits, Ratio, Report, Stage, is_least

Unit = Literal["", "x", "ms", "bytes"]


class Tolerances(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """How much worse than the baseline a figure may be. `limits` override the baseline's limits on parity."""

    slower: float = Field(0.05, ge=0, description="share by which a speed-up may fall, where the intervals are apart")
    bigger: float = Field(0.10, ge=0, description="share by which the size on disk may grow")
    memory: float = Field(0.25, ge=0, description="share by which the peak memory may grow")
    quality_drop: float = Field(0.005, ge=0, description="amount by which the task metric may drop")
    limits: Limits = Field(Limits(), description="parity limits of all stages, over the baseline's")


class Change(BaseModel, extra="forbid", ser_json_inf_nan="strings"):
    """One figure before and after. `regression` says why it is one, or is None."""

    stage: str
    gate: str
    what: str
    unit: Unit = ""
    before: float | None = None
    after: float | None = None
    note: str | None = None
    regression: str | None = None


class Diff(BaseModel, extra="forbid", ser_json_inf_nan="strings"):
    """All figures of a candidate against a baseline."""

    baseline: str
    candidate: str
    environment: list[str]
    """Differences of the environments in which the two were measured."""
    tolerances: Tolerances
    changes: list[Change]
    not_compared: list[str] = []
    """What two artefacts did not show of a model in reduced precision, each with the reason."""
    advice: str | None = None
    """What to do for that."""
    exit_code: int
    reason: str

    def regressions(self) -> list[Change]:
        return [change for change in self.changes if change.regression]


def conclude(
    names: tuple[str, str], environment: list[str], tolerances: Tolerances, changes: Sequence[Change], not_compared: Sequence[str] = (),
    advice: str | None = None,
) -> Diff:  # fmt: skip
    """The verdict over `changes`; `names` are the baseline's and the candidate's. `advice` is for what was not compared."""
    found = [change for change in changes if change.regression]
    reason = f"no regression in {len(changes)} figures against {names[0]}"
    if not_compared:
        left_out = ", ".join(text.partition(":")[0] for text in not_compared)
        reason += f"; NOT compared: {left_out}{f' ({advice})' if advice else ''}"
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        reason = f"'{found[0].stage}' regressed: {found[0].regression}{more}"
    return Diff(
        baseline=names[0], candidate=names[1], environment=environment, tolerances=tolerances, changes=list(changes),
        not_compared=list(not_compared), advice=advice, exit_code=3 if found else 0, reason=reason,
    )  # fmt: skip


def reports(before: Report, after: Report, tolerances: Tolerances) -> list[Change]:
    """Every stage of `before` against the stage of the same name; one that is gone is a regression."""
    there = {row.name: row for row in after.stages}
    same = not hardware(before.environment, after.environment)
    found: list[Change] = []
    for row in before.stages:
        if row.name in there:
            found += stages(row, there[row.name], tolerances, same)
        else:
            text = "the stage is missing; the baseline has it"
            found.append(Change(stage=row.name, gate="status", what=row.status, regression=text))
    known = {row.name for row in before.stages}
    found += [
        Change(stage=row.name, gate="status", what=row.status, note="new: the baseline does not have it")
        for row in after.stages
        if row.name not in known
    ]
    return found


def stages(before: Stage, after: Stage, tolerances: Tolerances, same_hardware: bool) -> list[Change]:
    """One stage's figures in two reports, each of which compared it with its own reference."""
    name, worse = after.name, before.status == "ok" and after.status != "ok"
    why = f": {after.reason}" if after.reason else ""
    text = f"{before.status} → {after.status}{why}"
    found = [Change(stage=name, gate="status", what=after.status, note=None if worse else text, regression=text if worse else None)]  # fmt: skip
    if before.parity and (after.parity or after.status == "ok"):
        found += _parity(before, after, tolerances.limits)
    if before.quality and (after.quality or after.status == "ok"):
        found.append(_quality(before, after, tolerances))
    if after.latency or after.status == "ok":
        found += _latency(before, after, tolerances, same_hardware)
    return [*found, *_resources(before, after, tolerances)]


def artefacts(before: Stage, after: Stage, tolerances: Tolerances, limits: Limits) -> list[Change]:
    """Compare `after` with `before`, against which it was measured: differences of outputs, and a race of the two."""
    name = after.name
    found = [
        Change(stage=name, gate="effects", what=what, before=expected, after=got,
               regression=None if got == expected else f"the model must show {expected} {what}; found {got}")
        for what, (expected, got) in after.effects.items()
    ]  # fmt: skip
    for metric, (gate, value) in figures(after).items():
        limit = getattr(limits, metric)
        note = f"limit {limit:g}" if limit is not None else None
        found.append(Change(stage=name, gate=gate, what=metric, after=value, note=note,
                            regression=_missed(metric, limit, None, value)))  # fmt: skip
    if after.parity and not all(case.finite for case in after.parity.cases):
        text = "answers that are not compared must be finite"
        found.append(Change(stage=name, gate="parity", what="finite", regression=text))
    if before.quality and after.quality:
        found.append(_quality(before, after, tolerances))
    old = {case.what: case for case in before.latency or []}
    for case in after.latency or []:
        ratio, ms = case.vs_reference, old[case.what].p50_ms if case.what in old else None
        found.append(Change(stage=name, gate="latency", what=case.what, unit="ms", before=ms, after=case.p50_ms))
        note = case.warning if ratio is None else _interval(ratio) if ratio.too_wide else str(ratio)
        found.append(_speed(name, Ratio(ratio=1, low=1, high=1), case, case.what, note, tolerances))
    return [*found, *_resources(before, after, tolerances)]


def fidelity(row: Stage) -> list[Change]:
    """What `row` shows beside its checkpoint: the figures of rounding, the certificate, and every limit that it misses."""
    found = []
    if row.rounding:
        limits = row.parity.limits if row.parity else Limits()
        for metric, value in row.rounding.model_dump().items():
            limit = getattr(limits, f"{metric}_max", None)
            if value is not None and limit is not None:
                found.append(Change(stage=row.name, gate="rounding", what=metric, after=value, note=f"against the checkpoint, limit {limit:g}"))
    if row.certificate:
        found.append(Change(stage=row.name, gate="certificate", what="weights", after=row.certificate.weights, note=row.certificate.reason))
    for failure in row.failures:
        what, text = failure.metric or "finite", f"against the checkpoint: {failure.text}"
        waived = failure.waiver is not None
        note = f"{text}, waived until {failure.waiver.expires}" if failure.waiver else None
        found.append(Change(stage=row.name, gate=failure.gate, what=what, note=note, regression=None if waived else text))
    missed = row.status != "ok" and all(failure.waiver for failure in row.failures)
    return found + ([Change(stage=row.name, gate="status", what=row.status, regression=f"against the checkpoint: {row.reason}")] if missed else [])


def figures(row: Stage) -> dict[str, tuple[str, float]]:
    """Gate and value of every field of Limits, but the task metric's, that `row` has a figure for."""
    found: dict[str, tuple[str, float]] = {}
    if row.parity and row.parity.cases:
        total = Comparison.over(row.parity.cases)
        for metric in ("max_abs", "rel_l2", "cosine_min", "cosine_mean"):
            found[metric] = ("parity", getattr(total, metric))
        if total.label_flips is not None:
            found["label_flips_max"] = ("parity", total.label_flips / max(total.compared, 1))
    if row.invariance:
        found["invariance_max"] = ("invariance", row.invariance.max_abs)
    if row.ranking:
        found["spearman_min"] = ("ranking", row.ranking.spearman)
        found["top_k_overlap_min"] = ("ranking", row.ranking.top_k_overlap)
    return found


def shapes(report: Report) -> list[str]:
    """The shapes that stages were timed on: `8 × 128`."""
    return list(dict.fromkeys(case.what for row in report.stages for case in row.latency or [] if case.kind == "shape"))


def other_shapes(before: Report, after: Report) -> list[str]:
    """A sentence where one of two reports was timed on shapes that the other was not."""
    old, new = shapes(before), shapes(after)
    sides = {"baseline": [one for one in old if one not in new], "candidate": [one for one in new if one not in old]}
    words = [f"{', '.join(alone)} only in the {side}" for side, alone in sides.items() if alone]
    return [f"shapes: {', '.join(words)}; they are not compared"] if words and old and new else []


def hardware(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences of hardware, with which times in milliseconds are not comparable."""
    keys = ("cpu", "cores", "isa", "cuda")
    return [_differs(key, then.get(key), now.get(key)) for key in keys if then.get(key) != now.get(key)]


def environment(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Every difference of hardware, system, Python and packages, in words."""
    found = hardware(then, now)
    found += [_differs(key, then.get(key), now.get(key)) for key in ("system", "python") if then.get(key) != now.get(key)]  # fmt: skip
    old, new = then.get("packages") or {}, now.get("packages") or {}
    return found + [_differs(key, old.get(key), new.get(key)) for key in sorted({*old, *new}) if old.get(key) != new.get(key)]  # fmt: skip


def _differs(what: str, then: Any, now: Any) -> str:
    words = ["none" if side is None else " ".join(map(str, side)) if isinstance(side, list) else str(side) for side in (then, now)]  # fmt: skip
    return f"{what}: {words[0]} → {words[1]}"


def _parity(before: Stage, after: Stage, stated: Limits) -> Iterator[Change]:
    """Compare parity by the baseline's limits, which shows a candidate that loosened its own."""
    assert before.parity is not None
    limits, old, new = stated.over(before.parity.limits), figures(before), figures(after)
    waived = {failure.metric: failure.waiver for failure in after.failures if failure.waiver}
    for metric, (gate, value) in old.items():
        limit = getattr(limits, metric)
        now = new[metric][1] if metric in new else None
        missed = _missed(metric, limit, value, now)
        note = f"limit {limit:g}" if limit is not None else None
        if missed and now is not None and metric in waived and getattr(stated, metric) is None:
            note, missed = f"{note}, waived until {waived[metric].expires}: {waived[metric].reason}", None
        yield Change(stage=after.name, gate=gate, what=metric, before=value, after=now, note=note, regression=missed)


def _missed(metric: str, limit: float | None, before: float | None, after: float | None) -> str | None:
    """Return whether a figure is beyond its limit, unless the baseline's was too and was no better. NaN and a missing figure are beyond."""
    if after is None:
        return f"{metric} has no figure; the baseline has {before:.6g}"
    if limit is None:
        return None
    sign = -1 if is_least(metric) else 1
    if sign * after <= sign * limit:
        return None
    if before is not None and not sign * before <= sign * limit and sign * after <= sign * before:
        return None
    was = "" if before is None else f" (baseline {before:.6g})"
    return f"{metric} must be {'at most' if sign > 0 else 'at least'} {limit:g}; got {after:.6g}{was}"


def _quality(before: Stage, after: Stage, tolerances: Tolerances) -> Change:
    assert before.quality is not None
    old, new = before.quality, after.quality
    found = Change(stage=after.name, gate="quality", what=old.metric, before=old.value, after=new and new.value)
    if new is None:
        found.regression = f"no {old.metric} was measured; give the labelled texts of the baseline"
    elif (old.metric, old.n) != (new.metric, new.n):
        found.regression = f"measured on other texts ({old.metric} of {old.n} → {new.metric} of {new.n}); use the same"
    elif not old.value - new.value <= tolerances.quality_drop:
        found.regression = f"{old.metric} may drop by at most {tolerances.quality_drop:g}; it went from {old.value:.4f} to {new.value:.4f}"  # fmt: skip
    return found


def _latency(before: Stage, after: Stage, tolerances: Tolerances, same_hardware: bool) -> Iterator[Change]:
    new = {case.what: case for case in after.latency or []}
    for old in before.latency or []:
        what = old.what
        case = new.get(what)
        if case is None and new and old.kind == "shape":
            continue  # timed on other shapes: `other_shapes` names them
        note = None if same_hardware else "other hardware: not comparable"
        yield Change(stage=after.name, gate="latency", what=what, unit="ms", before=old.p50_ms, after=case and case.p50_ms, note=note)  # fmt: skip
        if old.vs_reference is not None:
            intervals = f"{_interval(old.vs_reference)} → {_interval(case.vs_reference if case else None)}"
            yield _speed(after.name, old.vs_reference, case, what, intervals, tolerances)


def _speed(stage: str, old: Ratio, case: Latency | None, what: str, note: str | None, tolerances: Tolerances) -> Change:
    """The speed-up before and after; none is shown of an interval that is too wide, unless it is a regression all the same."""
    regression, ratios = _slower(old, case, tolerances), (old, case.vs_reference if case else None)
    before, after = (ratio.ratio if ratio and (regression or not ratio.too_wide) else None for ratio in ratios)
    return Change(stage=stage, gate="latency", what=what, unit="x", before=before, after=after, note=note, regression=regression)


def _slower(old: Ratio, case: Latency | None, tolerances: Tolerances) -> str | None:
    if case is None or case.vs_reference is None:
        return f"no ratio was measured{f' ({case.warning})' if case and case.warning else ''}; the baseline has {old.ratio:.2f}x"
    new = case.vs_reference
    if new.high >= old.low or new.ratio >= old.ratio * (1 - tolerances.slower):
        return None
    fell = 1 - new.ratio / old.ratio
    return f"{case.what}: {fell:.1%} slower, {tolerances.slower:.1%} allowed: {old.ratio:.2f}x {_interval(old)} → {new.ratio:.2f}x {_interval(new)}"


def _resources(before: Stage, after: Stage, tolerances: Tolerances) -> Iterator[Change]:
    for gate, field, share in (
        ("size", "size_bytes", tolerances.bigger),
        ("memory", "peak_rss_bytes", tolerances.memory),
        ("memory", "peak_gpu_bytes", tolerances.memory),
    ):
        old, new = getattr(before, field), getattr(after, field)
        if old is None or new is None:
            continue
        text = None
        if not new <= old * (1 + share):
            text = f"{gate} grew from {old / 1e6:.1f} to {new / 1e6:.1f} MB; {share:.0%} allowed"
        yield Change(stage=after.name, gate=gate, what=field, unit="bytes", before=old, after=new, regression=text)


def _interval(ratio: Ratio | None) -> str:
    if ratio is None:
        return "none"
    return "no result (the interval is too wide)" if ratio.too_wide else f"[{ratio.low:.2f}, {ratio.high:.2f}]"
