"""Find a checkpoint (`pkg://package/path`, a local directory or a hub id), and check that it is safe to read."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import stat
from pathlib import Path
from typing import Any

from bertopt.errors import IntegrityError, UsageError
from bertopt.modeling.checkpoint_files import check_fetched, check_link, check_whole, read_json, weight_files
from bertopt.modeling.config_checks import check_config, check_size
from bertopt.system import environment, paths
from bertopt.system.untrusted import first_line, plain

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
#: The only files that bertopt downloads from a hub repository: no code, no pickles.
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model"]
#: PEFT's name for the configuration of an adapter.
ADAPTER = "adapter_config.json"
#: Any of these is a tokenizer that transformers can load.
TOKENIZER_FILES = (
    "tokenizer.json", "vocab.txt", "vocab.json", "sentencepiece.bpe.model", "spiece.model", "spm.model", "tokenizer.model",
    "sentencepiece.model",
)  # fmt: skip
_NO_MODEL = "model '{}' is neither a directory nor a hub id such as 'org/name'; check the path or the name"
#: Seconds that the hub may take for a first answer; HF_HUB_ETAG_TIMEOUT overrides it.
HUB_TIMEOUT_S = 5.0
#: Fields of config.json and tokenizer_config.json that can name code to run.
CODE_FIELD = re.compile(r"^(auto_map|custom_pipelines|trust_remote_code|_?attn_implementation.*|_commit_hash)$")


def resolve(source: str, revision: str | None = None) -> Path:
    """The local directory of a checkpoint. Only a hub id reaches for the network.

    Raises UsageError where there is no such model, or the hub cannot be reached.
    """
    if revision is not None and (source.startswith("pkg://") or Path(source).exists()):
        raise UsageError(f"revision is for hub ids; '{source}' is local: leave revision out")
    if not source:
        raise UsageError("model must be a hub id, a directory or pkg://package/path; got ''")
    if source.startswith("pkg://"):
        return _package(source)
    if stat.S_ISDIR(mode := _mode(source)):
        return Path(source).expanduser()
    if mode:
        raise UsageError(f"model must be a directory with config.json and model.safetensors; '{source}' is a file")
    if not HUB_ID.fullmatch(source):
        raise UsageError(_NO_MODEL.format(source))
    return _download(source, revision)


def _mode(source: str) -> int:
    """Return the mode of the file or directory `source`, 0 if there is none. Raises UsageError where it cannot be looked up."""
    try:
        return paths.mode(Path(source).expanduser())
    except (OSError, RuntimeError, ValueError) as error:  # no permission, too long, no such user
        raise UsageError(f"model {ascii(source)[:200]} cannot be looked up ({_why(error)}); check the path") from error


def hub_commit(directory: Path) -> str | None:
    """Return the commit of a checkpoint that lies in the hub's cache; None for any other directory."""
    return directory.name if directory.parent.name == "snapshots" and _COMMIT.fullmatch(directory.name) else None


def examine_here(source: str, revision: str | None = None) -> dict[str, Any] | None:
    """Do as `examine` without the network: None for a package or a hub model that is not on this machine."""
    if source.startswith("pkg://"):
        return examine(resolve(source, revision)) if _package_root(source) is not None else None
    if not HUB_ID.fullmatch(source) or _mode(source):
        return examine(resolve(source, revision))
    environment.check_hub_variables()
    from huggingface_hub import errors, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(source, "config.json", revision=revision)
    except errors.HFValidationError as error:
        raise UsageError(_NO_MODEL.format(source)) from error
    return check_config(read_json(Path(cached))) if isinstance(cached, str) else None


def _package(source: str) -> Path:
    package, _, inside = source.removeprefix("pkg://").partition("/")
    top, *nested = package.split(".")
    root = _package_root(source)
    if root is None:
        raise UsageError(f"model '{source}': package '{top}' is not installed; pip install {top.replace('_', '-')}")
    path = root.joinpath(*nested, inside)
    if not path.is_dir():
        raise UsageError(f"model '{source}': package '{top}' has no directory '{'/'.join([*nested, inside])}'; check the path")
    return path


def _package_root(source: str) -> Path | None:
    """Directory of the top-level package that `source` names, or None where it is not installed."""
    top = re.split(r"[./]", source.removeprefix("pkg://"), maxsplit=1)[0]
    # find_spec of a top-level name imports nothing; of a dotted name it would import the parents.
    spec = importlib.util.find_spec(top) if top.isidentifier() else None
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


