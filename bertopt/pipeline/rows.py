"""Make a row of the report from its parts: what was built, what was measured, and what the gates decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bertopt import stages
from bertopt.checks.gates import GateOutcome, shows_change
from bertopt.checks.measurements import StageMeasurements
from bertopt.core import Precision
from bertopt.results import Stage


@dataclass(frozen=True)
class StageBuild:
    """A committed stage, as its manifest describes it."""

    form: str
    precision: Precision
    changes: Mapping[str, int]
    build_s: float
    size_bytes: int
    path: str | None = None
    """Relative to the output directory."""
    reused: bool = False

    @classmethod
    def of(cls, manifest: stages.Manifest, path: str | None = None, reused: bool = False) -> StageBuild:
        return cls(
            manifest.form, manifest.precision, manifest.changes, manifest.build_s,
            manifest.size_bytes, path, reused,
        )  # fmt: skip


@dataclass(frozen=True)
class Done:
    """A step after its turn, whether it was run or not. `stage` is the stage that its name refers to: the parent's if it was reverted."""

    row: Stage
    stage: str
    parent: str | None = None
    """The stage that it starts from."""
    path: Path | None = None
    exit_code: int = 0
    """Exit code of the run if this is the stage to deliver."""
    build: StageBuild | None = None


def make(
    index: int, name: str, outcome: GateOutcome, build: StageBuild | None = None,
    measurements: StageMeasurements | None = None, pass_: str | None = None, after: str | None = None,
) -> Stage:  # fmt: skip
    """Return the row of a stage; the parts that it did not reach are None."""
    parts: dict[str, Any] = asdict(build) if build else {}
    if measurements:
        measured = {
            "latency", "quality", "invariance", "ranking", "rounding", "proven", "certificate", "coverage", "facts",
            "peak_rss_bytes", "peak_gpu_bytes",
        }  # fmt: skip
        parts |= {field: getattr(measurements, field) for field in measured}
        parts |= {"effects": measurements.effects | measurements.placed, "changed": shows_change(measurements)}
    if outcome.log:
        parts["facts"] = {**parts.get("facts", {}), "log": outcome.log}
    return Stage(
        index=index, name=name, pass_=pass_, after=after, status=outcome.status, reason=outcome.reason,
        parity=outcome.parity, nearest=outcome.nearest, failures=list(outcome.failures), waived=list(outcome.waived), **parts,
    )  # fmt: skip
