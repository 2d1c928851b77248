"""`bertopt init`: a recipe to start from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from bertopt.cli.app import Verbose, app, exit_codes
from bertopt.cli.optimize import KeepOption, Model, Revision, TargetOption, TextsOption


@app.command()
def init(
    model: Model,
    out: Annotated[Path, typer.Option(help="The recipe to write; must not exist.", metavar="FILE")] = Path("recipe.yaml"),
    target: TargetOption = "auto",
    keep: KeepOption = "fast",
    texts: TextsOption = None,
    revision: Revision = None,
    verbose: Verbose = False,
) -> None:
    """Write a commented recipe for a model. It does what `bertopt optimize` would do; change it and run it."""
    with exit_codes(verbose):
        from bertopt.commands.init import init as write

        path = write(model, out, target, keep, texts, revision)
        print(path)
        print(f"run it with: bertopt export {path}", file=sys.stderr)
