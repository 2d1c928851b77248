"""Keep measurements on disk under a hash of everything they depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertopt.checks.measurements import StageMeasurements

#: Raised whenever a check measures otherwise or a field is added: what an earlier version recorded is then measured anew.
VERSION = 6


class Records:
    """The records of one output directory, for one set of inputs (anything that JSON can say)."""

    def __init__(self, directory: Path, inputs: Sequence[Any]) -> None:
        self.directory = directory
        self._inputs = [VERSION, *inputs]

    def read(self, names: Sequence[str | None]) -> StageMeasurements | None:
        """Return what was measured of the stages of these names: the one measured and its parent; None: not recorded."""
        path = self._path(names)
        return StageMeasurements.model_validate_json(path.read_text("utf-8")) if path.is_file() else None

    def write(self, names: Sequence[str | None], measurements: StageMeasurements) -> None:
        self.directory.mkdir(exist_ok=True)
        part = self._path(names).with_suffix(".part")
        part.write_text(measurements.model_dump_json(), "utf-8")
        part.replace(self._path(names))

    def _path(self, names: Sequence[str | None]) -> Path:
        key = hashlib.sha256(json.dumps([list(names), self._inputs]).encode()).hexdigest()
        return self.directory / f"{key}.json"
