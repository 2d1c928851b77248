"""Sphinx extension: write one page for each built-in pass, from its docstring and options, before the build.

The pages go to docs/passes/ and are not committed. Nothing heavy is imported: a pass class needs only pydantic.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

from bertopt import passes
from bertopt.core import Pass

FOLDER = Path(__file__).parent / "passes"


def built_in() -> list[type[Pass[Any, Any]]]:
    """Return the pass classes that bertopt ships."""
    named = (getattr(passes, name) for name in passes.__all__)
    return [cls for cls in named if inspect.isclass(cls) and issubclass(cls, Pass)]


def page(cls: type[Pass[Any, Any]]) -> str:
    """Return a pass's page: its forms, its docstring, its options, and the step to write in a recipe."""
    takes, gives = (form.__name__ for form in cls.forms())
    name = cls.name()
    lines = [f"# {name}", "", f"`{takes}` → `{gives}`", "", inspect.getdoc(cls) or "", "", "## Options", ""]
    schema = cls.model_json_schema()
    options = {key: field for key, field in schema.get("properties", {}).items() if not field.get("deprecated")}
    if options:
        lines += ["| option | type | default | meaning |", "| :-- | :-- | :-- | :-- |"]
        for option, described in options.items():
            default = f"`{json.dumps(described['default'])}`" if "default" in described else "required"
            cells = (f"`{option}`", f"`{_type(described, schema)}`", default, described.get("description", ""))
            lines.append(f"| {' | '.join(_escaped(cell) for cell in cells)} |")
    else:
        lines.append("None.")
    lines += ["", "## In a recipe", "", "```yaml", f"- pass: {name}"]
    for option, described in options.items():
        if "default" not in described:
            lines.append(f"  {option}: …")
    return "\n".join([*lines, "```", ""])


def _type(schema: dict[str, Any], root: dict[str, Any]) -> str:
    """Return a JSON schema's type in words: `float32 | float16`, `list of integer`, `number | null`."""
    if "$ref" in schema:
        return _type(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    for union in ("anyOf", "oneOf", "allOf"):
        if union in schema:
            return " | ".join(_type(part, root) for part in schema[union])
    if schema.get("type") == "array":
        items = schema.get("items") or schema.get("prefixItems", [{}])[0]
        return f"list of {_type(items, root)}" if items else "list"
    if schema.get("type") == "object" and schema.get("properties"):
        return "{" + ", ".join(schema["properties"]) + "}"
    return str(schema.get("type", "any"))


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def write(folder: Path = FOLDER) -> None:
    """Write every page that changed, so that Sphinx builds only those again, and remove those of other passes."""
    texts = {f"{cls.name()}.md": page(cls) for cls in built_in()}
    for name, text in texts.items():
        path = folder / name
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
    for path in folder.glob("*.md"):
        if path.name not in (*texts, "index.md"):
            path.unlink()


def setup(app: Any) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("builder-inited", lambda _: write())
    return {"parallel_read_safe": True, "parallel_write_safe": True}
