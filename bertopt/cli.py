"""The command line: parses, calls, prints. Results on stdout, progress on stderr."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from bertopt import __version__
from bertopt.errors import BertoptError, UsageError, WorkerCrashed

app = typer.Typer(
    name="bertopt", no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
    help="Take a BERT-family checkpoint to the fastest artefact that is provably still the same model.",
)  # fmt: skip

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show tracebacks.")]
Directory = Annotated[Path, typer.Argument(help="An artefact or stage directory.", metavar="DIR")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"bertopt {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def export(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.", metavar="RECIPE")],
    out: Annotated[Path | None, typer.Option(help="Where everything goes; default out/<recipe's name>.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="K=V", help="Override a key: steps.1.dtype=float16. Repeatable."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the recipe and print its steps; load nothing.")
    ] = False,
    build_only: Annotated[
        bool, typer.Option("--build-only", help="Accept a stage that this machine can build but not run.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget the stages of earlier runs.")] = False,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Carry out a recipe: build, check and deliver."""
    with _exit_codes(verbose):
        if dry_run:
            _dry_run(recipe, set_ or (), json_)
            return
        from bertopt.export import run

        report = run(recipe, out, set_ or (), build_only, fresh, progress=True)
        if json_:
            print(report.model_dump_json(by_alias=True))
        else:
            _table(report)
        for warning in report.model.get("warnings", ()):
            print(f"warning: {warning}", file=sys.stderr)
        where = out or Path("out") / recipe.stem
        if report.delivered:
            print(
                f"{where / report.delivered.path} holds '{report.delivered.stage}'; report: {where / 'report.html'}",
                file=sys.stderr,
            )
        if report.exit_code == 1:
            print(*(row.facts["log"] for row in report.stages if "log" in row.facts), sep="\n", file=sys.stderr)
        if report.exit_code:
            print(report.reason, file=sys.stderr)
        raise typer.Exit(report.exit_code)


