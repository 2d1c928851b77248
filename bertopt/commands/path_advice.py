"""Advice for a path that a command cannot take: what is there, and what to give instead."""

from __future__ import annotations

from pathlib import Path

from bertopt.stages import MANIFEST
from bertopt.system import paths

REPORT = "report.json"


def advice(path: Path, takes: str) -> str:
    """Return what follows the fault of `path` in a message: what the command `takes`, what is there, what to do."""
    if not paths.mode(path):
        return f"expected {takes}; nothing is there: check the path"
    folder = path if path.is_dir() else path.parent
    run = next((each for each in (folder, folder.parent, folder.parent.parent) if (each / REPORT).is_file()), None)
    if path.name == MANIFEST or (path.is_dir() and (path / MANIFEST).is_file()):
        nearest = f"; the report of its run is '{run / REPORT}'" if run else ""
        return f"expected {takes}; got {'an artefact or stage' if path.is_dir() else 'the manifest of an artefact'}{nearest}"
    if path.name == REPORT or (path.is_dir() and (path / REPORT).is_file()):
        return f"expected {takes}; got the report of a run"
    if path.is_dir() and (path / "config.json").is_file():
        return f"expected {takes}; got a checkpoint: `bertopt optimize {path}` makes an artefact and a report of it"
    return f"expected {takes}; got {'another directory' if path.is_dir() else 'another file'}"
