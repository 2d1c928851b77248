"""Validate plain data as a pydantic model and report every mistake at its place: what was expected, what was got."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from bertopt.recipe.suggest import closest, nearest
from bertopt.recipe.yaml_document import Document, KeyPath

M = TypeVar("M", bound=BaseModel)

_LONGEST_VALUE = 60
#: Where pydantic speaks of JSON, and a recipe's author thinks of YAML.
_IN_YAML = {
    "a valid boolean": "true or false",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "text in quotes",
    "a valid array": "a list",
    "an object": "a mapping (key: value)",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}

#: Missing keys whose value is known.
_TOLD = {"schema_version": "schema_version: 1"}


def validate_model(
    cls: type[M], data: Mapping[str, Any], doc: Document, path: KeyPath, prefix: str = "", *,
    noun: str = "key", other_keys: Iterable[str] = (), fallbacks: Mapping[str, Any] | None = None,
) -> M | None:  # fmt: skip
    """Return `data` as a `cls`, strictly: "yes" is no boolean and "3" no number; lists serve as tuples.

    Mistakes are reported at `path`, starting with `prefix`. The mistaken keys are then left out, or taken from
    `fallbacks`, so that later checks can go on; None where that gives no `cls` either. `other_keys` are known beside the
    fields.
    """
    try:
        return cls.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        # A list with a mistaken item also counts as short by that item.
        mistakes: list[Any] = [m for m in error.errors(include_url=False) if not _long_enough(m)]
    schema = cls.model_json_schema()
    typos = {(*m["loc"][:-1], closest(str(m["loc"][-1]), _keys(schema, m["loc"]))) for m in mistakes if _unknown(m)}
    for mistake in mistakes:
        loc = tuple(part for part in mistake["loc"] if part != "[key]")
        if mistake["type"] == "missing" and loc in typos:
            continue
        known = [*_keys(schema, mistake["loc"]), *(other_keys if len(loc) == 1 else ())] if _unknown(mistake) else []
        doc.report((*path, *loc), prefix + _said(mistake, loc, noun, known), key=_unknown(mistake))
    bad = {mistake["loc"][0] for mistake in mistakes if mistake["loc"]}
    rest = {**(fallbacks or {}), **{key: value for key, value in data.items() if key not in bad}}
    try:
        return cls.model_validate_json(json.dumps(rest), strict=True)
    except ValidationError:
        return None


def format_value(value: Any) -> str:
    """Return a value as a recipe would have it, shortened."""
    text = f"'{value}'" if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


def _said(mistake: Mapping[str, Any], loc: KeyPath, noun: str, known: Iterable[str]) -> str:
    """Return the message for a mistake; `known` are the keys that an unknown one may be meant for."""
    if _unknown(mistake):
        what = f"{noun} '{loc[-1]}'" if len(loc) == 1 else f"key '{loc[-1]}' in {_dotted(loc[:-1])}"
        return f"unknown {what}{nearest(str(loc[-1]), known)}"
    if mistake["type"] == "missing" and isinstance(loc[-1], str):
        return f"missing {noun} '{_dotted(loc)}'; add {_TOLD.get(_dotted(loc), 'it')}"
    return sentence(mistake, loc)


def sentence(mistake: Mapping[str, Any], loc: KeyPath) -> str:
    """Return pydantic's own sentence, after the key it is about."""
    name, said = _dotted(loc) or "options", mistake["msg"]
    if mistake["type"] == "value_error":
        return f"{name}: {mistake['ctx']['error']}"
    if mistake["type"] == "missing":  # of a fixed-length list; pydantic names each missing item
        return f"{_dotted(loc[:-1])} has too few items; got {format_value(mistake['input'])}"
    words = re.sub(r"^(Input|List|Tuple|String) should", "must", said.partition(" after validation")[0])
    for json_words, yaml_words in _IN_YAML.items():
        words = words.replace(json_words, yaml_words)
    return f"{name}{' ' if words.startswith('must') else ': '}{words}; got {format_value(mistake['input'])}"


def _long_enough(mistake: Mapping[str, Any]) -> bool:
    return bool(mistake["type"] == "too_short" and len(mistake["input"]) >= mistake["ctx"]["min_length"])


def _unknown(mistake: Mapping[str, Any]) -> bool:
    return bool(mistake["type"] == "extra_forbidden" or mistake["loc"][-1:] == ("[key]",))


def _dotted(loc: KeyPath) -> str:
    return ".".join(map(str, loc))


def _keys(schema: Mapping[str, Any], loc: KeyPath) -> list[str]:
    """The keys a JSON schema knows beside the unknown one at `loc`."""
    node: Any = schema
    for part in loc[:-2] if loc[-1] == "[key]" else loc[:-1]:
        node = node.get("items") or node.get("properties", {}).get(part) or node.get("additionalProperties") or {}
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    return list(node.get("properties") or node.get("propertyNames", {}).get("enum", []))
