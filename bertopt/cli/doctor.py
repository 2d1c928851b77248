"""`bertopt doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from bertopt.cli.app import Json, Verbose, app, exit_codes


@app.command()
def doctor(
    recipe: Annotated[
        Path | None, typer.Argument(help="Check what this recipe needs: a file or a shipped recipe.", metavar="RECIPE")
    ] = None,
    target: Annotated[Literal["cpu", "gpu"] | None, typer.Option(help="Check what this target needs.")] = None,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Find what is wrong with this machine. Says what each problem stops, and the command that corrects it.

    Exit 4 if the given recipe or target cannot run here.
    """
    with exit_codes(verbose):
        from bertopt.commands.doctor import asked_recipe, diagnose
        from bertopt.system import environment, machine

        asked = asked_recipe(recipe, target)
        described = environment.describe()
        diagnosis = diagnose(machine.read(), asked)
        verdict = diagnosis.verdict(f"'{recipe}'" if recipe else f"target {target}" if target else None)
        if json_:
            import json

            print(json.dumps(described | diagnosis.model_dump() | {"verdict": verdict}))
            raise typer.Exit(diagnosis.exit_code)
        names = {"isa": "instruction sets", "memory_gib": "memory, GiB"}
        for key, value in described.items():
            if key != "packages":
                print(f"{names.get(key, key)}: {', '.join(value) if isinstance(value, list) else value}")
        print(f"installed: {', '.join(' '.join(package) for package in described['packages'].items())}")
        missing = [name for name in environment.OPTIONAL if name not in described["packages"]]
        print(f"not installed: {', '.join(missing)}" if missing else "every optional package is installed")
        if extras := environment.missing_extras():
            print(f"extras not installed: {', '.join(extras)}; pip install 'bertopt[EXTRA]'")
        for finding in diagnosis.findings:
            print(f"{'error' if finding.blocks else 'warning'}: {finding}")
        print(verdict)
        raise typer.Exit(diagnosis.exit_code)
