"""The output directory: stages by key, recorded checks, the report, and the lock that makes runs wait for each other."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from bertopt import stages
from bertopt.core import Device
from bertopt.errors import BertoptError, IntegrityError, UsageError
from bertopt.modeling.source import examine, read_json, resolve, sha256
from bertopt.recipe.parser import Step
from bertopt.recipe.texts import Texts
from bertopt.results import Report
from bertopt.stages import artifact
from bertopt.workers.client import Worker


class Store:
    """`OUT/stages/<name>-<key>`, `OUT/checks/<key>.json`, `OUT/report.json`. Entering it waits for the lock."""

    def __init__(self, out: Path, fresh: bool, tell: Callable[[str], None]) -> None:
        self.out, self.fresh, self.tell = out.resolve(), fresh, tell
        self.stages, self.checks = self.out / "stages", self.out / "checks"
        self._used: set[Path] = set()

    def __enter__(self) -> Self:
        if self.out.exists() and not self.out.is_dir():
            raise UsageError(f"--out must be a directory; '{self.out}' is a file")
        self.out.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.out / ".lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            self.tell(f"waiting for another run in {self.out}")
            self._lock.acquire()
        artifact.recover(self.out)
        if self.fresh:
            shutil.rmtree(self.stages, ignore_errors=True)
            shutil.rmtree(self.checks, ignore_errors=True)
        self.stages.mkdir(exist_ok=True)
        for left in self.stages.glob(".part-*"):
            shutil.rmtree(left)
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def reference(
        self, worker: Worker, source: str, task: str, revision: str | None, device: Device
    ) -> tuple[Path, dict[str, Any], bool]:
        """Stage 00 of the checkpoint: (directory, manifest, whether it was there already)."""
        directory = resolve(source, revision)
        examine(directory)
        content = _content(directory)
        key = stages.key(f"{content} {task}", None, device, None, "")

        def make(part: Path, fields: dict[str, Any]) -> None:
            worker.call(
                "load_checkpoint", source=str(directory), task=task, revision=None, part=str(part),
                fields={**fields, "checkpoint_sha256": content},
            )  # fmt: skip

        return self._stage("reference", key, device, make)

    def build(
        self,
        worker: Worker,
        step: Step,
        parent: Path,
        device: Device,
        shapes: Sequence[Any],
        texts: Texts,
    ) -> tuple[Path, dict[str, Any], bool]:
        """The stage of one step after the stage at `parent`: (directory, manifest, whether it was there already).

        Raises IntegrityError where the pass changed its parent's files.
        """
        record = step.pass_.record()
        key = stages.key(stages.read_manifest(parent)["key"], record, device, shapes, texts.digest)
        context = {"device": device, "shapes": list(shapes), "texts": list(texts.texts), "seed": 0}

        def make(part: Path, fields: dict[str, Any]) -> None:
            worker.call(
                "build", timeout=step.timeout, parent=str(parent), record=record.model_dump(), part=str(part),
                context=context, fields=fields,
            )  # fmt: skip
            # Stages share files with their parents: a pass that wrote into one changed what it is compared with too.
            try:
                stages.verify(parent)
            except BertoptError as error:
                raise IntegrityError(f"the pass wrote into the stage it started from: {error}") from error

        return self._stage(step.name, key, device, make)

    def _stage(
        self, name: str, key: str, device: Device, make: Callable[[Path, dict[str, Any]], None]
    ) -> tuple[Path, dict[str, Any], bool]:
        path = self.stages / f"{name}-{key[:12]}"
        self._used.add(path)
        if path.is_dir():
            try:
                return path, stages.verify(path), True
            except BertoptError:
                # Damaged since: build it again.
                shutil.rmtree(path)
        part = self.stages / f".part-{name}-{os.getpid()}"
        part.mkdir()
        try:
            make(part, {"key": key, "name": name, "device": device})
            stages.commit(part, path)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return path, stages.read_manifest(path), False

    def write_report(self, report: Report) -> None:
        part = self.out / ".report.part"
        part.write_text(report.model_dump_json(by_alias=True, indent=2) + "\n", "utf-8")
        part.replace(self.out / "report.json")

    def prune(self) -> None:
        """Remove stages that the recipe no longer has."""
        for path in self.stages.iterdir():
            if path not in self._used:
                shutil.rmtree(path)


def _content(directory: Path) -> str:
    """One hash over a checkpoint's configuration, weights and tokenizer."""
    names = sorted(
        p for p in directory.rglob("*") if p.suffix in {".json", ".safetensors", ".txt", ".model"} and p.is_file()
    )
    sha = hashlib.sha256()
    for path in names:
        sha.update(f"{path.relative_to(directory)} {sha256(path)}\n".encode())
    if not (directory / "config.json").is_file():
        raise UsageError(f"'{directory}' has no config.json; give the directory of a transformers checkpoint")
    if not isinstance(read_json(directory / "config.json"), dict):
        raise IntegrityError("config.json must be a JSON object")
    return sha.hexdigest()
