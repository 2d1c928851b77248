"""`bertopt verify`: is this artefact what was exported, can it run here, and is it still the same model?"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from bertopt import __version__, environment, stage
from bertopt.checks import probes
from bertopt.checks.parity import DEFAULT_LIMITS
from bertopt.core import Spec
from bertopt.errors import Unsupported, UsageError
from bertopt.examine import Examiner
from bertopt.results import Limits, Report, Stage
from bertopt.store import Store
from bertopt.texts import Texts, read
from bertopt.worker import Workers


def verify(directory: Path, against: str | None = None, texts: Path | None = None) -> Report:
    """Re-check an artefact on this machine.

    Hashes always; a short run of the model always; parity and latency where a checkpoint is given. The limits are
    those the artefact passed when it was exported. Raises IntegrityError where a file changed.
    """
    manifest = stage.verify(directory)
    report = Report(
        bertopt_version=__version__, recipe=manifest.get("recipe") or {}, environment=environment.describe(),
        model={"source": str(directory), "warnings": _differences(manifest)},
    )  # fmt: skip
    spec = Spec.model_validate(manifest["spec"])
    found = read(texts) if texts else Texts(tuple(probes.built_in_texts()))
    with Workers() as workers:
        try:
            if against is None:
                _smoke(workers, directory, manifest)
                report.reason = "files are as exported and the model answers; give --against CHECKPOINT to check parity"
            else:
                _compare(report, workers, directory, manifest, spec, against, found)
        except Unsupported as error:
            report.exit_code, report.reason = 4, f"this machine cannot run the artefact: {error}"
    return report


def _differences(manifest: dict[str, Any]) -> list[str]:
    """How this machine differs from the one that exported, where it matters to figures or kernels."""
    then, now = manifest["environment"], environment.describe()
    runtime = {"eager": "torch", "compiled": "torch", "onnx": "onnxruntime", "openvino": "openvino"}.get(
        manifest["form"]
    )
    notes = [
        f"{key} differs: exported on {then[key]}, here {now[key]}" for key in ("cpu", "isa") if then[key] != now[key]
    ]
    if runtime and then["packages"].get(runtime) != now["packages"].get(runtime):
        notes.append(
            f"{runtime} differs: exported with {then['packages'].get(runtime)}, here {now['packages'].get(runtime)}"
        )
    return notes


def _smoke(workers: Workers, directory: Path, manifest: dict[str, Any]) -> None:
    with workers.start() as worker:
        worker.call("open", directory=str(directory.resolve()), device=manifest["device"])
        pair = manifest["spec"]["task"] == "question-answering"
        worker.call("mix", texts=[["who?", "nobody"]] if pair else ["a text", "another"])
        worker.call("time_mix", steps=1)


def _compare(
    report: Report, workers: Workers, directory: Path, manifest: dict[str, Any], spec: Spec, against: str, texts: Texts
) -> None:
    texts.check_labels(spec)
    gates = manifest.get("gates") or {}
    limits = (
        Limits.model_validate(gates["parity"]["limits"])
        if gates.get("parity")
        else DEFAULT_LIMITS[manifest["precision"]]
    )
    shapes = [
        tuple(shape) for shape in (manifest.get("recipe") or {}).get("inputs", {}).get("shapes", [[1, 16], [8, 128]])
    ]
    device = manifest["device"]
    with (
        tempfile.TemporaryDirectory(prefix="bertopt-verify-") as scratch,
        Store(Path(scratch), False, lambda _: None) as store,
    ):
        with workers.start() as worker:
            reference, base, _ = store.reference(worker, against, spec.task, None, device)
        theirs = Spec.model_validate(base["spec"])
        if (theirs.inputs, theirs.outputs, theirs.hidden) != (spec.inputs, spec.outputs, spec.hidden):
            raise UsageError(
                f"'{against}' is another kind of model ({theirs.family}, {theirs.outputs}); give the checkpoint it was exported from"
            )
        examiner = Examiner(workers, reference, spec, device, shapes, texts, store.checks, {}, lambda _: None)
        try:
            first = Stage(index=0, name="reference", status="ok", form="eager", precision="float32")
            examiner.examine(first, reference, None, Limits(), None)
            row = Stage(index=1, name=manifest.get("stage") or manifest["name"], after="reference", status="ok", form=manifest["form"],
                        precision=manifest["precision"], size_bytes=stage.size_bytes(manifest))  # fmt: skip
            report.stages = [first, row]
            examiner.examine(row, directory.resolve(), reference, limits, None)
        finally:
            examiner.close()
    assert row.parity is not None
    if row.parity.passed:
        report.reason = f"the artefact is still the same model: {row.parity.worst.metric} {row.parity.worst.value:.6g}"
    else:
        row.status, row.reason = "failed", "; ".join(row.parity.failures)
        report.exit_code, report.reason = 3, f"'{row.name}' failed: {row.reason} at {row.parity.worst.where}"
