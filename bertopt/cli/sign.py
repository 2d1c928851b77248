"""`bertopt sign`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bertopt.cli.app import Directory, Verbose, app, exit_codes


@app.command()
def sign(
    directory: Directory,
    key: Annotated[Path, typer.Option(help="The private ed25519 key, a PEM file.", metavar="FILE")],
    new_key: Annotated[
        bool, typer.Option("--new-key", help="First make a new key in FILE, and its public key in FILE.pub, for `verify --key`.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Sign an artefact. Its files are verified first; `verify --key` and `bertopt.load(key=...)` then show that it is yours."""
    with exit_codes(verbose):
        from bertopt import stages
        from bertopt.stages import signature

        if new_key:
            stages.verify(directory)
            signature.new_key(key)
            print(f"{key}.pub is the public key; keep {key} secret")
        print(stages.sign(directory, key))
