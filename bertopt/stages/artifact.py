"""Deliver a stage: copy and describe it, and replace the previous artefact atomically."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bertopt import stages
from bertopt.errors import UsageError
from bertopt.report.formatting import is_quick
from bertopt.results import Stage
from bertopt.stages import model_card, sbom, sources

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def deliver(
    row: Stage, source: Path, recipe: dict[str, Any], out: Path, run: Callable[[Path], Any] = lambda part: None
) -> Path:
    """Write `out/artifact` from the stage at `source`, with the gates it passed and their figures in its manifest, and return its path.

    `run` is called with the directory of the finished copy; what it returns is recorded in the manifest as the artefact's `answers`. The
    old artefact stays until the new one is complete and on disk. Raises OSError where it cannot be written, IntegrityError where a file of
    the stage changed since it was measured, or `run` changed one, and what `run` raises.
    """
    part, final = out / ".artifact.part", out / "artifact"
    shutil.rmtree(part, ignore_errors=True)
    try:
        _write(row, source, recipe, part, run)
        _replace(part, final)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return final


def _write(row: Stage, source: Path, recipe: dict[str, Any], part: Path, run: Callable[[Path], Any]) -> None:
    _copy(source, part)
    # The copies must be what was measured: a pass or a person may have written to the stage since.
    manifest = stages.verify(part)
    gates = {
        "status": row.status,
        "parity": row.parity.model_dump(mode="json", exclude={"cases"}) if row.parity else None,
        "nearest": row.nearest.model_dump(mode="json") if row.nearest else None,
        "latency": [case.model_dump(mode="json") for case in row.latency] if row.latency else None,
        "quality": row.quality.model_dump(mode="json") if row.quality else None,
        "waived": [failure.model_dump(mode="json") for failure in row.failures],
    }
    model, inputs = _portable(recipe["model"]), {**recipe["inputs"], "texts": _portable(recipe["inputs"]["texts"])}
    (part / model_card.NAME).write_text(model_card.write(row, manifest, part, str(model), is_quick(recipe)), "utf-8")
    (part / sbom.NAME).write_text(sbom.write(str(model)), "utf-8")
    fields = manifest.model_dump(mode="json", exclude={"schema_version", "bertopt_version", "environment", "files", "manifest_sha256"})
    fields |= {
        "stage": row.name, "recipe": {**recipe, "model": model, "inputs": inputs}, "gates": gates,
        "sources": sources.without_folders(manifest.sources), "recipe_sha256": hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest(),
    }  # fmt: skip
    stages.write_manifest(part, fields)
    answers = run(part)
    # The code that ran the copy may have changed it, and the manifest is about to be written again with new hashes.
    stages.verify(part)
    if answers is not None:
        stages.write_manifest(part, {**fields, "answers": answers})


def _copy(source: Path, target: Path) -> None:
    # Copies, not links: an artefact is moved and edited by others. Not copytree, whose errors have no errno.
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def _portable(path: str | None) -> str | None:
    """Return the last part of an absolute path; hub ids, package and relative paths as they are."""
    return Path(path).name if path is not None and Path(path).is_absolute() else path


def recover(out: Path) -> None:
    """Clean up after an interrupted delivery: remove an unfinished copy, and restore the previous artefact if it was moved aside.

    Raises UsageError, before the run begins, where something else is in the artefact's place.
    """
    old, final = out / ".artifact.old", out / "artifact"
    if old.exists() and _is_rest(final, old):
        shutil.rmtree(final, ignore_errors=True)
        old.rename(final)
    for left in (old, out / ".artifact.part"):
        shutil.rmtree(left, ignore_errors=True)
    _check_place(final)


def _is_rest(final: Path, old: Path) -> bool:
    """Return whether `final` is missing, or all it holds is what `_move_aside` had yet to remove."""
    if final.exists() and (not final.is_dir() or (final / stages.MANIFEST).is_file()):
        return False
    return all((old / path.relative_to(final)).exists() for path in final.rglob("*"))


def _check_place(final: Path) -> None:
    if final.exists() and not (final / stages.MANIFEST).is_file():
        raise UsageError(f"'{final}' exists and is not a bertopt artefact; move it away, or export elsewhere with --out")


def _replace(part: Path, final: Path) -> None:
    if not final.exists():
        stages.commit(part, final)
        return
    _check_place(final)
    stages.sync(part)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(part), _AT_FDCWD, os.fsencode(final), _RENAME_EXCHANGE) != 0:
        # The file system cannot exchange two directories: move the old artefact aside for a moment.
        old = final.with_name(".artifact.old")
        shutil.rmtree(old, ignore_errors=True)
        _move_aside(final, old)
        part.rename(final)
        shutil.rmtree(old)


def _move_aside(final: Path, old: Path) -> None:
    try:
        final.rename(old)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        # overlayfs, of a directory that is in a layer of the container's image.
        _copy(final, old)
        stages.sync(old)
        (final / stages.MANIFEST).unlink()  # first: without it `recover` restores `old`
        shutil.rmtree(final)
