"""A stage is a directory, laid out as an artefact, committed by one rename and described by `manifest.json`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bertopt._version import __version__
from bertopt.core import Compiled, Eager, Engine, Model, Onnx, OpenVino, Profile, Rewrite, Spec
from bertopt.errors import IntegrityError, UsageError
from bertopt.modeling.source import sha256
from bertopt.system import environment

MANIFEST = "manifest.json"
#: What makes up a form; everything else in a stage (configuration, tokenizer) is handed down from its parent.
_FORM_FILES = ("model.safetensors", "rewrites.json", "onnx", "openvino", "engines", MANIFEST)


def inherit(parent: Path, out: Path) -> None:
    """Link configuration and tokenizer from the parent stage. Stages are never written to, so links are safe."""
    for path in _files(parent):
        relative = path.relative_to(parent)
        if relative.parts[0] not in _FORM_FILES and not relative.name.startswith("model-"):
            link(path, out / relative)


def link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def write_form(model: Model, out: Path) -> None:
    """Put the files of `model`'s form into the stage directory `out`, if the pass has not written them there."""
    if isinstance(model, Eager | Compiled):
        for path in _files(model.checkpoint):
            if path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json"):
                link(path, out / path.name)
        records = [rewrite.model_dump() for rewrite in model.rewrites]
        (out / "rewrites.json").write_text(json.dumps(records, indent=2) + "\n", "utf-8")
    elif isinstance(model, Onnx) and not model.path.is_relative_to(out):
        link(model.path, out / "onnx" / "model.onnx")
        data = model.path.with_name("model.onnx_data")
        if data.exists():
            link(data, out / "onnx" / data.name)
    elif isinstance(model, OpenVino) and not model.path.is_relative_to(out):
        for suffix in (".xml", ".bin"):
            link(model.path.with_suffix(suffix), out / "openvino" / f"model{suffix}")
    elif isinstance(model, Engine) and not model.path.is_relative_to(out):
        link(model.path, out / "engines" / model.path.parent.name / "model.plan")


def describe(model: Model, out: Path) -> dict[str, Any]:
    """The part of a manifest from which `open_stage` rebuilds the model."""
    entry: dict[str, Any] = {
        "form": model.form,
        "precision": model.precision,
        "spec": model.spec.model_dump(mode="json"),
    }
    if isinstance(model, Onnx):
        entry["path"] = "onnx/model.onnx"
    elif isinstance(model, OpenVino):
        entry["path"] = "openvino/model.xml"
    elif isinstance(model, Engine):
        entry["path"] = f"engines/{model.path.parent.name}/model.plan"
        entry["device"] = "cuda"
        entry["engine"] = {
            "library": model.library,
            "version": model.version,
            "targets": model.targets,
            "profiles": [profile.model_dump(mode="json") for profile in model.profiles],
        }
    return entry


