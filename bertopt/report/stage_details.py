"""Details of a stage on the page: how it was built, its worst token, how to reproduce it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from bertopt.report import formatting
from bertopt.results import Case, Comparison, Limits, Parity, Report, Stage, Worst, holds, is_least

_CASE_METRICS = ("max_abs", "rel_l2", "cosine_min", "cosine_mean")
#: Tokens shown on each side of the worst one.
_AROUND = 40


def facts(stage: Stage) -> dict[str, Any]:
    """Everything about how a stage was built."""
    found: dict[str, Any] = {
        "pass": stage.pass_, "after": stage.after, "form": stage.form, "precision": stage.precision, "path": stage.path,
    }  # fmt: skip
    if stage.build_s is not None:
        found["built in"] = f"{stage.build_s:.1f} s" + (" by an earlier run" if stage.reused else "")
    sizes = {"size": stage.size_bytes, "peak memory": stage.peak_rss_bytes, "peak GPU memory": stage.peak_gpu_bytes}
    found |= {key: f"{formatting.megabytes(size)} MB" for key, size in sizes.items() if size is not None}
    return {key: value for key, value in found.items() if value is not None}


def running(stage: Stage) -> dict[str, str]:
    """Return what the session reports, without the log, which is shown separately."""
    return formatting.flat({key: value for key, value in stage.facts.items() if key != "log"})


def worst_first(found: Parity) -> list[Case]:
    return sorted(found.cases, key=lambda case: case.where != found.worst.where)


def case_cells(case: Case, limits: Limits) -> list[tuple[str, bool]]:
    """Each metric's words, and whether it is beyond its limit."""
    found = []
    for metric in _CASE_METRICS:
        value, limit = getattr(case, metric), getattr(limits, metric)
        # Seven digits: a cosine of 0.9999998 is not 1.
        found.append((formatting.figure(value, 7 if is_least(metric) else 3), limit is not None and not holds(metric, value, limit)))
    return found


def against(found: Parity) -> list[tuple[str, list[str]]]:
    """The largest differences from the reference and from the parent, beside each other."""
    lines = [("its parent", found.vs_parent)] if found.vs_parent else []
    if found.cases:
        lines = [("the reference", Comparison.over(found.cases)), *lines]
    return [
        (name, [formatting.figure(total.max_abs, 3), formatting.figure(total.rel_l2, 3), formatting.figure(total.cosine_min, 7),
                formatting.figure(total.cosine_mean, 7),
                formatting.NONE if total.label_flips is None else f"{total.label_flips} of {total.compared}"])
        for name, total in lines
    ]  # fmt: skip


@dataclass(frozen=True)
class Token:
    text: str
    worst: bool


def tokens(worst: Worst) -> list[Token]:
    """The tokens around the worst one, with a count for those left out."""
    every = [Token(formatting.one_line(text) or "␣", i == worst.token) for i, text in enumerate(worst.tokens or [])]
    middle = worst.token or 0
    first, last = max(0, middle - _AROUND), middle + _AROUND + 1
    before, after = first, max(0, len(every) - last)
    return [
        *([Token(f"… {before} before", False)] if before else []),
        *every[first:last],
        *([Token(f"{after} more …", False)] if after else []),
    ]


def effects(stage: Stage) -> list[tuple[str, int, int, bool]]:
    """What, expected, found, and whether they agree."""
    return [(what, expected, got, expected == got) for what, (expected, got) in stage.effects.items()]


def warnings(report: Report) -> Iterator[str]:
    """Of the model first, then of every stage's timing."""
    yield from (str(warning) for warning in report.model.get("warnings") or ())
    if formatting.is_quick(report.recipe):
        yield f"timing is {formatting.QUICK}"
    for stage in report.stages:
        for case in stage.latency or []:
            if case.warning:
                yield f"{stage.name}, {case.what}: {case.warning}"


def doubtful_timings(report: Report) -> str | None:
    """Return how many timings have a warning, and one of these, preferably the delivered stage's; None without any, and for a quick run."""
    timings = [(stage, case) for stage in report.stages for case in stage.latency or []]
    doubtful = [(stage, case) for stage, case in timings if case.warning]
    if not doubtful or formatting.is_quick(report.recipe):
        return None
    stage, case = next((one for one in doubtful if report.delivers(one[0])), doubtful[0])
    return f"{len(doubtful)} of {len(timings)} timings are doubtful: '{stage.name}', {case.what}: {formatting.one_line(case.warning or '')}"


def recipe_yaml(recipe: Mapping[str, Any]) -> str:
    """The recipe as it was run, with every default: a file of this text can be run again."""
    return yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True, width=110, default_flow_style=None)


def reproduce(report: Report) -> str:
    """Return the command for the whole run; `device: auto` becomes the device on which it ran."""
    words = ["bertopt", "export", "recipe.yaml"]
    cuda = report.environment.get("cuda")
    if report.recipe.get("device") == "auto" and isinstance(cuda, Mapping) and "cuda" in cuda:
        words += ["--set", f"device={'cuda' if cuda['cuda'] else 'cpu'}"]
    return shlex.join([*words, "--out", "again"])


@dataclass(frozen=True)
class FailedStage:
    """The stage that ended a run, and the limits that it missed, if several."""

    stage: Stage
    listed: list[str]


def failed(report: Report) -> FailedStage | None:
    """Return the stage that ended the run, None where that was no stage."""
    stage = next((stage for stage in report.stages if stage.status == "failed" and stage.pass_), None)
    if stage is None or not report.exit_code:
        return None
    return FailedStage(stage, _apart(stage.reason or "", [one.text for one in stage.failures if one.waiver is None]))


def _apart(reason: str, failures: Sequence[str]) -> list[str]:
    """Split a reason before each failure that it holds; nothing where it holds fewer than two."""
    starts = [reason.find(text) for text in failures]
    ends = [start - len("; ") for start in starts[1:]]
    if len(starts) < 2 or -1 in starts or starts != sorted(starts):
        return []
    return [reason[start:end] for start, end in zip(starts, [*ends, len(reason)], strict=True)]


def debug(stage: Stage) -> str:
    return shlex.join(["bertopt", "debug", "recipe.yaml", "--stage", formatting.one_line(stage.name)])
