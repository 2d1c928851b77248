"""`bertopt optimize`: the main job in one command."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from bertopt.cli.app import Json, Quick, Verbose, app, exit_codes
from bertopt.cli.export import show, watched

Model = Annotated[
    str, typer.Argument(help="The checkpoint: hub id, directory or pkg://package/path.", metavar="MODEL")
]
KeepOption = Annotated[
    Literal["exact", "near-lossless", "fast"],
    typer.Option(help="How close to the checkpoint, on a CPU: exact, float32 to 1e-4; near-lossless, bfloat16 to a mean cosine of 0.9999; fast, INT8 within its limits."),
]
TargetOption = Annotated[
    Literal["auto", "cpu", "gpu"], typer.Option(help="auto: the GPU if there is one with its runtime installed, else the CPU.")
]
TextsOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help=".txt or .jsonl texts of yours: speed and INT8 ranges are measured on them.")
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model; by default the hub's own.")]
Task = Annotated[str, typer.Option(help="If the checkpoint does not tell: feature-extraction, text-classification, token-classification, question-answering or fill-mask.")]


@app.command()
def optimize(
    model: Model,
    target: TargetOption = "auto",
    keep: KeepOption = "fast",
    texts: TextsOption = None,
    out: Annotated[Path | None, typer.Option(help="Output directory; default out/<model's name>.")] = None,
    revision: Revision = None,
    task: Task = "auto",
    portable: Annotated[
        bool, typer.Option("--portable", help="Deliver an artefact that sentence-transformers and optimum open too.")
    ] = False,
    quick: Quick = False,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Optimise a model for this machine. Chooses a recipe, tries its variants, delivers the fastest that passes."""
    with exit_codes(verbose, resumes=True):
        from bertopt.commands.export import run
        from bertopt.commands.optimize import plan

        chosen = plan(model, target, keep, texts, out, task, portable, quick, revision)
        for note in (*chosen.notes, f"recipe: {chosen.name}; output: {chosen.out}"):
            print(note, file=sys.stderr)
        if quick:
            print("timing is short (--quick): small differences may be INCONCLUSIVE", file=sys.stderr)
        report = watched(lambda listen: run(chosen.recipe, chosen.out, progress=True, listen=listen), chosen.out)
        show(report, chosen.out, json_, verbose)
        if report.delivered and not json_:
            _next_steps(chosen.out / report.delivered.path, model, portable)
        raise typer.Exit(report.exit_code)


def _next_steps(artifact: Path, model: str, portable: bool) -> None:
    from bertopt.stages import read_manifest
    from bertopt.stages.model_card import BACKENDS, example, loader, opened_by

    manifest = read_manifest(artifact)
    spec = manifest.spec
    lines = [
        ("use it in Python", f'import bertopt; predict = bertopt.load("{artifact}"); predict({example(spec, artifact)})'),
        ("check it where it runs", shlex.join(["bertopt", "verify", str(artifact), "--against", model])),
        ("look at the figures", str(artifact.parent / "report.html")),
    ]
    if portable and spec.pooling and (backend := BACKENDS.get(manifest.form)):
        lines.insert(1, ("or with sentence-transformers", f'{loader(spec)}("{artifact}", backend="{backend}")'))
    print("\nNext:")
    for what, how in lines:
        print(f"  {what + ':':<31}{how}")
    print(opened_by(manifest.form, spec))
