"""`python -m bertopt.export RECIPE`: the same program as `bertopt export RECIPE`. `bertopt.run` runs a recipe in Python."""

from __future__ import annotations

import sys

from bertopt.commands.export import run  # noqa: F401  (its home until 0.1)

if __name__ == "__main__":
    from bertopt.cli import main

    main(["export", *sys.argv[1:]])
