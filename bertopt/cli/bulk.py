"""`bertopt bulk`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from bertopt.cli.app import Key, Verbose, app, exit_codes


@app.command()
def bulk(
    source: Annotated[Path, typer.Argument(help="Texts: .jsonl, .csv, .txt (one a line), each also in gzip (.jsonl.gz), or .parquet.", metavar="IN")],
    out: Annotated[Path, typer.Argument(help="Directory for the parts, OUT/part-00000.jsonl and so on; parts of .csv and .parquet are such files.", metavar="OUT")],
    artifact: Annotated[Path, typer.Option(help="The artefact to run.", metavar="DIR")],
    column: Annotated[str, typer.Option(help="The column of texts.")] = "text",
    pair: Annotated[str | None, typer.Option(help="The column of second texts, for pairs; by default text_pair, if the rows have it and the model takes pairs.")] = None,
    prompt_name: Annotated[str | None, typer.Option(help="Name of the model's prompt to put before every text.")] = None,
    aggregation_strategy: Annotated[
        Literal["none", "simple", "first", "average", "max"],
        typer.Option(help="Other than none: entities, not a label for each token, as transformers' pipeline gives them."),
    ] = "none",
    stride: Annotated[int | None, typer.Option(help="Do not cut off long contexts of questions, or long texts of entities: split them into windows that share this many tokens.")] = None,
    part_rows: Annotated[int, typer.Option(help="Rows in each part; finished parts are not computed again.")] = 10_000,
    threads: Annotated[int | None, typer.Option(help="Threads; by default as many as the cores and the CPU quota allow, or one for each actor.")] = None,
    actors: Annotated[int, typer.Option(help="Number of Ray actors; 0 uses this process alone. Needs bertopt[ray].", min=0)] = 0,
    key: Key = None,
    verbose: Verbose = False,
) -> None:
    """Run a whole file of texts. Writes each row with its embedding or answer, and continues an interrupted call where it stopped."""
    with exit_codes(verbose, resumes=True):
        from bertopt.commands.bulk import bulk as run
        from bertopt.runtime.answer_options import AnswerOptions

        def shown(rows: int) -> None:
            if sys.stderr.isatty():
                print(f"{rows:,} rows", end="\r", file=sys.stderr, flush=True)

        options = AnswerOptions(aggregation_strategy=aggregation_strategy, prompt_name=prompt_name, stride=stride)
        done = run(source, out, artifact, column, pair, part_rows, threads, shown, actors, options, key)
        cut = f"; longer than the model takes, and cut off: {done.truncated:,}" if done.truncated else ""
        print(f"{done.rows} {'row' if done.rows == 1 else 'rows'} in {out}{cut}")
