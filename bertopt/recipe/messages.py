"""pydantic's findings in the house's words: what was expected, what was got, what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from bertopt.recipe.yaml_document import Document, KeyPath, closest, nearest

M = TypeVar("M", bound=BaseModel)

#: pydantic tells `int_type` from `int_parsing` and `int_from_float`; a user need not.
_SUFFIX = re.compile(r"_(attributes_type|type|parsing_size|parsing|from_float)$")
_SHOWN = 60

_EXPECTED = {
    "bool": "must be true or false",
    "int": "must be a whole number",
    "float": "must be a number",
    "decimal": "must be a number",
    "finite_number": "must be a finite number",
    "string": "must be text",
    "tuple": "must be a list",
    "list": "must be a list",
    "dict": "must be a mapping (key: value)",
    "date": "must be a date such as 2026-12-31",
    "date_from_datetime": "must be a date such as 2026-12-31",
    "model": "must be a mapping (key: value)",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "too_short": "needs at least {min_length} item(s)",
    "too_long": "takes at most {max_length} item(s)",
    "string_too_short": "must have at least {min_length} character(s)",
    "string_too_long": "must have at most {max_length} character(s)",
    "string_pattern_mismatch": "must match {pattern}",
}


def build(
    cls: type[M],
    data: Mapping[str, Any],
    doc: Document,
    path: KeyPath,
    who: str = "",
    *,
    noun: str = "key",
    also: Iterable[str] = (),
    spare: Mapping[str, Any] | None = None,
) -> M | None:
    """`data` as a `cls`, strictly: "yes" is no boolean and "3" no number; lists serve as tuples.

    Mistakes are reported at `path`, starting with `who`. The mistaken keys are then left out, or taken from `spare`,
    so that later checks can go on; None where that gives no `cls` either. `also` are known keys beside the fields.
    """
    try:
        return cls.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        # A list with a mistaken item also counts as short by that item.
        found: list[Any] = [m for m in error.errors(include_url=False) if not _long_enough(m)]
    schema = cls.model_json_schema()
    typos = {(*m["loc"][:-1], closest(str(m["loc"][-1]), _keys(schema, m["loc"]))) for m in found if _unknown(m)}
    for mistake in found:
        loc = tuple(part for part in mistake["loc"] if part != "[key]")
        if _unknown(mistake):
            known = [*_keys(schema, mistake["loc"]), *(also if len(loc) == 1 else ())]
            inside = f" in {_dotted(loc[:-1])}" if len(loc) > 1 else ""
            kind = noun if len(loc) == 1 else "key"
            message = f"{who}unknown {kind} '{loc[-1]}'{inside}{nearest(str(loc[-1]), known)}"
            doc.report((*path, *loc), message, key=True)
        elif mistake["type"] == "missing" and isinstance(loc[-1], str):
            if loc not in typos:
                doc.report((*path, *loc), f"{who}missing {noun} '{_dotted(loc)}'; add it")
        else:
            doc.report((*path, *loc), who + explain(mistake, loc))
    bad = {mistake["loc"][0] for mistake in found if mistake["loc"]}
    rest = {**(spare or {}), **{key: value for key, value in data.items() if key not in bad}}
    try:
        return cls.model_validate_json(json.dumps(rest), strict=True)
    except ValidationError:
        return None


def explain(mistake: Mapping[str, Any], loc: KeyPath) -> str:
    """One finding, named by its dotted `loc`."""
    kind, got, context = mistake["type"], mistake["input"], mistake.get("ctx", {})
    name = _dotted(loc) or "options"
    if kind == "value_error":
        return f"{name}: {context['error']}"
    if kind == "missing":  # of a fixed-length list; pydantic names each missing item
        return f"{_dotted(loc[:-1])} has too few items; got {shown(got)}"
    if kind == "literal_error":
        values = re.sub(r" or (?=[^ ]+$)", ", ", context["expected"])
        return f"{name} must be {'one of ' if ', ' in values else ''}{values}; got {shown(got)}"
    words = _EXPECTED.get(kind) or _EXPECTED.get(_SUFFIX.sub("", kind))
    if words is None:
        return f"{name}: {mistake['msg'][:1].lower()}{mistake['msg'][1:]}; got {shown(got)}"
    hint = ""
    if words in (_EXPECTED["int"], _EXPECTED["float"]) and isinstance(got, str) and re.fullmatch(r"-?\d+(\.\d+)?", got):
        hint = "; leave out the quotes"
    if words == _EXPECTED["string"] and isinstance(got, bool | int | float):
        hint = "; put it in quotes"
    return f"{name} {words.format(**context)}; got {shown(got)}{hint}"


def shown(value: Any) -> str:
    """A value as a recipe would have it, shortened."""
    text = f"'{value}'" if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


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
