"""`bertopt deploy triton`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

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
    aggregation_strategy: Annotated[
        Literal["none", "simple", "first", "average", "max"],
        typer.Option(help="Other than none: entities, not a label for each token, as transformers' pipeline gives them."),
    ] = "none",
    stride: Annotated[int | None, typer.Option(help="Do not cut off long contexts of questions, or long texts of entities: split them into windows that share this many tokens.")] = None,
    key: Key = None,
    verbose: Verbose = False,
) -> None:
    """Write a model for Triton. Its Python backend takes texts, and batches the requests that wait while it is busy."""
    with exit_codes(verbose):
        from bertopt.commands import deploy as command
        from bertopt.runtime.answer_options import AnswerOptions

        how = AnswerOptions(aggregation_strategy=aggregation_strategy, stride=stride)
        print(*command.triton(directory, repository, name, max_batch, graph, key, how), sep="\n")