def _download(source: str, revision: str | None) -> Path:
    environment.check_hub_variables()
    from huggingface_hub import HfApi, errors, snapshot_download

    unreachable = None
    try:
        # snapshot_download would retry, or wait without a limit, where the hub does not answer.
        HfApi().repo_info(source, revision=revision, timeout=_timeout_s())
    except errors.GatedRepoError as error:
        raise UsageError(f"model '{source}' is gated; accept its terms on the hub and log in: hf auth login") from error
    except errors.RepositoryNotFoundError as error:
        raise UsageError(
            f"model '{source}' is not a local directory, and the hub has no such model; check the name, or log in if it is "
            "private: hf auth login"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UsageError(f"model '{source}' has no revision '{revision}' on the hub; check the name") from error
    except errors.HFValidationError as error:
        raise UsageError(_NO_MODEL.format(source)) from error
    except Exception as error:  # the hub's client raises those of httpx or requests, by its version
        unreachable = error
    try:
        # config.json first: it can tell that the rest need not be fetched.
        for files in (["config.json", ADAPTER], HUB_FILES):
            folder = Path(snapshot_download(source, revision=revision, allow_patterns=files, local_files_only=unreachable is not None))
            _read_config(folder)
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, OSError) as error:
        why = unreachable or error
        late = f", set HF_HUB_ETAG_TIMEOUT (now {_timeout_s():g} s)" if "Timeout" in type(why).__name__ else ""
        raise UsageError(
            f"model '{source}' is not a local directory and could not be fetched from the hub "
            f"({type(why).__name__}: {_why(why)}); check the name and the network{late}, or download it once and give the directory"
        ) from error
    return folder


def _timeout_s() -> float:
    return float(os.environ.get("HF_HUB_ETAG_TIMEOUT", HUB_TIMEOUT_S))


def examine(directory: Path) -> dict[str, Any]:
    """Check that `directory` is a checkpoint that bertopt can work with, as far as its small files tell.

    Returns the fields of config.json. Takes milliseconds and imports nothing heavy. Raises UsageError (no checkpoint, no
    tokenizer, no encoder) and IntegrityError (damaged or unsafe files).
    """
    fields = _read_config(directory)
    for path in sorted(path for pattern in HUB_FILES for path in directory.glob(pattern)):
        check_link(path)
    tokenizers = [directory / name for name in TOKENIZER_FILES if (directory / name).is_file()]
    for path in (*weight_files(directory), *tokenizers):
        check_fetched(path)
        if path.suffix == ".safetensors":
            check_whole(path)
    check_size(fields, sum(path.stat().st_size for path in weight_files(directory)))
    if not tokenizers:
        raise UsageError(
            f"'{directory}' has no tokenizer ({', '.join(TOKENIZER_FILES[:3])}, …); save the model's own beside it: "
            "AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIR)"
        )
    for name in ("tokenizer_config.json", "sentence_bert_config.json"):
        if (directory / name).is_file() and not isinstance(read_json(directory / name), dict):
            raise IntegrityError(f"{name} must be a JSON object; restore the checkpoint")
    return fields


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    _refuse_adapter(directory)
    check_link(path)
    if not path.is_file():
        # Those of sentence-transformers' modules, such as 1_Pooling, are no checkpoints.
        inside = next((each.parent for each in sorted(directory.glob("*/config.json")) if "model_type" in each.read_text("utf-8", "replace")), None)
        advice = f"did you mean '{inside}'?" if inside else "give the directory of a transformers checkpoint"
        if inside and (directory / "modules.json").is_file():
            # What is in there alone would be the model without its pooling.
            advice = f"its transformer is in '{inside.name}', as sentence-transformers once wrote it; save it anew: SentenceTransformer(DIR).save(NEW)"
        raise UsageError(f"'{directory}' has no config.json; {advice}")
    check_fetched(path)
    return check_config(read_json(path))


def _refuse_adapter(directory: Path) -> None:
    """Raise UsageError for an adapter, beside whole weights too: transformers with peft would load the model that it names."""
    if (directory / ADAPTER).is_file():
        fields = read_json(directory / ADAPTER)
        base = fields.get("base_model_name_or_path") if isinstance(fields, dict) else None
        raise UsageError(
            f"'{directory}' is a PEFT adapter for {plain(ascii(base))}; merge the two and give the result, with a tokenizer: "
            "PeftModel.from_pretrained(BASE, DIR).merge_and_unload().save_pretrained(NEW)"
        )


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or first_line(error)


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


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
