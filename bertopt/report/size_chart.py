"""The chart of size: bytes on disk and the peaks of memory."""

from __future__ import annotations

from bertopt.report import formatting
from bertopt.report.svg import WIDTH, Svg
from bertopt.results import Report, Stage

_LEFT, _ROW = 250, 28


def size(report: Report, alone: bool = False) -> str | None:
    """Draw bytes on disk and the peaks of memory, each on its own scale from 0."""
    rows = [(tree, stage, _bytes(stage)) for tree, stage in formatting.tree_order(report.stages) if any(_bytes(stage).values())]
    heads = [key for key in ("size", "peak memory", "GPU memory") if any(sizes[key] for _, _, sizes in rows)]
    if not heads:
        return None
    largest = {key: max(sizes[key] or 0 for _, _, sizes in rows) for key in heads}
    svg = Svg(WIDTH, "Size and memory of each stage")
    column = (WIDTH - _LEFT) / len(heads)
    svg.heads((0, "stage"), *((_LEFT + i * column, f"{key}, MB") for i, key in enumerate(heads)))
    y = 24.0
    for tree, stage, sizes in rows:
        svg.branch(tree, stage.name, y + 17, 240, stage.status == "failed")
        best = report.delivers(stage)
        for i, key in enumerate(heads):
            x, value = _LEFT + i * column, sizes[key]
            if value is None:
                svg.text(x, y + 17, formatting.NONE, "soft")
                continue
            end = x + (column - 90) * value / largest[key]
            svg.rect(x, end, y + 6, 14, "best" if best else "base" if stage.pass_ is None else "plain")
            svg.text(end + 8, y + 17, formatting.megabytes(value), "strong" if best else "")
        y += _ROW
    return svg.finish(y + 4, alone)


def _bytes(stage: Stage) -> dict[str, int | None]:
    return {"size": stage.size_bytes, "peak memory": stage.peak_rss_bytes, "GPU memory": stage.peak_gpu_bytes}
