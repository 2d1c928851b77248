"""`manifest.json`: what a stage or artefact is, the hash of every file, and a hash of itself."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from bertopt._version import __version__
from bertopt.core import PackageBuild, Precision, Profile, Rewrite, Spec
from bertopt.errors import IntegrityError, UsageError
from bertopt.modeling.source import sha256
from bertopt.results import Limits
from bertopt.stages import signature
from bertopt.stages.signature import SIGNATURE
from bertopt.system import atomic_write, environment, paths

MANIFEST = "manifest.json"
#: 2: the manifest holds a hash of itself, and OpenVINO files are named as sentence-transformers looks for them.
SCHEMA_VERSION = 2


#: Descriptions in an artefact: the model card and the bill of materials.
_DESCRIPTIONS = ("README.md", "sbom.cdx.json")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class FileEntry(_Frozen):
    sha256: str
    size: int


class EngineEntry(_Frozen):
    """What a TensorRT plan was built with and for."""

    library: str
    version: str
    targets: tuple[str, ...]
    profiles: tuple[Profile, ...]
    driver: str | None = None
    cuda_version: str | None = None
    cuda_graphs: bool = False


class GpuEntry(_Frozen):
    """The GPU that a stage was built on; `cuda_version` is torch's."""

    name: str
    capability: str
    driver: str | None = None
    cuda_version: str | None = None


class Manifest(_Frozen):
    """The contents of `manifest.json`. Only artefacts have `stage`, `recipe` and `gates`."""

    schema_version: Literal[2] = SCHEMA_VERSION  # type: ignore[assignment]
    bertopt_version: str = __version__
    key: str = ""
    name: str = ""
    device: Literal["cpu", "cuda"] = "cpu"
    form: str
    precision: Precision
    spec: Spec
    path: str | None = None
    """The model's file in this directory; None where the form is eager."""
    engine: EngineEntry | None = None
    gpu: GpuEntry | None = None
    """None where the stage was built for the CPU."""
    package: PackageBuild | None = None
    changes: dict[str, int] = {}
    build_s: float = 0.0
    passes: tuple[Rewrite, ...] = ()
    sources: dict[str, str] | None = None
    """Hashes of the files of passes that are not part of bertopt, and of the modules that they loaded."""
    answers: list[list[list[float]]] | None = None
    """An artefact's outputs for fixed texts in a new interpreter: see `bertopt.runtime.replay`."""
    warnings: tuple[str, ...] = ()
    checkpoint_sha256: str | None = None
    """One hash over the files of the checkpoint that the stage comes from."""
    checkpoint_commit: str | None = None
    """The checkpoint's commit, if it comes from the hub."""
    stage: str | None = None
    recipe: dict[str, Any] | None = None
    recipe_sha256: str | None = None
    gates: dict[str, Any] | None = None
    environment: dict[str, Any] = Field(default_factory=environment.describe)
    files: dict[str, FileEntry] = {}
    manifest_sha256: str = ""
    """Hash over the canonical JSON of all other fields: it protects against accidents, not against attackers."""

    @property
    def size_bytes(self) -> int:
        """Size of all files but an artefact's descriptions, so that a stage and its artefact have the same size."""
        return sum(entry.size for name, entry in self.files.items() if name not in _DESCRIPTIONS)

    @property
    def content_sha256(self) -> str:
        """One hash over the path and hash of every file but the descriptions: it does not depend on when an artefact was written or timed."""
        hashes = {name: self.files[name].sha256 for name in sorted(self.files) if name not in _DESCRIPTIONS}
        return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()

    def passed_limits(self) -> Limits | None:
        """Return the limits on parity under which an artefact was delivered; None for a stage, and where nothing was compared."""
        parity = (self.gates or {}).get("parity") or {}
        return Limits.model_validate(parity["limits"]) if parity.get("limits") else None

    def sealed(self) -> Manifest:
        """Return this manifest with its own hash in it."""
        return self.model_copy(update={"manifest_sha256": _own_hash(self.model_dump(mode="json", exclude_none=True))})

    def text(self) -> str:
        return _text(self.model_dump(mode="json", exclude_none=True))


def write(directory: Path, fields: Mapping[str, Any]) -> Manifest:
    """Hash every file of `directory`, write its manifest last, and return it. A signature of an earlier one is removed."""
    (directory / SIGNATURE).unlink(missing_ok=True)
    files = {
        str(path.relative_to(directory)): FileEntry(sha256=sha256(path), size=path.stat().st_size)
        for path in files_of(directory)
        if path != directory / MANIFEST
    }
    manifest = Manifest.model_validate({**fields, "files": files}).sealed()
    (directory / MANIFEST).write_text(manifest.text(), "utf-8")
    return manifest


