"""Where a checkpoint comes from: `pkg://package/path`, a local directory or a hub id, and what of it may be read."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from bertopt.errors import IntegrityError, Unsupported, UsageError

HUB_ID = re.compile(r"^[\w.-]+(/[\w.-]+)?$")
#: What bertopt ever downloads of a hub repository: no code, no pickles.
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "1_Pooling/*"]
#: Fields of config.json and tokenizer_config.json that can name code to run.
CODE_FIELD = re.compile(r"^(auto_map|custom_pipelines|trust_remote_code|_?attn_implementation.*|_commit_hash)$")


def resolve(source: str, revision: str | None = None) -> Path:
    """The local directory of a checkpoint. Only a hub id reaches for the network.

    Raises UsageError where nothing is found, Unsupported where the hub cannot be reached.
    """
    if revision is not None and (source.startswith("pkg://") or Path(source).exists()):
        raise UsageError(f"revision is for hub ids; '{source}' is local: leave revision out")
    if source.startswith("pkg://"):
        return _package(source)
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UsageError(f"model must be a directory with config.json and model.safetensors; '{source}' is a file")
    if not HUB_ID.match(source):
        raise UsageError(f"model '{source}' is neither a directory nor a hub id such as 'org/name'")
    return _download(source, revision)


def _package(source: str) -> Path:
    package, _, inside = source.removeprefix("pkg://").partition("/")
    top, *nested = package.split(".")
    # find_spec of a top-level name imports nothing; of a dotted name it would import the parents.
    spec = importlib.util.find_spec(top) if top.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(f"model '{source}': package '{top}' is not installed; pip install {top.replace('_', '-')}")
    path = Path(next(iter(spec.submodule_search_locations))).joinpath(*nested, inside)
    if not path.is_dir():
        raise UsageError(f"model '{source}': package '{top}' has no directory '{'/'.join([*nested, inside])}'")
    return path


def _download(source: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=HUB_FILES))
    except (RepositoryNotFoundError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise Unsupported(
            f"model '{source}' is no local directory and could not be fetched from the hub "
            f"({type(error).__name__}: {str(error).splitlines()[0]}); check the name, or download it once and give the directory"
        ) from error


def read_json(path: Path) -> Any:
    """A JSON file. Raises IntegrityError where it is no JSON."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise IntegrityError(f"{path.name} must be UTF-8 JSON; {error}; restore the checkpoint") from error


def scrub(fields: Any) -> tuple[Any, list[str]]:
    """`fields` without those that name code to run, at any depth, and the names that were dropped."""
    dropped: list[str] = []

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            # `_attn_implementation: eager` names no code, but bertopt sets the implementation itself.
            dropped.extend(key for key in value if CODE_FIELD.match(key) and value[key] is not None)
            return {key: clean(item) for key, item in value.items() if not CODE_FIELD.match(key)}
        return [clean(item) for item in value] if isinstance(value, list) else value

    return clean(fields), dropped


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, sharded or not. Anything else is refused."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise IntegrityError(f"{index.name} must name files beside it; got '{outside[0]}'")
        missing = [name for name in names if not (directory / name).is_file()]
        if missing or not names:
            raise IntegrityError(f"{index.name} names {missing or 'no files'}, which are not there; fetch the shards")
        return [index, *(directory / name for name in names)]
    found = sorted(
        path.name for path in directory.iterdir() if path.suffix in {".bin", ".pt", ".pth", ".h5", ".msgpack"}
    )
    if found:
        raise IntegrityError(
            f"expected model.safetensors; got {', '.join(found)}, which can run code when loaded; "
            "convert it where you trust it: AutoModel.from_pretrained(DIR).save_pretrained(NEW)"
        )
    raise UsageError(f"'{directory}' has no model.safetensors; give the directory of a transformers checkpoint")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
