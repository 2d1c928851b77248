"""Show a `Report` in Jupyter. IPython's display hook is installed here, so that `results` needs no display code."""

from __future__ import annotations

import sys
from typing import Any


def register() -> None:
    """Tell a running IPython how to show a `Report`. Does nothing outside IPython."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return
    from bertopt.report import html, terminal

    formatters = shell.display_formatter.formatters
    formatters["text/html"].for_type_by_name("bertopt.results", "Report", html.fragment)
    formatters["text/markdown"].for_type_by_name("bertopt.results", "Report", terminal.markdown)
