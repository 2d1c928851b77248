"""`python -m bertopt`: the same program as `bertopt`."""

from bertopt.cli import main

main()
