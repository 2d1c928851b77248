"""modules.json, in which sentence-transformers lists what follows the transformer, and the files of these modules."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertopt.errors import IntegrityError
from bertopt.modeling.checkpoint_files import read_json
from bertopt.system.untrusted import plain

MODULES = "modules.json"
#: Where a Dense has its weights.
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Module:
    """One entry of modules.json."""

    kind: str
    path: Any
    name: str | None

    @property
    def beside(self) -> bool:
        """Whether its files lie beside modules.json, in no folder."""
        return self.path in ("", ".")

    @property
    def folder(self) -> str:
        """Raises IntegrityError where the path is not that of a folder beside modules.json."""
        folder = self.path.removeprefix("./").removesuffix("/") if isinstance(self.path, str) else ""
        if folder == "" or folder.startswith(".") or Path(folder).name != folder:
            raise IntegrityError(f"modules.json: path must name a folder beside it; got {plain(ascii(self.path))}; restore the checkpoint")
        return folder

    def config(self, directory: Path) -> dict[str, Any]:
        found = read_json(directory / self.folder / "config.json")
        if not isinstance(found, dict):
            raise IntegrityError(f"{self.folder}/config.json must be a JSON object; restore the checkpoint")
        return found


def read_modules(directory: Path) -> list[Module]:
    """Return what modules.json lists, nothing where it is not there."""
    found = read_json(directory / MODULES) if (directory / MODULES).is_file() else []
    if not isinstance(found, list) or not all(isinstance(each, dict) and {"type", "path"} <= each.keys() for each in found):
        raise IntegrityError(f"{MODULES} must be a list of modules, each with a type and a path; restore the checkpoint")
    return [Module(str(each["type"]).rsplit(".", 1)[-1], each["path"], str(each["name"]) if "name" in each else None) for each in found]


def module_files(directory: Path) -> list[str]:
    """Return the names of the files in folders beside the checkpoint that say what follows the transformer."""
    files = {"Pooling": ("config.json",), "SpladePooling": ("config.json",), "Dense": ("config.json", WEIGHTS), "Dropout": ("config.json",)}
    return [f"{module.folder}/{name}" for module in read_modules(directory) for name in files.get(module.kind, ())]


def dense_weights(directory: Path) -> list[Path]:
    """Return the files of weights beside the checkpoint's own."""
    return [directory / name for name in module_files(directory) if name.endswith(WEIGHTS)]
