"""The report's pictures by name, for the page and as files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from bertopt.errors import UsageError, missing_library
from bertopt.report.parity_chart import parity
from bertopt.report.size_chart import size
from bertopt.report.waterfall import latency
from bertopt.results import Report

FORMATS = ("svg", "png")
#: Each returns an SVG, or None where the report has no figures for it; with True a file that needs no page around it.
PICTURES: dict[str, Callable[[Report, bool], str | None]] = {"latency": latency, "parity": parity, "size": size}


def save(report: Report, directory: Path, formats: Sequence[str] = ("svg",)) -> list[Path]:
    """Write each picture that has figures, in every format, and return the paths.

    Raises UsageError for an unknown format or where nothing was measured, Unsupported where PNG lacks its package.
    """
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not formats:
        raise UsageError(f"pictures are {' or '.join(FORMATS)}; got {', '.join(unknown) or 'no format'}")
    drawn = {name: draw(report, True) for name, draw in PICTURES.items()}
    pictures = {name: text for name, text in drawn.items() if text is not None}
    if not pictures:
        raise UsageError("the report has no stage with latency, parity or size; there is nothing to draw")
    files = {f"{name}.{kind}": _as(kind, text) for name, text in pictures.items() for kind in formats}
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return [directory / name for name in files]


def _as(kind: str, text: str) -> bytes:
    if kind == "svg":
        return text.encode("utf-8", "backslashreplace")
    try:
        import resvg_py
    except ImportError as error:
        raise missing_library("PNG pictures need resvg-py", "'bertopt[pictures]'", "write SVG, which needs nothing", failed=error) from error
    return bytes(resvg_py.svg_to_bytes(svg_string=text, zoom=2))
