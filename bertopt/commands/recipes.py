"""The recipes that ship with bertopt, and how to name them."""

from __future__ import annotations

import stat
from pathlib import Path

from pydantic import BaseModel

from bertopt.commands import path_advice
from bertopt.errors import UsageError
from bertopt.recipe.suggest import closest
from bertopt.stages import MANIFEST
from bertopt.system import paths

#: Data of the package, so that wheels and checkouts hold the same files at the same place.
FOLDER = Path(__file__).parents[1] / "recipes"
_SUFFIXES = (".yaml", ".yml", ".json")


class ShippedRecipe(BaseModel):
    """One recipe of the package: what to call it, and the first sentence of its comment."""

    name: str
    summary: str
    path: str


def shipped() -> list[ShippedRecipe]:
    """Return the shipped recipes, sorted by name."""
    return [
        ShippedRecipe(name=path.stem, summary=summary(path), path=str(path)) for path in sorted(FOLDER.glob("*.yaml"))
    ]


def find(recipe: str | Path) -> Path:
    """Return the file of a recipe: `recipe` itself where there is such a file, else the shipped recipe of that name.

    A name without folder and suffix, such as `trt_fp16`, is a shipped recipe's; with either it is a file. `recipes/trt_fp16.yaml`, the
    place of one in the package, names the shipped recipe too. Raises UsageError for a name that no recipe has, for a directory or a
    file that bertopt wrote, and for a file that is not there but is called as a shipped recipe; another is returned as it is.
    """
    path = Path(recipe)
    try:
        local = stat.S_ISREG(paths.mode(path))
    except OSError:  # too long, no permission: reading it says so
        return path
    if path.is_dir() or path.name in (MANIFEST, path_advice.REPORT):
        raise UsageError(f"'{recipe}' is not a recipe; {path_advice.advice(path, 'a YAML file, or a name that `bertopt recipes` lists')}")
    names = [one.stem for one in FOLDER.glob("*.yaml")]
    if local:
        return path
    if (path.name in names and path.parent == Path()) or (path.stem in names and path == Path("recipes", f"{path.stem}.yaml")):
        return FOLDER / f"{path.stem}.yaml"
    if path.stem in names and path.suffix in ("", *_SUFFIXES):
        raise UsageError(f"there is no file '{recipe}'; check the path, or call the shipped recipe by its name: {path.stem}")
    if path.parent == Path() and path.suffix == "" and not path.exists():
        near = closest(path.name, names)
        hint = f"did you mean '{near}'?" if near else "give a YAML file, or a name that `bertopt recipes` lists"
        raise UsageError(f"'{recipe}' is neither a file here nor a shipped recipe; {hint}")
    return path


def summary(path: Path) -> str:
    """Return the first sentence of a recipe's comment at the top, after the line for editors."""
    comment = []
    for line in path.read_text("utf-8").splitlines()[1:]:
        if not line.startswith("# "):
            break
        comment.append(line.removeprefix("# "))
    return " ".join(comment).split(". ")[0].rstrip(".") + "."