def write_manifest(out: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """Hash every file and write the manifest last; returns it."""
    files = {
        str(path.relative_to(out)): {"sha256": sha256(path), "size": path.stat().st_size}
        for path in _files(out)
        if path != out / MANIFEST
    }
    manifest = {
        "schema_version": 1,
        "bertopt_version": __version__,
        **fields,
        "environment": environment.describe(),
        "files": files,
    }
    (out / MANIFEST).write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", "utf-8")
    return manifest


def commit(part: Path, final: Path) -> None:
    """Make a finished directory appear under its name: fsync everything, then one rename."""
    sync(part)
    if final.exists():
        shutil.rmtree(final)
    part.rename(final)
    _fsync(final.parent)


def sync(directory: Path) -> None:
    """fsync a directory and everything in it."""
    for path in [*_files(directory), *(p for p in directory.rglob("*") if p.is_dir()), directory]:
        _fsync(path)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest. Raises UsageError where there is none, IntegrityError where it cannot be read."""
    path = directory / MANIFEST
    if not path.is_file():
        raise UsageError(f"'{directory}' is no bertopt stage or artefact: it has no {MANIFEST}")
    try:
        manifest: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if manifest["schema_version"] != 1:
            raise IntegrityError(
                f"{MANIFEST}: schema_version must be 1; got {manifest['schema_version']}; use a newer bertopt"
            )
        Spec.model_validate(manifest["spec"])
        _ = [(entry["size"], entry["sha256"]) for entry in manifest["files"].values()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(f"'{path}' is damaged ({type(error).__name__}); export again") from error
    return manifest


def verify(directory: Path) -> dict[str, Any]:
    """The manifest, after every file's size and hash was checked, before anything of it reaches a loader.

    Raises IntegrityError naming the first file that is missing, changed, or not listed.
    """
    manifest = read_manifest(directory)
    listed = manifest["files"]
    links = [path for path in sorted(directory.rglob("*")) if path.is_symlink()]
    if links:
        raise IntegrityError(
            f"'{links[0].relative_to(directory)}' in '{directory}' is a link; copy the files themselves"
        )
    for name, entry in listed.items():
        path = directory / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise IntegrityError(f"{MANIFEST} names '{name}', which lies outside the directory")
        if not path.is_file():
            raise IntegrityError(f"'{name}' is missing from '{directory}'; copy the whole directory, or export again")
        if path.stat().st_size != entry["size"] or sha256(path) != entry["sha256"]:
            raise IntegrityError(
                f"'{name}' in '{directory}' is not the file that was exported (size or sha256 differs); export again"
            )
    extra = [
        str(p.relative_to(directory))
        for p in _files(directory)
        if str(p.relative_to(directory)) not in listed and p != directory / MANIFEST
    ]
    if extra:
        raise IntegrityError(f"'{extra[0]}' in '{directory}' is not listed in {MANIFEST}; remove it, or export again")
    return manifest


def open_stage(directory: Path, manifest: dict[str, Any] | None = None) -> Model:
    """The model of a stage directory. Eager forms are loaded and their rewrites replayed."""
    manifest = manifest or read_manifest(directory)
    spec = Spec.model_validate(manifest["spec"])
    form, precision = manifest["form"], manifest["precision"]
    if form in ("eager", "compiled"):
        return _replay(directory, spec, form, precision)
    if manifest.get("path") not in manifest["files"]:
        raise IntegrityError(f"{MANIFEST}: path '{manifest.get('path')}' is not one of its files; export again")
    path = directory / manifest["path"]
    if form == "onnx":
        return Onnx(spec, precision, path)
    if form == "openvino":
        return OpenVino(spec, precision, path)
    if form == "engine":
        entry = manifest["engine"]
        profiles = tuple(Profile.model_validate(profile) for profile in entry["profiles"])
        return Engine(spec, precision, path, entry["library"], entry["version"], tuple(entry["targets"]), profiles)
    raise IntegrityError(f"{MANIFEST}: unknown form '{form}'")


def _replay(directory: Path, spec: Spec, form: str, precision: Any) -> Model:
    from bertopt import passes
    from bertopt.modeling import checkpoint

    model = checkpoint.open_directory(directory, rewrites_spec=spec)
    records = [Rewrite.model_validate(entry) for entry in json.loads((directory / "rewrites.json").read_text("utf-8"))]
    for record in records:
        passes.restore(record).rewrite(model.network)
    kind = Compiled if form == "compiled" else Eager
    return kind(spec, precision, directory, model.network, tuple(records))


def key(parent: str, record: Rewrite | None, device: str, shapes: Any, texts: str) -> str:
    """What a stage is determined by: its parent, the pass with options and source, versions, device and inputs."""
    source = ""
    if record is not None:
        source = _source_hash(record)
    parts = [parent, record.model_dump() if record else None, source, environment.versions(), device, shapes, texts]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _source_hash(record: Rewrite) -> str:
    """A pass that was edited makes a new stage."""
    import inspect

    from bertopt import passes

    cls = passes.need(record.name)
    try:
        return hashlib.sha256(Path(inspect.getfile(cls)).read_bytes()).hexdigest()
    except (OSError, TypeError):
        return ""


def size_bytes(manifest: dict[str, Any]) -> int:
    return sum(int(entry["size"]) for entry in manifest["files"].values())


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_file())


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
