"""`bertopt push`."""

from __future__ import annotations

from typing import Annotated

import typer

from bertopt.cli.app import Directory, Verbose, app, exit_codes


@app.command()
def push(
    directory: Directory,
    repository: Annotated[str, typer.Argument(help="Where it goes on the hub: org/name.", metavar="ORG/NAME")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to write to.")] = None,
    message: Annotated[str | None, typer.Option(help="Commit message.")] = None,
    verbose: Verbose = False,
) -> None:
    """Upload an artefact to the Hugging Face hub. Its files are verified first."""
    with exit_codes(verbose):
        from bertopt.commands.push import push as upload

        print(upload(directory, repository, private, revision, message))
