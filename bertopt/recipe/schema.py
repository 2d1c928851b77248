"""JSON schema of a recipe, for editors: completion, descriptions and mistakes while typing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bertopt import passes
from bertopt.core import Pass
from bertopt.recipe.parser import RecipeFields, StepKeys
from bertopt.recipe.steps import REFERENCE, STEP_NAME

#: JSON schema searches where Python's `match` anchors.
_NAME = "^" + STEP_NAME.pattern.replace(r"\Z", "$")
FILE = Path(__file__).parents[1] / "recipe.schema.json"


def recipe_schema(known: Mapping[str, type[Pass[Any, Any]]] | None = None) -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a recipe over the passes in `known`, by default every registered one."""
    classes = passes.all_passes() if known is None else known
    head, keys = RecipeFields.model_json_schema(), StepKeys.model_json_schema()
    defs = head.pop("$defs") | keys.pop("$defs", {})
    reserved: dict[str, Any] = {
        "pass": {"enum": list(classes), "description": "the pass to apply"},
        "name": {"type": "string", "pattern": _NAME, "description": "name of the step; default: the pass's name"},
        "after": {"type": "string", "description": f"step to start from, or '{REFERENCE}'; default: the previous step"},
        **keys["properties"],
    }
    branches = []
    for name, cls in classes.items():
        options = cls.model_json_schema(ref_template=f"#/$defs/{name}.{{model}}")
        defs |= {f"{name}.{model}": schema for model, schema in options.pop("$defs", {}).items()}
        properties = {**dict.fromkeys(reserved, True), **options.get("properties", {})}
        then = {
            "description": _summary(cls), "properties": properties, "required": options.get("required", []),
            "additionalProperties": False,
        }  # fmt: skip
        branches.append({"if": {"properties": {"pass": {"const": name}}, "required": ["pass"]}, "then": then})
    step = {"type": "object", "properties": reserved, "required": ["pass"], "allOf": branches}
    steps = "the passes, each from the previous step or `after`"
    head["properties"]["steps"] = {"type": "array", "minItems": 1, "items": step, "description": steps}
    head["required"].append("steps")
    head["description"] = "What bertopt does to a checkpoint, and what it delivers."
    schema: dict[str, Any] = _untitled({**head, "$defs": defs})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "bertopt recipe", **schema}


def write() -> None:
    """Write the schema of the built-in passes, which recipes refer to, beside this module."""
    built_in = {name: cls for name, cls in passes.all_passes().items() if cls.__module__.startswith("bertopt.")}
    FILE.write_text(json.dumps(recipe_schema(built_in), indent=2, ensure_ascii=False) + "\n", "utf-8")


def _summary(cls: type[Pass[Any, Any]]) -> str:
    return " ".join((cls.__doc__ or cls.name()).split("\n\n")[0].split())


def _untitled(node: Any) -> Any:
    """Without pydantic's titles, which only repeat the keys."""
    if isinstance(node, dict):
        return {key: _untitled(value) for key, value in node.items() if not (key == "title" and isinstance(value, str))}
    return [_untitled(item) for item in node] if isinstance(node, list) else node


if __name__ == "__main__":
    write()