def sign(directory: Path, private: Path) -> Path:
    """Write the signature of the artefact in `directory`, once its files were verified, and return its path."""
    verify(directory)
    path, signed = directory / SIGNATURE, signature.sign((directory / MANIFEST).read_bytes(), private)
    with atomic_write.replacing(path) as new:
        new.write_bytes(signed)
    return path


def read(directory: Path, key: Path | None = None) -> Manifest:
    """Return the manifest, after checking its signature if a public `key` is given.

    Raises UsageError where there is no manifest, IntegrityError where it was changed since it was written or signed.
    """
    path = directory / MANIFEST
    if not stat.S_ISREG(paths.mode(path)):
        raise _no_stage(directory)
    content = path.read_bytes()
    if key is not None:
        signature.check(directory, content, key)
    try:
        text = content.decode("utf-8")
        fields = json.loads(text)
        got = fields.get("schema_version") if isinstance(fields, dict) else None
        if isinstance(got, int) and got != SCHEMA_VERSION:
            raise IntegrityError(
                f"{MANIFEST}: schema_version must be {SCHEMA_VERSION}; got {str(got)[:20]}; "
                + ("it was written by an older bertopt: export again" if got < SCHEMA_VERSION else "use a newer bertopt")
            )
        manifest = Manifest.model_validate_json(text)
        # Compare the text as it was written: this version would write more fields than an older one did.
        whole = _text(fields) == text and _own_hash(fields) == manifest.manifest_sha256
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"'{path}' is damaged ({type(error).__name__}); export again") from error
    if not whole:
        raise IntegrityError(f"'{path}' is not as it was written (its own hash differs); export again")
    return manifest


def _no_stage(directory: Path) -> UsageError:
    """Return the error for a path that is not a stage: it says what is there, and what to give instead."""
    if not directory.exists():
        return UsageError(f"there is no '{directory}'; give the directory of a stage or artefact, such as out/NAME/artifact")
    if directory.is_file():
        return UsageError(f"'{directory}' is a file; give the directory of a stage or artefact, such as out/NAME/artifact")
    path = directory / MANIFEST
    if path.is_symlink() or path.exists():
        what = "a link to nothing: copy the files themselves, as `cp -rL` does" if path.is_symlink() else "a directory: export again"
        return UsageError(f"'{path}' must be a file; got {what}")
    advice = "give a directory that bertopt wrote, such as out/NAME/artifact"
    if (directory / "artifact" / MANIFEST).is_file():
        advice = f"did you mean '{directory / 'artifact'}'?"
    elif (directory / "config.json").is_file():
        advice = f"it is a checkpoint: make an artefact of it with `bertopt optimize {directory}`"
    return UsageError(f"'{directory}' is not a bertopt stage or artefact: it has no {MANIFEST}; {advice}")


def verify(directory: Path, key: Path | None = None) -> Manifest:
    """Check the signature, if a public `key` is given, and the size and hash of every file; return the manifest.

    Raises IntegrityError that names the first file that is missing, changed, or not listed.
    """
    manifest = read(directory, key)
    links = [path for path in sorted(directory.rglob("*")) if path.is_symlink()]
    if links:
        raise IntegrityError(
            f"'{links[0].relative_to(directory)}' in '{directory}' is a link; copy the files themselves, as `cp -rL` does"
        )
    for name, entry in manifest.files.items():
        path = directory / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise IntegrityError(f"{MANIFEST} names '{name}', which lies outside the directory")
        if not path.is_file():
            raise IntegrityError(f"'{name}' is missing from '{directory}'; copy the whole directory, or export again")
        if path.stat().st_size != entry.size or sha256(path) != entry.sha256:
            raise IntegrityError(
                f"'{name}' in '{directory}' is not the file that was exported (size or sha256 differs); export again"
            )
    known = {Path(name) for name in (*manifest.files, MANIFEST, SIGNATURE)}
    extra = [path for path in files_of(directory) if path.relative_to(directory) not in known]
    if extra:
        shown = _unlisted(directory, extra, known)
        verb, them = ("is", "it") if len(shown) == 1 else ("are", "them")
        named = ", ".join(f"'{name}'" for name in shown)
        raise IntegrityError(f"{named} in '{directory}' {verb} not listed in {MANIFEST}; remove {them}, or export again")
    return manifest


def _unlisted(directory: Path, extra: Iterable[Path], known: Iterable[Path]) -> list[str]:
    """Return at most five names for the files `extra`; a folder without any `known` file is named as a whole."""
    folders = {folder for path in known for folder in path.parents}
    names = []
    for path in (one.relative_to(directory) for one in extra):
        names.append(str(next((folder for folder in reversed(path.parents) if folder not in folders), path)))
    return list(dict.fromkeys(names))[:5]


def files_of(directory: Path) -> Iterator[Path]:
    """Return every file in a directory and below it, sorted."""
    return (path for path in sorted(directory.rglob("*")) if path.is_file())


def _own_hash(fields: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in fields.items() if key != "manifest_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _text(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, indent=2, ensure_ascii=False) + "\n"
