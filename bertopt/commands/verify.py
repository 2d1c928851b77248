"""`bertopt verify`: is this artefact what was exported, can it run here, and is it still the same model?"""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bertopt import stages
from bertopt._version import __version__
from bertopt.checks import gates
from bertopt.commands import fidelity
from bertopt.errors import Unsupported, WrongAnswer
from bertopt.modeling.source import examine, resolve
from bertopt.pipeline.progress import ProgressCallback
from bertopt.recipe.texts import Texts, read_or_built_in
from bertopt.results import Report
from bertopt.runtime import replay
from bertopt.stages.opening import opening
from bertopt.system import environment
from bertopt.workers.client import Workers


def verify(
    directory: Path, against: str | None = None, texts: Path | None = None, key: Path | None = None,
    on_progress: ProgressCallback = lambda _: None,
) -> Report:  # fmt: skip
    """Re-check an artefact on this machine.

    Checks hashes, with `key` the signature by that public key, and a short run of the model; with a checkpoint also parity and latency. The
    limits are those that the artefact passed when it was exported; its waivers hold until their last day. Raises IntegrityError where a file
    changed, also during the verification: workers open the files that were hashed here.
    """
    started = time.monotonic()
    with opening(directory, key) as opened:
        report = _verified(directory, opened.path, opened.manifest, against, texts, on_progress)
    report.wall_s = time.monotonic() - started
    if key is not None and not report.exit_code:
        report.reason = f"signed with {key.name}; {report.reason}"
    return report


def _verified(
    source: Path, directory: Path, manifest: stages.Manifest, against: str | None, texts: Path | None, on_progress: ProgressCallback
) -> Report:
    """Verify the artefact `source`, whose hashed files are in `directory`: itself, or a private copy."""
    report = Report(
        bertopt_version=__version__, recipe=timed_in_full(manifest.recipe or {}), environment=environment.describe(),
        model={"source": str(source), "warnings": _differences(manifest)},
    )  # fmt: skip
    compared_on = read_or_built_in(texts)
    if against is not None:  # before anything slow: most unfit checkpoints are told by their small files
        examine(resolve(against, fidelity.revision(manifest, against)))
    with Workers() as workers:
        try:
            report.model["warnings"] += _other_gpu(workers, manifest)
            runs = _kernels(_smoke(workers, directory, manifest))
            if against is None:
                report.reason = f"files are as exported and the model answers{runs}; give --against CHECKPOINT to check parity"
            else:
                _compare(report, workers, directory, manifest, against, compared_on, on_progress)
        except Unsupported as error:
            report.exit_code, report.reason = 4, f"this machine cannot run the artefact: {error}"
        except WrongAnswer as error:
            report.exit_code, report.reason = gates.FAILED, str(error)
    _expired(report, manifest)
    return report


def timed_in_full(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe that an artefact was exported with, without `quick`: what is timed here is timed in full."""
    timing = recipe.get("timing")
    return {**recipe, "timing": {**timing, "quick": False}} if timing else dict(recipe)


def _differences(manifest: stages.Manifest) -> list[str]:
    """How this machine differs from the one that exported, where it matters to figures or kernels."""
    then, now = manifest.environment, environment.describe()
    runtime = {"eager": "torch", "compiled": "torch", "onnx": "onnxruntime", "openvino": "openvino", "native": "bertopt-native"}.get(
        manifest.form
    )
    notes = [
        f"{key} differs: exported on {then[key]}, here {now[key]}" for key in ("cpu", "isa") if then[key] != now[key]
    ]
    if runtime and then["packages"].get(runtime) != now["packages"].get(runtime):
        notes.append(
            f"{runtime} differs: exported with {then['packages'].get(runtime)}, here {now['packages'].get(runtime)}"
        )
    return notes


def _other_gpu(workers: Workers, manifest: stages.Manifest) -> list[str]:
    """How the GPU here differs from the one that the artefact was exported on."""
    if manifest.gpu is None:
        return []
    with workers.start() as worker:
        now = worker.call("device")["gpu"]
    return [
        f"GPU {field} differs: exported on {then}, here {now[field]}"
        for field, then in manifest.gpu.model_dump().items()
        if now and now[field] != then
    ]


def _smoke(workers: Workers, directory: Path, manifest: stages.Manifest) -> dict[str, Any]:
    """Run the model on a few texts; return what its session says of itself. Raises WrongAnswer for others than recorded."""
    with workers.start() as worker:
        worker.call("open", directory=str(directory.resolve()), device=manifest.device)
        asks = manifest.spec.task == "question-answering"
        worker.call("mix", texts=[["who?", "nobody"]] if asks else ["a text", "another"])
        worker.call("time_mix", steps=1)
        if manifest.answers is not None:
            replay.check(worker.call("replay"), manifest.answers, manifest.precision, f"'{directory}'")
        facts: dict[str, Any] = worker.call("stats")["facts"]
        return facts


def _kernels(facts: Mapping[str, Any]) -> str:
    """The instruction set that runs the model, where its runtime says it."""
    return f" on {facts['isa']} kernels" if "isa" in facts else ""


def _compare(
    report: Report, workers: Workers, directory: Path, manifest: stages.Manifest, against: str, texts: Texts, on_progress: ProgressCallback
) -> None:
    """Measure the artefact beside the checkpoint `against`, and fill in the report's stages, exit code and reason."""
    found = fidelity.against(workers, directory, manifest, against, texts, on_progress)
    report.environment["cuda"] = found.cuda
    report.model["warnings"] += found.warnings
    report.stages = [found.reference, found.row]
    report.exit_code = found.outcome.exit_code
    report.reason = f"'{found.row.name}' failed: {found.row.reason}"
    if found.row.status == "ok":
        report.reason = f"the artefact is still the same model: {found.parity.worst.metric} {found.parity.worst.value:.6g}"
        report.reason += _kernels(found.row.facts)


def _expired(report: Report, manifest: stages.Manifest) -> None:
    """Fail an artefact that was delivered under a waiver which has expired, whatever is measured here."""
    over = [waiver for waiver in fidelity.waivers(manifest) if waiver.expires < datetime.date.today()]
    if over and not report.exit_code:
        report.exit_code = gates.FAILED
        report.reason = (
            f"'{over[0].stage}' failed: it was delivered under a waiver of {over[0].metric} ({over[0].reason}), "
            f"which expired on {over[0].expires}; export again"
        )
        for row in report.stages[1:]:
            row.status, row.reason = "failed", report.reason
