"""A stage is a directory, laid out as an artefact, committed by one rename and described by `manifest.json`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertopt.core import Compiled, Eager, Engine, Model, Native, Onnx, OpenVino, Packaged, Rewrite
from bertopt.errors import IntegrityError
from bertopt.stages import source_hash
from bertopt.stages.manifest import MANIFEST, Manifest, files_of, sign, verify
from bertopt.stages.manifest import read as read_manifest
from bertopt.stages.manifest import write as write_manifest
from bertopt.stages.signature import SIGNATURE
from bertopt.system import environment

__all__ = [
    "DEVICE_FORMS", "MANIFEST", "CommittedStage", "FileModel", "Manifest", "commit", "describe", "files_beside", "files_of", "handed_down", "inherit", "key", "link", "open_stage",
    "read_manifest", "runs_foreign_code", "sign", "sync", "verify", "write_form", "write_manifest",
]  # fmt: skip

#: Forms that hold machine code of one kind of GPU.
DEVICE_FORMS = ("engine", "packaged")

#: Files and folders of the forms; everything else in a stage (configuration, tokenizer) is inherited from its parent.
_FORM_FILES = ("rewrites.json", "onnx", "openvino", "engines", "native", "package", MANIFEST, SIGNATURE)

#: Where a stage keeps the file of each form. (An engine's folder names what it was built for: see `_model_file`.)
_MODEL_FILES = {
    "onnx": "onnx/model.onnx", "openvino": "openvino/openvino_model.xml", "native": "native/model.bin", "packaged": "package/model.pt2",
}  # fmt: skip

#: A model whose `path` names its file.
FileModel = Onnx | OpenVino | Native | Engine | Packaged


@dataclass(frozen=True)
class CommittedStage:
    """A stage on disk. `reused`: it was there before this run."""

    path: Path
    manifest: Manifest
    reused: bool = False


def inherit(parent: Path, out: Path) -> None:
    """Link configuration and tokenizer from the parent stage. Links are safe since nothing writes to a committed stage."""
    for path in files_of(parent):
        relative = path.relative_to(parent)
        if handed_down(str(relative)) and not (out / relative).exists():
            link(path, out / relative)


def handed_down(name: str) -> bool:
    """Return whether stages inherit a file of this name: configuration, tokenizer, and the layers after pooling."""
    folder, *inside = name.split("/", maxsplit=1)
    return folder not in _FORM_FILES and (bool(inside) or not _holds_weights(Path(name)))


def _holds_weights(path: Path) -> bool:
    """Return whether a file holds a checkpoint's weights, sharded or not, or the index of its shards."""
    return path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json")


def link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def write_form(model: Model, out: Path) -> None:
    """Put the files of `model`'s form into the stage directory `out`, if the pass has not written them there."""
    if isinstance(model, Eager | Compiled):
        _write_eager(model, out)
    elif isinstance(model, FileModel) and not model.path.is_relative_to(out):
        target = out / _model_file(model)
        link(model.path, target)
        for path in files_beside(model):
            # OpenVINO looks for weights of the model's name.
            link(path, target.with_suffix(".bin") if isinstance(model, OpenVino) else target.with_name(path.name))


def _write_eager(model: Eager | Compiled, out: Path) -> None:
    # A pass may have written the weights here itself.
    for path in sorted(model.checkpoint.iterdir()) if model.checkpoint != out else ():
        if _holds_weights(path):
            link(path, out / path.name)
    records = [rewrite.model_dump() for rewrite in model.rewrites]
    (out / "rewrites.json").write_text(json.dumps(records, indent=2) + "\n", "utf-8")


def _model_file(model: FileModel) -> str:
    """Return the place in a stage of the file that `model.path` names."""
    if isinstance(model, Engine):
        return f"engines/{model.path.parent.name}/model.plan"
    return _MODEL_FILES[model.form]


def files_beside(model: FileModel) -> list[Path]:
    """Return the other files of a form: external data of ONNX, weights of OpenVINO, a task head of the native encoder."""
    if isinstance(model, Onnx):
        data = model.path.with_name("model.onnx_data")
        return [data] if data.exists() else []
    if isinstance(model, OpenVino):
        return [model.path.with_suffix(".bin")]
    return sorted({*model.path.parent.iterdir()} - {model.path}) if isinstance(model, Native) else []


