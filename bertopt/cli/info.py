"""`bertopt inspect`, `passes`, `recipes`, `schema`: what there is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bertopt.cli.app import Directory, Json, Verbose, app, exit_codes
from bertopt.errors import UsageError

if TYPE_CHECKING:
    from bertopt.stages import Manifest


@app.command()
def inspect(directory: Directory, json_: Json = False, verbose: Verbose = False) -> None:
    """Show what an artefact is. Prints form, passes, checks and files; loads nothing."""
    with exit_codes(verbose):
        from bertopt.stages import read_manifest

        manifest = read_manifest(directory)
        if json_:
            print(manifest.model_dump_json(exclude_none=True))
            return
        for line in _summary(manifest):
            print(line)


@app.command()
def passes(
    name: Annotated[str | None, typer.Argument(help="Show this pass's options.", metavar="NAME")] = None,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """List the passes, or one pass's options."""
    with exit_codes(verbose):
        from bertopt.passes import all_passes

        found = all_passes()
        if name is not None and name not in found:
            from bertopt.recipe.suggest import nearest

            raise UsageError(f"no pass '{name}'{nearest(name, found)}")
        if json_:
            print(json.dumps({key: _options(cls) for key, cls in found.items() if name in (None, key)}))
            return
        for key, cls in found.items():
            if name in (None, key):
                takes, gives = (form.__name__ for form in cls.forms())
                described = (cls.__doc__ or "").strip()
                print(f"{key}  ({takes} → {gives})")
                print("  " + (described if name else described.partition("\n")[0]))
                for option in _options(cls) if name else ():
                    print(f"  {option['name']}: {option['type']} = {json.dumps(option['default'])}\n      {option['description']}")


@app.command()
def recipes(json_: Json = False, verbose: Verbose = False) -> None:
    """List the recipes that ship with bertopt. `bertopt export NAME --set model=…` runs one."""
    with exit_codes(verbose):
        from bertopt.commands.recipes import shipped

        rows = shipped()
        if json_:
            print(json.dumps([row.model_dump() for row in rows]))
            return
        width = max(len(row.name) for row in rows)
        for row in rows:
            print(f"{row.name:<{width}}  {row.summary}")


@app.command()
def schema() -> None:
    """Print the JSON schema of recipes. Editors use it to complete and to check."""
    from bertopt.recipe.schema import recipe_schema

    print(json.dumps(recipe_schema(), indent=2))


def _options(cls: Any) -> list[dict[str, Any]]:
    properties = cls.model_json_schema().get("properties", {})
    return [
        {"name": key, "type": _type(prop), "default": prop.get("default"), "description": prop.get("description", "")}
        for key, prop in properties.items()
        if not prop.get("description", "").startswith("old name of")
    ]


def _type(prop: dict[str, Any]) -> str:
    """Return `f32 | bf16`, `number | null` or `array` for a property of a JSON schema."""
    if "anyOf" in prop:
        return " | ".join(map(_type, prop["anyOf"]))
    return " | ".join(map(str, prop["enum"])) if "enum" in prop else str(prop.get("type", "object"))


def _summary(manifest: Manifest) -> Iterator[str]:
    from bertopt.report.formatting import QUICK, is_quick, margin
    from bertopt.results import Latency, Margin
    from bertopt.stages.model_card import opened_by

    spec = manifest.spec
    yield f"form: {manifest.form}, {manifest.precision}, for {manifest.device}"
    yield opened_by(manifest.form, spec)
    yield f"model: {spec.family}, {spec.task}, {spec.parameters:,} parameters, {spec.layers} layers, texts up to {spec.text_length} tokens"
    yield f"passes: {' → '.join(entry.name for entry in manifest.passes) or 'none'}"
    gates = manifest.gates or {}
    if gates.get("parity"):
        worst = gates["parity"]["worst"]
        yield f"parity: {worst['metric']} {worst['value']:.6g} (limit {worst['limit']:g}) at {worst['where']}"
    if gates.get("nearest"):
        found = Margin.model_validate(gates["nearest"])
        yield f"nearest to its limit: {margin(found)}" + (f" ({found.where})" if found.where else "")
    for fields in gates.get("latency") or []:
        case = Latency.model_validate(fields)
        yield f"latency, {case.what}: {case.p50_ms:.2f} ms" + (f", {case.vs_reference.brief()}" if case.vs_reference else "")
    if is_quick(manifest.recipe or {}):
        yield f"timing is {QUICK}"
    for name, entry in manifest.files.items():
        yield f"{entry.size:>12,}  {name}"
