"""An artefact beside its checkpoint: what `verify --against` measures and judges, and `compare` where it has the checkpoint."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bertopt import stages
from bertopt.checks import gates
from bertopt.checks.gates import GateOutcome
from bertopt.pipeline import pair, rows
from bertopt.pipeline.progress import ProgressCallback
from bertopt.pipeline.race import QUICK, Budget
from bertopt.pipeline.rows import StageBuild
from bertopt.pipeline.store import Store
from bertopt.recipe.texts import Texts
from bertopt.results import Failure, Limits, Parity, Stage, Waiver
from bertopt.stages import contents
from bertopt.system import temporary_directory
from bertopt.workers.client import Workers


@dataclass(frozen=True)
class Fidelity:
    """An artefact's row beside that of its checkpoint, and what was decided."""

    reference: Stage
    row: Stage
    outcome: GateOutcome
    parity: Parity
    cuda: dict[str, Any]
    """What CUDA sees on this machine."""
    warnings: list[str]


def against(
    workers: Workers, directory: Path, manifest: stages.Manifest, checkpoint: str, texts: Texts, on_progress: ProgressCallback,
) -> Fidelity:  # fmt: skip
    """Measure the artefact in `directory` beside `checkpoint`, and hold it to the limits that it passed when it was exported; its waivers hold.

    Raises WrongAnswer where its labels, configuration or tokenizer are not the checkpoint's, and what `pair.measure` raises.
    """
    return _measured(workers, directory, manifest, checkpoint, texts, on_progress, Budget(), Limits(), own_files=True)


def untimed(
    workers: Workers, directory: Path, manifest: stages.Manifest, checkpoint: str, texts: Texts, on_progress: ProgressCallback,
    stated: Limits, own_files: bool,
) -> Fidelity:  # fmt: skip
    """Do as `against` with the shortest timing and without limits on speed and memory; `stated` limits replace the artefact's.

    `own_files`: `checkpoint` is the checkpoint itself, not an artefact that holds its weights, so that its files must be the artefact's.
    """
    return _measured(workers, directory, manifest, checkpoint, texts, on_progress, QUICK, stated, own_files)


def _measured(
    workers: Workers, directory: Path, manifest: stages.Manifest, checkpoint: str, texts: Texts, on_progress: ProgressCallback, budget: Budget,
    stated: Limits, own_files: bool,
) -> Fidelity:  # fmt: skip
    with (
        temporary_directory.make() as scratch,
        Store(Path(scratch), False, lambda _: None) as store,
    ):
        on_progress(f"reference: loading {checkpoint}")
        with workers.start() as worker:
            cuda = worker.call("device")
            reference = store.reference(worker, checkpoint, manifest.spec.task, revision(manifest, checkpoint), manifest.device)
        warnings = contents.check_artefact(reference.manifest, manifest) if own_files else []
        old, new, examiner = pair.measure(
            workers, reference.path, directory, texts, pair.shapes(manifest), store.checks, on_progress, budget
        )
        limits = stated.over(manifest.passed_limits() or gates.effective_limits(manifest.precision, peak=new.peak, sparse=manifest.spec.sparse))
        if budget is QUICK:
            limits = limits.model_copy(update=dict.fromkeys(("speedup_min", "mix_p50_ms_max", "peak_rss_max")))
        # Inside the context: to show the worst case, the examiner opens the reference's tokenizer again.
        outcome = gates.judge(
            pair.name(manifest), new, limits, changes=manifest.changes, today=datetime.date.today(),
            waivers=waivers(manifest), allow_noop=True,
        )  # fmt: skip
        assert outcome.parity is not None, "it was compared with the checkpoint"
        compared = examiner.show(outcome.parity)
    baseline = rows.make(0, "reference", GateOutcome("ok"), StageBuild.of(reference.manifest), old)
    row = rows.make(1, pair.name(manifest), replace(outcome, parity=compared), StageBuild.of(manifest), new, after="reference")
    return Fidelity(baseline, row, outcome, compared, cuda, warnings)


def revision(manifest: stages.Manifest, checkpoint: str) -> str | None:
    """Return the hub's commit that the artefact was made of, where `checkpoint` is the model that its recipe names: a branch moves."""
    recipe = manifest.recipe or {}
    return manifest.checkpoint_commit or recipe.get("revision") if checkpoint == recipe.get("model") else None


def waivers(manifest: stages.Manifest) -> list[Waiver]:
    """The waivers that the artefact was delivered under."""
    failures = map(Failure.model_validate, (manifest.gates or {}).get("waived", []))
    return [failure.waiver for failure in failures if failure.waiver]