def describe(model: Model) -> dict[str, Any]:
    """Return the part of a manifest from which `open_stage` rebuilds the model."""
    entry: dict[str, Any] = {
        "form": model.form,
        "precision": model.precision,
        "spec": model.spec.model_dump(mode="json"),
    }
    if isinstance(model, FileModel):
        entry["path"] = _model_file(model)
    if isinstance(model, Packaged):
        entry["device"] = model.built.device
        entry["package"] = model.built.model_dump(mode="json")
    elif isinstance(model, Engine):
        entry["device"] = "cuda"
        entry["engine"] = {
            "library": model.library,
            "version": model.version,
            "targets": model.targets,
            "driver": model.driver,
            "cuda_version": model.cuda_version,
            "cuda_graphs": model.cuda_graphs,
            "profiles": [profile.model_dump(mode="json") for profile in model.profiles],
        }
    return entry


def runs_foreign_code(manifest: Manifest) -> bool:
    """Return whether opening a stage or artefact runs passes that are not part of bertopt."""
    return manifest.form in ("eager", "compiled") and any(key.startswith("pass ") for key in manifest.sources or {})


def commit(part: Path, final: Path) -> None:
    """Make a finished directory appear under its name: fsync everything, then one rename."""
    sync(part)
    if final.exists():
        shutil.rmtree(final)
    part.rename(final)
    _fsync(final.parent)


def sync(directory: Path) -> None:
    """fsync a directory and everything in it."""
    for path in [*files_of(directory), *(p for p in directory.rglob("*") if p.is_dir()), directory]:
        _fsync(path)


def open_stage(directory: Path, manifest: Manifest | None = None) -> Model:
    """Return the model of a stage directory. Eager forms are loaded and their rewrites replayed."""
    manifest = manifest or read_manifest(directory)
    spec, form, precision = manifest.spec, manifest.form, manifest.precision
    if form in ("eager", "compiled"):
        return _replay(directory, manifest)
    if manifest.path is None or manifest.path not in manifest.files:
        raise IntegrityError(f"{MANIFEST}: path '{manifest.path}' is not one of its files; export again")
    path = directory / manifest.path
    if form == "onnx":
        return Onnx(spec, precision, path)
    if form == "openvino":
        return OpenVino(spec, precision, path)
    if form == "native":
        return Native(spec, precision, path)
    if form == "engine" and (built := manifest.engine) is not None:
        return Engine(
            spec, precision, path, built.library, built.version, built.targets, built.profiles,
            manifest.files[manifest.path].sha256, built.driver, built.cuda_version, built.cuda_graphs,
        )  # fmt: skip
    if form == "packaged" and manifest.package is not None:
        return Packaged(spec, precision, path, manifest.package)
    raise IntegrityError(f"{MANIFEST}: unknown form '{form}'")


def _replay(directory: Path, manifest: Manifest) -> Model:
    from bertopt.passes import registry
    from bertopt.stages import sources

    try:
        from bertopt.modeling import checkpoint
    except ModuleNotFoundError as error:
        raise environment.missing_module(error) or error from error

    with checkpoint.on_cpu():
        model = checkpoint.reopen(directory, manifest.spec)
        records = [Rewrite.model_validate(entry) for entry in json.loads((directory / "rewrites.json").read_text("utf-8"))]
        names = [record.name for record in records]
        # Check before the passes run, and again after, since running them may import more modules.
        sources.check(manifest.sources, names)
        for record in records:
            apply = registry.restore(record)
            with sources.reading(apply, [directory], recorded=manifest.sources), registry.at_work(apply):
                apply.rewrite(model.network)
        sources.check(manifest.sources, names)
    kind = Compiled if manifest.form == "compiled" else Eager
    return kind(manifest.spec, manifest.precision, directory, model.network, tuple(records))


def key(
    parent: str, record: Rewrite | None, device: str, shapes: Any, texts: str, hardware: Mapping[str, Any] | None = None
) -> str:
    """Return the hash of everything that determines a stage: its parent, the pass with options and source, versions, device, inputs, and
    the hardware where the stage holds code or numbers for it alone.

    The source is that of the pass and of every module it imports; for the reference (no record), of the code that loads it.
    """
    source = source_hash.of_package("modeling/checkpoint.py") if record is None else _source_hash(record)
    parts = [parent, record.model_dump() if record else None, source, environment.versions(), device, shapes, texts, *([hardware] if hardware else [])]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _source_hash(record: Rewrite) -> str:
    from bertopt.passes import registry

    file = registry.source_file(registry.require(record.name))
    return "" if file is None else source_hash.of_files([file])


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
