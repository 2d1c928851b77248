"""`python -m bertopt.cli`."""

from bertopt.cli import main

main()
