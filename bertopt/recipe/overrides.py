"""Apply `--set` values such as `steps.1.dtype=float16` to a recipe's document."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bertopt.recipe.suggest import nearest
from bertopt.recipe.yaml_document import Document, KeyPath, Place


def apply(doc: Document, settings: Iterable[str]) -> None:
    """Put every setting into `doc`, in order. Mistakes are reported there, under the setting's own words."""
    for number, setting in enumerate(settings):
        place = Place((1, number, 0), f"--set {setting}")
        name, equals, text = setting.partition("=")
        try:
            if not equals or not all(name.split(".")):
                raise LookupError("expected KEY=VALUE, such as steps.1.dtype=float16")
            doc.replace(_find(doc.data, name.split(".")), text, place)
        except LookupError as error:
            doc.report((), str(error.args[0]), at=place)


def _find(here: Any, parts: list[str]) -> KeyPath:
    """The path that dotted `parts` mean: list items by index, steps also by name."""
    path: KeyPath = ()
    for part in parts:
        step: str | int = part
        if isinstance(here, list):
            step = _index(here, part)
            here = here[step]
        elif isinstance(here, dict):
            here = here.get(part)
        elif here is not None:
            raise LookupError(f"'{'.'.join(map(str, path))}' is a single value and has no '{part}'")
        path = (*path, step)
    return path


def _index(items: list[Any], part: str) -> int:
    if part.isascii() and part.isdigit():
        if int(part[:9]) < len(items):
            return int(part)
        raise LookupError(f"there is no item {part}; expected 0 to {len(items) - 1}")
    names = [item.get("name", item.get("pass")) if isinstance(item, dict) else None for item in items]
    if part not in names:
        raise LookupError(f"there is no step '{part}'{nearest(part, filter(None, names))}")
    return names.index(part)
