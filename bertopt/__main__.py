"""`python -m bertopt`, and the script `bertopt`: the same program."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point. An interrupt during the imports ends it without a traceback, too."""
    try:
        from bertopt.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