@app.command()
def verify(
    directory: Directory,
    against: Annotated[
        str | None,
        typer.Option(help="The checkpoint to compare with: hub id, directory or pkg://.", metavar="CHECKPOINT"),
    ] = None,
    texts: Annotated[Path | None, typer.Option(help=".txt or .jsonl texts to compare on, besides the grid.")] = None,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Re-check an artefact here: files and environment, and against its checkpoint parity and latency."""
    with _exit_codes(verbose):
        from bertopt.verify import verify as check

        found = check(directory, against, texts)
        if json_:
            print(found.model_dump_json(by_alias=True))
        elif found.stages:
            _table(found)
        for warning in found.model.get("warnings", []):
            print(f"warning: {warning}", file=sys.stderr)
        print(found.reason, file=sys.stderr if found.exit_code or json_ else sys.stdout)
        raise typer.Exit(found.exit_code)


@app.command()
def inspect(directory: Directory, json_: Json = False, verbose: Verbose = False) -> None:
    """Show what an artefact is: form, passes, gates, files. Loads nothing."""
    with _exit_codes(verbose):
        import json

        from bertopt.stage import read_manifest

        manifest = read_manifest(directory)
        if json_:
            print(json.dumps(manifest))
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
    with _exit_codes(verbose):
        from bertopt.passes import known

        found = known()
        if name is not None and name not in found:
            import difflib

            near = difflib.get_close_matches(name, found, 1)
            raise UsageError(
                f"no pass '{name}'" + (f"; did you mean '{near[0]}'?" if near else f"; there are {', '.join(found)}")
            )
        if json_:
            import json

            print(json.dumps({key: _options(cls) for key, cls in found.items() if name in (None, key)}))
            return
        for key, cls in found.items():
            if name in (None, key):
                takes, gives = (form.__name__ for form in cls.forms())
                print(f"{key}  ({takes} → {gives})")
                print(f"  {(cls.__doc__ or '').strip() if name else (cls.__doc__ or '').strip().splitlines()[0]}")
                for option in _options(cls) if name else ():
                    print(f"  {option['name']}: {option['type']} = {option['default']}\n      {option['description']}")


@app.command()
def schema() -> None:
    """Print the JSON schema of a recipe, for editors."""
    import json

    from bertopt.schema import recipe_schema

    print(json.dumps(recipe_schema(), indent=2))


@app.command()
def doctor(json_: Json = False, verbose: Verbose = False) -> None:
    """Show what this machine has, and what each extra would add."""
    with _exit_codes(verbose):
        import json

        from bertopt import environment

        found = environment.describe()
        if json_:
            print(json.dumps(found))
            return
        for key, value in found.items():
            if key != "packages":
                print(f"{key}: {', '.join(value) if isinstance(value, list) else value}")
        for package, remedy in environment.OPTIONAL.items():
            have = found["packages"].get(package)
            print(f"{package}: {have or f'missing; {remedy}'}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `bertopt`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    app(args=list(arguments) if arguments is not None else None, prog_name="bertopt")


@contextlib.contextmanager
def _exit_codes(verbose: bool) -> Iterator[None]:
    """Errors become one clear last line and the right exit code; a traceback only for exit 1 or with -v."""
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted; finished stages are kept, run again to go on", file=sys.stderr)
        raise typer.Exit(130) from None
    except BertoptError as error:
        if verbose:
            import traceback

            traceback.print_exc()
        if isinstance(error, WorkerCrashed) and error.log:
            print(error.log, file=sys.stderr)
        print(error, file=sys.stderr)
        raise typer.Exit(error.exit_code) from None


def _dry_run(recipe: Path, overrides: Sequence[str], as_json: bool) -> None:
    import json

    from bertopt.recipe import load

    checked = load(recipe, overrides)
    if as_json:
        print(json.dumps(checked.resolved()))
        return
    print(f"{recipe}: {checked.model} ({checked.task}) on {checked.device}")
    for step in checked.steps:
        takes, gives = (form.__name__ for form in step.pass_.forms())
        options = ", ".join(
            f"{key}={value}" for key, value in step.pass_.model_dump(mode="json", exclude_defaults=True).items()
        )
        print(f"  {step.name}: {step.pass_.name()}({options}) after {step.after or 'reference'}, {takes} → {gives}")
    print(f"  deliver: {checked.deliver}")


def _table(report: Any) -> None:
    from bertopt.report.table import console, render

    console().print(render(report))


def _options(cls: Any) -> list[dict[str, Any]]:
    properties = cls.model_json_schema().get("properties", {})
    return [
        {
            "name": key,
            "type": " | ".join(map(str, prop["enum"])) if "enum" in prop else str(prop.get("type", "object")),
            "default": prop.get("default"),
            "description": prop.get("description", ""),
        }
        for key, prop in properties.items()
    ]


def _summary(manifest: dict[str, Any]) -> Iterator[str]:
    spec = manifest["spec"]
    yield f"form: {manifest['form']}, {manifest['precision']}, for {manifest['device']}"
    yield f"model: {spec['family']}, {spec['task']}, {spec['parameters']:,} parameters, {spec['layers']} layers, texts up to {spec['text_length']} tokens"
    yield f"passes: {' → '.join(entry['name'] for entry in manifest['passes']) or 'none'}"
    gates = manifest.get("gates") or {}
    if gates.get("parity"):
        worst = gates["parity"]["worst"]
        yield f"parity: {worst['metric']} {worst['value']:.6g} (limit {worst['limit']:g}) at {worst['where']}"
    for case in gates.get("latency") or []:
        versus = case["vs_reference"]
        what = "mix" if case["kind"] == "mix" else f"{case['batch']} × {case['sequence']}"
        yield f"latency, {what}: {case['p50_ms']:.2f} ms" + (
            f", {versus['verdict']} {versus['ratio']:.2f}x" if versus else ""
        )
    for name, entry in manifest["files"].items():
        yield f"{entry['size']:>12,}  {name}"


if __name__ == "__main__":
    main()
