"""Sphinx configuration. `make docs` builds the pages to out/docs; warnings are errors."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from bertopt import __version__  # noqa: E402

project = "bertopt"
author = "the bertopt authors"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "generate_passes"]
html_theme = "furo"
html_title = f"bertopt {version}"
root_doc = "index"
exclude_patterns = ["_build"]
#: Docstrings write code in single backticks.
default_role = "code"
nitpicky = False
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
#: Files of the repository that pages link to are copied beside the pages.
suppress_warnings: list[str] = []
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
