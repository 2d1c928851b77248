"""JUnit XML of a run, a verification or a comparison, for continuous integration: one case a stage and gate."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args
from xml.etree import ElementTree

from bertopt.report import formatting
from bertopt.report.diff import Diff
from bertopt.results import Gate, Report, Stage
from bertopt.system import atomic_write

GATES: tuple[Gate, ...] = get_args(Gate)
#: Everything that XML 1.0 has no place for, even escaped.
_NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Check:
    """One test case. `text` is why it failed or was skipped; what else there is to say goes into `output`."""

    stage: str
    gate: str
    outcome: Literal["passed", "failure", "error", "skipped"]
    text: str = ""
    output: str = ""


def write(path: Path, report: Report | None, diff: Diff | None = None) -> None:
    """Write the suites of `report` and `diff` to `path`, whole or not at all."""
    atomic_write.write(path, render(report, diff))


def render(report: Report | None, diff: Diff | None = None) -> str:
    """The XML document: a suite for the report, and one for the comparison."""
    root = ElementTree.Element("testsuites", name="bertopt")
    if report is not None:
        name = str(report.model.get("source") or report.recipe.get("model") or "report")
        _suite(root, f"bertopt {name}", [*checks(report)], properties(report.environment), report.wall_s)
    if diff is not None:
        described = {f"difference.{index + 1}": text for index, text in enumerate(diff.environment)}
        _suite(root, f"bertopt {diff.candidate} against {diff.baseline}", [*comparisons(diff)], described, 0.0)
    for count in ("tests", "failures", "errors", "skipped"):
        root.set(count, str(sum(int(suite.get(count, "0")) for suite in root)))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def checks(report: Report) -> Iterator[Check]:
    """The run itself, then every stage: whether it was built, and each gate."""
    outcome: Literal["passed", "failure", "error"] = "passed"
    if report.exit_code:
        outcome = "failure" if report.exit_code == 3 else "error"
    yield Check(
        "run", "exit code", outcome, report.reason or f"exit code {report.exit_code}" if report.exit_code else ""
    )
    for row in report.stages:
        yield from _stage(row)


def _stage(row: Stage) -> Iterator[Check]:
    reason = row.reason or row.status
    gates: tuple[str, ...] = ("build", *GATES)
    if row.status in ("unsupported", "unverified", "skipped"):
        yield from (Check(row.name, gate, "skipped", f"{row.status}: {reason}") for gate in gates)
        return
    missed = [failure for failure in row.failures if failure.waiver is None]
    broke = row.status in ("failed", "noop", "reverted") and not missed
    if row.status == "reverted":
        yield Check(row.name, "build", "skipped", f"reverted, as the recipe asks: {reason}")
    elif broke:
        yield Check(row.name, "build", "failure", reason, str(row.facts.get("log", "")))
    else:
        yield Check(row.name, "build", "passed")
    figures: dict[Gate, Any] = {
        "effects": row.effects, "parity": row.parity, "invariance": row.invariance, "ranking": row.ranking,
        "quality": row.quality, "latency": row.latency, "resources": row.size_bytes,
        "coverage": row.coverage, "rounding": row.rounding,
        "certificate": row.certificate and row.certificate.status != "none",
    }  # fmt: skip
    for gate in GATES:
        texts = [failure.text for failure in missed if failure.gate == gate]
        if row.status == "reverted":
            yield Check(row.name, gate, "skipped", "; ".join(texts) or "reverted")
        elif texts:
            yield Check(row.name, gate, "failure", "; ".join(texts), reason)
        elif not figures[gate]:
            yield Check(row.name, gate, "skipped", "not measured")
        elif gate == "latency" and (slow := row.slow()):
            yield Check(row.name, gate, "skipped", f"no speedup_min is stated, and {slow}", "\n".join(_words(row, gate)))
        else:
            yield Check(row.name, gate, "passed", output="\n".join(_words(row, gate)))


def _words(row: Stage, gate: Gate) -> Iterator[str]:
    for failure in row.failures:
        if failure.gate == gate and failure.waiver:
            yield f"waived until {failure.waiver.expires}: {failure.text} ({failure.waiver.reason})"
    if gate == "parity" and row.parity:
        worst = row.parity.worst
        yield f"{worst.metric} {worst.value:.6g} (limit {worst.limit:g}) at {worst.where}"
    if gate == "rounding" and row.rounding:
        yield formatting.rounding(row.rounding)
    if gate == "certificate" and row.certificate:
        yield formatting.certificate(row.certificate)
    if gate == "quality" and row.quality:
        for metric in (row.quality, *row.quality.others):
            yield f"{metric.metric} {metric.value:.4f} ({metric.change:+.4f})"
    if gate == "latency":
        for case in row.latency or []:
            yield f"{case.what}: {case.p50_ms:.3f} ms" + (f", {case.vs_reference}" if case.vs_reference else "")


def comparisons(diff: Diff) -> Iterator[Check]:
    """A case for every stage and gate; its regressions make it fail."""
    groups: dict[tuple[str, str], list[str]] = {}
    for change in diff.changes:
        found = groups.setdefault((change.stage, change.gate), [])
        found += [change.regression] if change.regression else []
    for (stage, gate), texts in groups.items():
        yield Check(stage, gate, "failure" if texts else "passed", "; ".join(texts))
    for text in diff.not_compared:
        what, _, why = text.partition(": ")
        yield Check("not compared", what, "skipped", "; ".join(filter(None, (why, diff.advice))))


def properties(environment: Mapping[str, Any]) -> dict[str, str]:
    """The environment flat: `packages.torch` and the like."""
    found: dict[str, str] = {}
    for key, value in environment.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{inner}": text for inner, text in properties(value).items()}
        else:
            found[key] = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return found


def _suite(
    root: ElementTree.Element, name: str, cases: list[Check], described: Mapping[str, str], wall_s: float
) -> None:
    def count(outcome: str) -> str:
        return str(sum(case.outcome == outcome for case in cases))

    suite = ElementTree.SubElement(
        root, "testsuite", name=_clean(name), tests=str(len(cases)), failures=count("failure"), errors=count("error"),
        skipped=count("skipped"), time=f"{wall_s:.3f}",
    )  # fmt: skip
    if described:
        parent = ElementTree.SubElement(suite, "properties")
        for key, value in described.items():
            ElementTree.SubElement(parent, "property", name=_clean(key), value=_clean(value))
    for case in cases:
        # Readers expect a time; what one gate took is not measured apart.
        element = ElementTree.SubElement(
            suite, "testcase", classname=_clean(case.stage), name=_clean(case.gate), time="0"
        )
        if case.outcome != "passed":
            child = ElementTree.SubElement(element, case.outcome, message=_clean(" ".join(case.text.split())))
            if case.outcome != "skipped":
                child.text = _clean(case.text)
        if case.output:
            ElementTree.SubElement(element, "system-out").text = _clean(case.output)


def _clean(text: str) -> str:
    return _NO_XML.sub("\N{REPLACEMENT CHARACTER}", text)
