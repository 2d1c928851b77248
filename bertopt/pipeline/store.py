"""The output directory: stages by key, recorded checks, the report, and the lock that makes runs wait for each other."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from bertopt import stages
from bertopt.core import Device
from bertopt.errors import BertoptError, IntegrityError, Unsupported, UsageError
from bertopt.modeling.checkpoint_files import weight_files
from bertopt.modeling.modules_json import dense_weights
from bertopt.modeling.source import examine, hub_commit, resolve, sha256
from bertopt.pipeline.progress import ProgressCallback
from bertopt.recipe.parser import Step
from bertopt.recipe.texts import Texts
from bertopt.results import Report
from bertopt.stages import CommittedStage, Manifest, artifact, contents, sources
from bertopt.system import atomic_write, directory_lock, environment
from bertopt.system.gpu import SHARE
from bertopt.workers.client import Worker

#: Names that bertopt gives: stages with the key they were built under, unfinished ones, measurement records.
_STAGE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}-([0-9a-f]{12})")
_PART = re.compile(r"\.part-[A-Za-z][A-Za-z0-9_-]{0,63}-\d+")
_RECORD = re.compile(r"[0-9a-f]{64}\.(json|part)|\.[0-9a-f]{64}\.json\.\d+\.tmp")
#: Time and memory that loading a checkpoint may take, since it may be malicious: LOADING_BYTES plus LOADING_TIMES its weights. A real one needs
#: about three times its weights, and the libraries.
LOADING_S, LOADING_BYTES, LOADING_TIMES = 1800.0, 4 * 2**30, 6


class Store:
    """`OUT/stages/<name>-<key>`, `OUT/checks/<key>.json`, `OUT/report.json`. Entering it waits for the lock."""

    def __init__(self, out: Path, fresh: bool, on_progress: ProgressCallback) -> None:
        try:
            self.out, self.fresh, self.on_progress = out.resolve(), fresh, on_progress
            str(self.out).encode()
            if any(path.is_symlink() for path in (self.out, *self.out.parents)):
                raise RuntimeError("a loop of links")  # as Path.resolve says up to Python 3.12
        except RuntimeError as error:
            raise UsageError(f"--out must be a directory; '{out}' is a link that leads back to itself") from error
        except UnicodeEncodeError as error:
            raise UsageError(f"--out must be a path in UTF-8, or libraries cannot open its files; got {os.fsencode(out)!r}") from error
        self.stages, self.checks = self.out / "stages", self.out / "checks"
        self._used: set[Path] = set()
        #: Of the GPU that the stages run on, None on a CPU.
        self.gpu: dict[str, Any] | None = None

    def __enter__(self) -> Self:
        if self.out.exists() and not self.out.is_dir():
            raise UsageError(f"--out must be a directory; '{self.out}' is a file")
        if (self.out / stages.MANIFEST).is_file():  # a lock in it would be a file that its manifest does not list
            raise UsageError(f"--out must be the directory of a run; '{self.out}' is an artefact or stage: choose another")
        self._lock = FileLock(self.out / ".lock")
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            directory_lock.take(self._lock)
        except Timeout:
            self.on_progress(f"waiting for another run in {self.out}")
            self._lock.acquire()
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            raise UsageError(
                f"'{self.out}' is on a read-only file system; choose another --out. A finished run opens there as it is: "
                f"bertopt verify '{self.out / 'artifact'}'"
            ) from error
        try:
            self._refuse_foreign()
            self._clear_up()
        except BaseException:
            self._lock.release()
            raise
        return self

    def _refuse_foreign(self) -> None:
        """Raise UsageError for a directory that holds other files under the names that bertopt uses."""
        for folder, ours in ((self.stages, _is_stage), (self.checks, _is_record)):
            if folder.exists() and not folder.is_dir():
                raise UsageError(f"'{folder}' must be a directory of bertopt's; it is a file: choose another --out")
            paths = list(folder.iterdir()) if folder.is_dir() else []
            if paths and not any(map(ours, paths)):
                raise UsageError(f"'{folder}' holds '{paths[0].name}', which is not bertopt's; choose another directory with --out")
        for name in ("report.json", "report.html"):
            path = self.out / name
            if path.exists() and not (path.is_file() and b"bertopt" in path.read_bytes()):
                raise UsageError(f"'{path}' is not bertopt's and would be replaced; choose another directory with --out")

    def _clear_up(self) -> None:
        """Remove what interrupted runs left; with `fresh`, what was built and measured too."""
        artifact.recover(self.out)
        self.stages.mkdir(exist_ok=True)
        for path in self.stages.iterdir():
            if _PART.fullmatch(path.name) or (self.fresh and _is_stage(path)):
                shutil.rmtree(path)
        for path in self.checks.iterdir() if self.checks.is_dir() else ():
            if _is_record(path) and (self.fresh or path.suffix != ".json"):
                path.unlink()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def choose_device(self, worker: Worker, wanted: str) -> tuple[Device, dict[str, Any]]:
        """Return the device that a recipe's `device` means on this machine, and what CUDA sees. Raises Unsupported where there is none."""
        cuda = worker.call("device")
        if wanted == "cuda" and not cuda["cuda"]:
            raise Unsupported(
                "the recipe says device: cuda, but torch sees no CUDA GPU here; run it where one is, or --set device=cpu"
            )
        if wanted == "cpu" or not cuda["cuda"]:
            return "cpu", cuda
        if mode := cuda["refuses_second_process"]:
            raise Unsupported(
                f"the GPU is in compute mode {mode}, but stages are compared in several processes; {SHARE}, or --set device=cpu"
            )
        self.gpu = cuda["gpu"]
        return "cuda", cuda

    def reference(
        self, worker: Worker, source: str, task: str, revision: str | None, device: Device
    ) -> CommittedStage:
        """Return stage 00 of the checkpoint, made now or before."""
        directory = resolve(source, revision)
        examine(directory)
        weights = [str(path.relative_to(directory)) for path in (*weight_files(directory), *dense_weights(directory))]
        hashes = _hashes(directory, weights)
        content = hashlib.sha256("".join(f"{name} {found}\n" for name, found in hashes.items()).encode()).hexdigest()
        key = stages.key(f"{content} {task}", None, device, None, "")

        def make(part: Path, fields: dict[str, Any]) -> None:
            size = sum(path.stat().st_size for path in weight_files(directory))
            worker.memory_bytes = min(worker.memory_bytes, LOADING_BYTES + LOADING_TIMES * size)
            worker.call(
                "load_checkpoint", timeout=LOADING_S, source=str(directory), task=task, part=str(part),
                fields={**fields, "checkpoint_sha256": content, "checkpoint_commit": hub_commit(directory)},
            )  # fmt: skip

        def check(manifest: Manifest) -> None:
            # All stages are compared with this one only.
            for name in weights:
                if name not in manifest.files or manifest.files[name].sha256 != hashes[name]:
                    raise IntegrityError(f"'{name}' of the reference must be the checkpoint's; it differs: run again when nobody writes to '{directory}'")

        return self._stage("reference", key, device, make, check)

    def build(
        self,
        worker: Worker,
        step: Step,
        parent: Path,
        device: Device,
        shapes: Sequence[Any],
        texts: Texts,
    ) -> CommittedStage:
        """Return the stage of one step after the stage at `parent`, made now or before.

        Raises IntegrityError where the pass changed its parent's files, or wrote others than its form's.
        """
        record = step.pass_.record()
        # Forms that hold a GPU's code depend on the GPU; all others run on any.
        hardware: dict[str, Any] = dict(self.gpu or {}) if step.pass_.forms()[1].form in stages.DEVICE_FORMS else {}
        if step.pass_.depends_on_cpu and device == "cpu":
            hardware["instructions"] = environment.instructions()
        before = stages.read_manifest(parent)
        key = stages.key(before.key, record, device, shapes, texts.digest, hardware)
        context = {"device": device, "shapes": list(shapes), "texts": list(texts.asked(before.spec.task)), "seed": 0}
        checkpoint = {"checkpoint_sha256": before.checkpoint_sha256, "checkpoint_commit": before.checkpoint_commit}

        def make(part: Path, fields: dict[str, Any]) -> None:
            worker.call(
                "build", timeout=step.timeout, parent=str(parent), record=record.model_dump(), part=str(part),
                context=context, fields={**fields, **checkpoint},
            )  # fmt: skip
            # Stages share files with their parents: a pass that writes into one also changes what it is compared with.
            try:
                stages.verify(parent)
            except BertoptError as error:
                raise IntegrityError(f"the pass wrote into the stage it started from: {error}") from error
            contents.check(stages.read_manifest(parent), stages.read_manifest(part))

        return self._stage(step.name, key, device, make)

    def _stage(
        self, name: str, key: str, device: Device, make: Callable[[Path, dict[str, Any]], None],
        check: Callable[[Manifest], None] = lambda manifest: None,
    ) -> CommittedStage:  # fmt: skip
        """Return the stage committed before, if it is undamaged and from the same sources, or make it. `check` raises for one that may not be used."""
        path = self.stages / f"{name}-{key[:12]}"
        self._used.add(path)
        if path.is_dir():
            try:
                manifest = stages.verify(path)
                # The key covers a pass's code, but not the files that it read, nor modules imported by other means than `import`.
                sources.check_here(manifest.sources)
                check(manifest)
                return CommittedStage(path, manifest, reused=True)
            except BertoptError:
                # Damaged, or from other sources: build it again.
                shutil.rmtree(path)
        part = self.stages / f".part-{name}-{os.getpid()}"
        part.mkdir()
        try:
            make(part, {"key": key, "name": name, "device": device, "gpu": self.gpu})
            check(stages.read_manifest(part))
            stages.commit(part, path)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return CommittedStage(path, stages.read_manifest(path))

    def write_report(self, report: Report) -> None:
        atomic_write.write(self.out / "report.json", report.model_dump_json(by_alias=True, indent=2) + "\n")

    def prune(self, unreached: Container[str] = ()) -> None:
        """Remove stages that this run did not use, except those of the steps `unreached`. Other files stay."""
        for path in self.stages.iterdir():
            if path not in self._used and path.name.rpartition("-")[0] not in unreached and _is_stage(path):
                shutil.rmtree(path)


def _is_stage(path: Path) -> bool:
    """Return whether `path` is a stage, complete or not: by its name, and by a manifest with the same key."""
    named = _STAGE.fullmatch(path.name)
    if not named or not path.is_dir() or path.is_symlink():
        return bool(_PART.fullmatch(path.name)) and path.is_dir()
    try:
        return f'"key": "{named[1]}'.encode() in (path / stages.MANIFEST).read_bytes()
    except OSError:
        return False


def _is_record(path: Path) -> bool:
    return bool(_RECORD.fullmatch(path.name)) and path.is_file()


def _hashes(directory: Path, weights: Sequence[str]) -> dict[str, str]:
    """Return the SHA-256 of each file of a checkpoint's configuration, weights and tokenizer, by relative path."""
    named = (p for p in directory.rglob("*") if p.suffix in {".json", ".safetensors", ".txt", ".model"} and p.is_file())
    paths = sorted({*named, *(directory / name for name in weights)})
    return {str(path.relative_to(directory)): sha256(path) for path in paths}
