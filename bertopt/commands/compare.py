"""`bertopt compare`: two artefacts, or two reports. The first is the baseline."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bertopt import stages
from bertopt._version import __version__
from bertopt.checks import parity
from bertopt.checks.gates import GateOutcome
from bertopt.commands import beside, fidelity, path_advice
from bertopt.errors import UsageError
from bertopt.modeling.source import examine, resolve
from bertopt.pipeline import pair, rows
from bertopt.pipeline.progress import ProgressCallback
from bertopt.pipeline.rows import StageBuild
from bertopt.recipe.suggest import nearest
from bertopt.recipe.texts import read_or_built_in
from bertopt.report import diff
from bertopt.report.diff import Diff, Tolerances
from bertopt.results import Limits, Report, Stage
from bertopt.stages.opening import Opened, opening
from bertopt.system import temporary_directory
from bertopt.workers.client import Workers

REPORT_OR_ARTEFACT = "an artefact, a report.json, or the directory of a run that holds one"


def compare(
    baseline: Path, candidate: Path, tolerances: Tolerances, texts: Path | None = None, on_progress: ProgressCallback = lambda _: None,
    key: Path | None = None, against: str | None = None,
) -> Diff:  # fmt: skip
    """Compare `candidate` with `baseline`: two artefact or stage directories, or two reports.

    Artefacts are opened side by side here: parity of the candidate against the baseline on the probes and `texts`, weights as far as both
    are of one checkpoint, the task metric where texts have labels, and an interleaved race; with the public `key` both must be signed with
    it. The candidate is also compared with the checkpoint `against`, as `verify` does, or with the one that a baseline in torch holds.
    Reports are only read. Raises UsageError where the two do not go together, IntegrityError where a file changed, Unsupported
    where this machine cannot run one.
    """
    sides = [_is_stage(path) for path in (baseline, candidate)]
    if sides[0] != sides[1]:
        artefact, other = (baseline, candidate) if sides[0] else (candidate, baseline)
        read_report(other, REPORT_OR_ARTEFACT)  # a path that is neither is the mistake to name
        raise UsageError(
            f"compare takes two artefacts or two reports; got one of each: '{artefact}' is an artefact, '{other}' a report; "
            "name both directories that hold manifest.json, or both report.json"
        )
    names = str(baseline), str(candidate)
    if all(sides):
        return _artefacts(baseline, candidate, names, tolerances, texts, on_progress, key, against)
    if against is not None:
        raise UsageError("--against goes with two artefacts; give it to `bertopt verify`, whose report is then compared with --baseline")
    if key is not None:
        raise UsageError("--key goes with two artefacts; reports are not signed")
    if texts is not None:
        raise UsageError("--texts goes with two artefacts; the figures of reports are those of their own texts")
    before, after = (read_report(path, REPORT_OR_ARTEFACT) for path in (baseline, candidate))
    for field in ("family", "task"):
        if before.model.get(field) != after.model.get(field):
            raise UsageError(
                f"the reports are of different models: {field} {before.model.get(field)} and {after.model.get(field)}"
            )
    old, new = diff.shapes(before), diff.shapes(after)
    if old and new and not {*old} & {*new}:
        raise UsageError(
            f"the reports must have timed shapes in common; got {', '.join(old)} in '{baseline}', "
            f"{', '.join(new)} in '{candidate}'; export both with the same inputs.shapes"
        )
    differences = [*diff.other_shapes(before, after), *diff.environment(before.environment, after.environment)]
    if before.model.get("sha256") != after.model.get("sha256"):
        differences.insert(0, f"checkpoint: {before.model.get('source')} → {after.model.get('source')}, other weights")
    return diff.conclude(names, differences, tolerances, diff.reports(before, after, tolerances))


def with_baseline(fresh: Report, baseline: Path, tolerances: Tolerances) -> Diff:
    """What `verify` measured of an artefact just now, against the delivered stage of an earlier report."""
    before = read_report(baseline)
    old, new = delivered(before, baseline), fresh.stages[-1]
    same = not diff.hardware(before.environment, fresh.environment)
    changes = diff.stages(old, new, tolerances, same)
    differences = [*diff.other_shapes(before, fresh), *diff.environment(before.environment, fresh.environment)]
    return diff.conclude((str(baseline), fresh.model["source"]), differences, tolerances, changes)


def read_report(path: Path, takes: str = "a report.json, or the directory of a run that holds one") -> Report:
    """The report in a file, or in a directory as `report.json`. Raises UsageError where there is none."""
    file = path / path_advice.REPORT if path.is_dir() else path
    try:
        return Report.model_validate_json(file.read_bytes())
    except OSError as error:
        raise UsageError(f"'{file}' cannot be read ({error.strerror}); {path_advice.advice(path, takes)}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        if (written_by := _version(file)) is not None:
            raise UsageError(
                f"'{file}' was written by bertopt {written_by}, and this is {__version__}, which cannot read it: {where}: {first['msg']}; "
                "read it with that version, or export again with this one"
            ) from error
        why = "export again" if file.name == path_advice.REPORT else path_advice.advice(path, takes)
        raise UsageError(f"'{file}' is not a report of bertopt: {where}: {first['msg']}; {why}") from error


def _version(file: Path) -> str | None:
    """Return the version that a report says it was written by, None where the file is not a report."""
    with contextlib.suppress(ValueError, OSError, AttributeError):
        found = json.loads(file.read_bytes()).get("bertopt_version")
        return found if isinstance(found, str) else None
    return None


def delivered(report: Report, path: Path) -> Stage:
    """The stage that `report` delivered. Raises UsageError where it delivered none."""
    if report.delivered is None:
        raise UsageError(f"'{path}' delivered nothing ({report.reason}); give the report of a run that did")
    return report.stage(report.delivered.stage)


def limits(stated: Sequence[str]) -> Limits:
    """`rel_l2=0.01` and the like as Limits. Raises UsageError with every mistake."""
    found: dict[str, Any] = {}
    problems = []
    for item in stated:
        name, _, value = item.partition("=")
        try:
            number = float(value)
        except ValueError:
            problems.append(f"--limits {item}: expected LIMIT=NUMBER, such as rel_l2=0.01")
            continue
        try:
            Limits.model_validate({name: number})
        except ValidationError as error:
            known = name in Limits.model_fields
            why = error.errors(include_url=False)[0]["msg"] if known else f"unknown limit{nearest(name, Limits.model_fields)}"
            problems.append(f"--limits {item}: {why}")
        found[name] = number
    if problems:
        raise UsageError(*problems)
    return Limits.model_validate(found)


def _is_stage(path: Path) -> bool:
    return path.is_dir() and (path / stages.MANIFEST).is_file()


def _artefacts(
    a: Path, b: Path, names: tuple[str, str], tolerances: Tolerances, texts: Path | None, on_progress: ProgressCallback, key: Path | None,
    against: str | None,
) -> Diff:  # fmt: skip
    if a.resolve() == b.resolve():
        raise UsageError(f"'{a}' and '{b}' are the same directory; give two")
    with opening(a, key) as old, opening(b, key) as new:
        return _opened(old, new, names, tolerances, texts, on_progress, against)


def _opened(
    first: Opened, second: Opened, names: tuple[str, str], tolerances: Tolerances, texts: Path | None, on_progress: ProgressCallback,
    against: str | None,
) -> Diff:  # fmt: skip
    before, after = first.manifest, second.manifest
    compared_on = read_or_built_in(texts)
    if against is not None:  # before anything slow, as `verify` does
        examine(resolve(against, fidelity.revision(after, against)))
    with temporary_directory.make() as records, Workers() as workers:
        old, new, examiner = pair.measure(workers, first.path, second.path, compared_on, pair.shapes(after), Path(records), on_progress)
        held = beside.limits(before, after, tolerances.limits, new.peak)
        compared = examiner.show(parity.judge(new.cases, held, new.vs_parent))
        # A network in torch is the checkpoint and the passes to replay on it.
        source = against or (str(first.path) if beside.holds_checkpoint(before, after) else None)
        checked = None if source is None else fidelity.untimed(workers, second.path, after, source, compared_on, on_progress, tolerances.limits, against is not None)
    baseline = rows.make(0, pair.name(before), GateOutcome("ok"), StageBuild.of(before), old)
    candidate = rows.make(1, pair.name(after), GateOutcome("ok", parity=compared), StageBuild.of(after), new)
    differences = diff.environment(before.environment, after.environment)
    differences += checked.warnings if checked else []
    changes = [*diff.artefacts(baseline, candidate, tolerances, held), *beside.changes(before, after, new, held, str(names[1]))]
    changes += diff.fidelity(checked.row) if checked else []
    not_compared = beside.not_compared(before, after, new, checked.row.certificate if checked else None, checked is not None)
    advice = "give --against CHECKPOINT" if not_compared and checked is None else None
    return diff.conclude(names, differences, tolerances, changes, not_compared, advice)
