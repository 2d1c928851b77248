"""What examinations found, kept on disk under a hash of everything it depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from bertopt.results import Case, Comparison, Invariance, Latency, Quality, Ranking

#: Raised whenever a check measures otherwise or a field is added: what an earlier version found is then measured anew.
VERSION = 5


class Found(BaseModel):
    """Everything measured of one stage. Verdicts are not kept: limits may change."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    cases: list[Case]
    vs_parent: Comparison | None
    latency: list[Latency]
    invariance: Invariance | None
    ranking: Ranking | None
    quality: Quality | None
    correct: list[bool] | None
    """Whether each labelled text was answered correctly: what later stages are paired with."""
    effects: dict[str, tuple[int, int]]
    changed: bool | None
    facts: dict[str, Any]
    peak_rss_bytes: int | None
    peak_gpu_bytes: int | None


class Records:
    """The records of one output directory, for one set of inputs (anything that JSON can say)."""

    def __init__(self, directory: Path, inputs: Sequence[Any]) -> None:
        self.directory = directory
        self._inputs = [VERSION, *inputs]

    def read(self, names: Sequence[str | None]) -> Found | None:
        """What was found of the stages of these names (the one examined and what it was compared with)."""
        path = self._path(names)
        return Found.model_validate_json(path.read_text("utf-8")) if path.is_file() else None

    def write(self, names: Sequence[str | None], found: Found) -> None:
        self.directory.mkdir(exist_ok=True)
        part = self._path(names).with_suffix(".part")
        part.write_text(found.model_dump_json(), "utf-8")
        part.replace(self._path(names))

    def _path(self, names: Sequence[str | None]) -> Path:
        key = hashlib.sha256(json.dumps([list(names), self._inputs]).encode()).hexdigest()
        return self.directory / f"{key}.json"
