"""Find the weight files of a local checkpoint, and check that they are complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bertopt.errors import BertoptError, IntegrityError, UsageError
from bertopt.system.untrusted import first_line, plain

#: First bytes of the pointer that Git LFS leaves in place of a file that was not fetched.
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
#: Folders with weights that transformers does not read.
_OTHER_WEIGHTS = ("*.safetensors", "*.safetensors.*", "*.gguf", "*.onnx", "onnx/*.onnx", "openvino/*.xml")
#: Most bytes of a safetensors header, as in its own library.
_LONGEST_HEADER = 100_000_000
#: How deep JSON may be nested. Real configurations stay below 10.
_DEEPEST = 100


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raises UsageError where it cannot be read, IntegrityError where it is not there or not JSON."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise IntegrityError(f"'{path}' is not there; restore the checkpoint") from error
    except OSError as error:
        raise UsageError(f"'{path}' cannot be read ({error.strerror}); check its permissions") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, a number of 5,000 digits, nested too deeply
        raise IntegrityError(f"'{path}' must be UTF-8 JSON ({first_line(error)}); restore the checkpoint") from error
    if _is_deep(content):
        raise IntegrityError(f"'{path}' must be nested at most {_DEEPEST} deep; got more: restore the checkpoint")
    return content


def _is_deep(content: Any) -> bool:
    """Whether JSON is nested deeper than anything that walks through it may take: Python's own limit counts its callers too."""
    level = [content]
    for _ in range(_DEEPEST + 1):
        level = [inner for each in level if isinstance(each, dict | list) for inner in (each.values() if isinstance(each, dict) else each)]
    return bool(level)


def check_fetched(path: Path) -> None:
    """Raise IntegrityError where Git LFS has left a pointer in the place of a file."""
    try:
        with path.open("rb") as file:
            pointer = file.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError as error:
        raise UsageError(f"'{path}' cannot be read ({error.strerror}); check its permissions") from error
    if pointer:
        raise IntegrityError(f"'{path}' is a Git LFS pointer, not the file itself; fetch the file: git lfs pull")


def check_link(path: Path) -> None:
    """Raise UsageError for a link to a file that is not there, which looks like a file that the checkpoint does not have."""
    if path.is_symlink() and not path.exists():
        raise UsageError(
            f"'{path}' is a link to a file that is not there, as after an interrupted download; fetch the model again, with the "
            "network (HF_HUB_OFFLINE unset), or restore the file"
        )


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, sharded or not. Raises IntegrityError and UsageError where there are none."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        return [index, *_shards(index)]
    check_link(single)
    raise _no_weights(directory, single)


def _shards(index: Path) -> list[Path]:
    content = read_json(index)
    placed = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
        raise IntegrityError(f"{index.name} must map tensors to file names under weight_map; restore the checkpoint")
    names = sorted(set(placed.values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise IntegrityError(f"{index.name} must name files beside it; got '{outside[0]}'")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing or not names:
        raise IntegrityError(f"{index.name} names {missing or 'no files'}, which are not there; fetch the shards")
    return [index.parent / name for name in names]


def _no_weights(directory: Path, single: Path) -> BertoptError:
    """Return the message for a checkpoint without safetensors, which depends on what is there instead."""
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in {".bin", ".pt", ".pth", ".h5", ".msgpack"})
    if pickles:
        return IntegrityError(
            f"expected model.safetensors; got {', '.join(pickles)}, which can run code when loaded; "
            f"if you trust it, convert it with transformers: {_class_name(directory)}.from_pretrained(DIR).save_pretrained(DIR)"
        )
    others = sorted(path.relative_to(directory).as_posix() for pattern in _OTHER_WEIGHTS for path in directory.glob(pattern))
    instead = f", but {plain(', '.join(others[:3]))}" if others else ""
    return UsageError(f"'{directory}' has no model.safetensors{instead}; give the directory of a transformers checkpoint")


def _class_name(directory: Path) -> str:
    """Return transformers' class for a checkpoint with its head: AutoModel would leave that out."""
    fields = read_json(directory / "config.json") if (directory / "config.json").is_file() else {}
    names = fields.get("architectures") if isinstance(fields, dict) else None
    name = names[0] if isinstance(names, list) and names else None
    return name if isinstance(name, str) and name.isascii() and name.isidentifier() else "AutoModel"


def check_whole(path: Path) -> None:
    """Raise IntegrityError where a safetensors file is shorter or longer than its header says: a download that broke off."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(size - 8, _LONGEST_HEADER):
                raise IntegrityError(f"'{path}' is damaged (its header does not fit into it); fetch the checkpoint again")
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except OSError as error:
        raise UsageError(f"'{path}' cannot be read ({error.strerror}); check its permissions") from error
    except (ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise IntegrityError(f"'{path}' is damaged (its header is not that of safetensors); fetch the checkpoint again") from error
    expected = 8 + length + max((end for end in ends if isinstance(end, int)), default=0)
    if size != expected:
        raise IntegrityError(f"'{path}' is damaged: it must have {expected:,} bytes; got {size:,}; fetch the checkpoint again")
