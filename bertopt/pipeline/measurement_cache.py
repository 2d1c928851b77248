"""Cache measurements on disk under a hash of everything they depend on; a file that was changed is ignored."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from bertopt import stages
from bertopt.checks.measurements import StageMeasurements
from bertopt.stages import source_hash
from bertopt.system import atomic_write, limits

#: The code that decides what is measured and how: after a change to any of it, stages are measured again.
MEASURING = (
    "checks", "modeling/rounding.py", "runtime", "sessions", "workers", "pipeline/baselines.py", "pipeline/end_to_end.py",
    "pipeline/examiner.py", "pipeline/head_to_head.py", "pipeline/labelled.py", "pipeline/measurement_plan.py", "pipeline/open_stages.py",
    "pipeline/race.py", "pipeline/sweeps.py", "pipeline/twins.py", "quantization/calibration_inputs.py", "stages/certificates.py", "stages/claims.py", "stages/effects.py",
    "stages/fingerprint.py", "system/cpu_contention.py",
)  # fmt: skip
#: Environment variables by which runtimes limit their threads: timings depend on them.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS", "OMP_THREAD_LIMIT", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TBB_NUM_THREADS",
    "OV_NUM_THREADS", "KMP_AFFINITY", "GOMP_CPU_AFFINITY",
)  # fmt: skip


def identity(directory: Path) -> str:
    """Return text that identifies a stage, also among those built under the same key.

    The key only covers what a stage is built from. A pass may give another model when it is run again, and files that a user's pass reads
    or imports may change.
    """
    manifest = stages.read_manifest(directory)
    sources = [json.dumps(manifest.sources, sort_keys=True)] if stages.runs_foreign_code(manifest) else []
    return " ".join((directory.name, manifest.content_sha256, manifest.form, manifest.precision, manifest.spec.model_dump_json(), *sources))


class _Record(BaseModel, extra="forbid"):
    """The contents of a file: measurements as JSON text, and the hash of that text and of the record's key."""

    sha256: str
    measurements: str


class Records:
    """The records of one output directory, for one set of inputs (anything that JSON can say)."""

    def __init__(self, directory: Path, inputs: Sequence[Any]) -> None:
        self.directory = directory
        threads = [os.environ.get(name) for name in THREAD_VARIABLES]
        self._inputs = [source_hash.of_package(*MEASURING), threads, limits.cores(), *inputs]

    def read(self, names: Sequence[str | None]) -> StageMeasurements | None:
        """Return what was measured of these stages, by their `identity`: the one measured and its parent.

        None where nothing was recorded, or what was recorded cannot be read or is not as it was written.
        """
        path = self._path(names)
        try:
            record = _Record.model_validate_json(path.read_bytes())
            if record.sha256 != _hash(path.stem, record.measurements):
                return None
            return StageMeasurements.model_validate_json(record.measurements)
        except (OSError, ValueError, RecursionError):
            return None

    def write(self, names: Sequence[str | None], measurements: StageMeasurements) -> None:
        path, text = self._path(names), measurements.model_dump_json()
        record = _Record(sha256=_hash(path.stem, text), measurements=text)
        atomic_write.write(path, record.model_dump_json())

    def _path(self, names: Sequence[str | None]) -> Path:
        key = hashlib.sha256(json.dumps([list(names), self._inputs]).encode()).hexdigest()
        return self.directory / f"{key}.json"


def _hash(key: str, text: str) -> str:
    return hashlib.sha256(f"{key} {text}".encode()).hexdigest()
