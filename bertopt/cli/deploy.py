"""`bertopt deploy triton`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bertopt.cli.app import Directory, Key, Verbose, app, exit_codes

deploy = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Write an artefact in the layout that a serving system reads.")
app.add_typer(deploy, name="deploy")


@deploy.callback()
def _deploy() -> None:
    pass


@deploy.command()
def triton(
    directory: Directory,
    repository: Annotated[Path, typer.Argument(help="Triton's model repository.", metavar="REPOSITORY")],
    name: Annotated[str | None, typer.Option(help="The model's name; by default the directory's, or for OUT/artifact that of OUT.")] = None,
    max_batch: Annotated[int, typer.Option(help="Most texts of one request, and of the requests that Triton merges.")] = 256,
    graph: Annotated[bool, typer.Option("--graph", help="Also write NAME_graph, the graph alone for Triton's own backends; its inputs are token ids.")] = False,
    key: Key = None,
    verbose: Verbose = False,
) -> None:
    """Write a model for Triton. Its Python backend takes texts, and batches the requests that wait while it is busy."""
    with exit_codes(verbose):
        from bertopt.commands import deploy as command

        print(*command.triton(directory, repository, name, max_batch, graph, key), sep="\n")
