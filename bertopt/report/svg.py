"""Draw one SVG: escaped text, bars, whiskers and axes, styled by the classes in `charts.css`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from bertopt.report import formatting

#: Natural width of a chart [CSS px]; where the page is narrower it scrolls in its box.
WIDTH = 1160
_HERE = Path(__file__).parent
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
#: Width of a character of a bold name over the font's size, a little more than sans-serif fonts take.
_CHARACTER = 0.66


class Svg:
    """A drawing that grows downwards. Coordinates are CSS pixels at its natural width."""

    def __init__(self, width: int, label: str) -> None:
        self.width, self.label = width, label
        self._parts: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "", end: bool = False, middle: bool = False) -> None:
        anchor = ' text-anchor="end"' if end else ' text-anchor="middle"' if middle else ""
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}"{_class(kind)}{anchor}>{escape(words)}</text>')

    def name(self, x: float, y: float, words: str, width: float, kind: str = "name") -> None:
        """Foreign text in at most `width`; what is cut off shows on hovering."""
        words = formatting.one_line(words)
        most = max(4, int(width / (13 * _CHARACTER)))
        if len(words) <= most:
            self.text(x, y, words, kind)
            return
        short = f"{words[: most // 2]}…{words[-(most - most // 2 - 1) :]}"
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}"{_class(kind)}>{escape(short)}<title>{escape(words)}</title></text>'
        )

    def rect(self, x1: float, x2: float, y: float, height: float, kind: str) -> None:
        """From `x1` to `x2`, whichever is left; never too thin to be seen."""
        left, width = min(x1, x2), max(abs(x2 - x1), 2.0)
        self._parts.append(
            f'<rect x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"{_class(kind)}/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self._parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"{_class(kind)}/>')

    def heads(self, *heads: tuple[float, str]) -> None:
        for x, words in heads:
            self.text(x, 14, words, "head")

    def branch(self, tree: str, name: str, y: float, width: float, failed: bool = False) -> None:
        """Write a stage's name, indented below its parent's."""
        lead = 7.0 * len(tree)
        if tree:
            self.text(lead - 13, y, tree.strip()[-1], "soft")
        self.name(lead, y, name, width - lead, "strong bad" if failed else "strong")

    def dot(self, x: float, y: float, kind: str) -> None:
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5"{_class(kind)}/>')

    def cells(self, corners: Sequence[tuple[float, float]], side: float, opacity: float) -> None:
        """Draw squares of one shade, with their upper left corners at `corners`."""
        path = "".join(f"M{x:g} {y:g}h{side:g}v{side:g}h-{side:g}z" for x, y in corners)
        self._parts.append(f'<path class="cells" d="{path}" fill-opacity="{opacity:.2f}"/>')

    def finish(self, height: float, alone: bool = False) -> str:
        """The SVG; with `alone` its style and a light background are inside, so that it can be saved as a file."""
        inside, margin = "".join(self._parts), 20 if alone else 0
        width, tall = self.width + 2 * margin, math.ceil(height) + 2 * margin
        box = f'viewBox="{-margin} {-margin} {width} {tall}"'
        if alone:
            ground = f'<rect x="{-margin}" y="{-margin}" width="{width}" height="{tall}" fill="#ffffff"/>'
            inside = f"<style>{style()}</style>{ground}{inside}"
            box += f' xmlns="http://www.w3.org/2000/svg" width="{width}" height="{tall}"'
        return f'<svg class="chart" {box} role="img" aria-label="{escape(self.label)}">{inside}</svg>'


def style() -> str:
    """The charts' rules in the page's light colours, without variables: not every SVG reader knows them."""
    root = re.search(r":root \{(.*?)\}", (_HERE / "report.css").read_text("utf-8"), re.DOTALL)
    assert root is not None
    colours = dict(re.findall(r"--([\w-]+): ([^;]+);", root[1]))
    rules = (_HERE / "charts.css").read_text("utf-8")
    return re.sub(r"var\(--([\w-]+)\)", lambda found: colours[found[1]], rules)


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


@dataclass(frozen=True)
class Axis:
    """Values to pixels, and the values to label."""

    at: Callable[[float], float]
    ticks: Sequence[tuple[float, str]]
    largest: float = math.inf

    def draw(self, svg: Svg, top: float, bottom: float) -> None:
        """Labels above `top`, grid lines down to `bottom`."""
        for value, words in self.ticks:
            svg.line(self.at(value), top, self.at(value), bottom, "grid")
            svg.text(self.at(value), top - 5, words, "tick", middle=True)

    def whisker(self, svg: Svg, low: float, high: float, y: float) -> None:
        """An interval of shares. An end beyond the axis becomes an arrow with its figure."""
        left, right = self.at(low), self.at(high)
        svg.line(left, y, right, y, "whisker")
        svg.line(left, y - 4, left, y + 4, "whisker")
        if high <= self.largest:
            svg.line(right, y - 4, right, y + 4, "whisker")
            return
        for end in (y - 4, y + 4):
            svg.line(right + 6, y, right, end, "whisker")
        svg.text(right + 10, y + 4, f"{100 * high:,.0f} %" if high < 100 else "> 10,000 %", "tick")


def share_axis(largest: float, left: float, right: float) -> Axis:
    """From 0 to `largest`, where 1 is 100 %."""
    step = next(
        (step for power in range(-1, 9) for step in (10.0**power * k for k in (1, 2.5, 5)) if largest / step <= 5),
        largest,
    )
    return _from_zero(largest, left, right, step, lambda value: f"{100 * value:g} %")


def linear_axis(largest: float, left: float, right: float, unit: str) -> Axis:
    """From 0 to `largest`, labelled in `unit`."""
    step = next(step for power in range(-9, 12) for step in (10.0**power * k for k in (1, 2, 5)) if largest / step <= 6)
    return _from_zero(largest, left, right, step, lambda value: f"{value:g} {unit}")


def _from_zero(largest: float, left: float, right: float, step: float, words: Callable[[float], str]) -> Axis:
    """From 0 to `largest`, labelled at every `step` in the `words` of its value."""
    ticks = [(i * step, words(i * step)) for i in range(int(largest / step + 1e-9) + 1)]
    return Axis(lambda value: left + (right - left) * min(value / largest, 1.0), ticks, largest)


def log_axis(values: Sequence[float], left: float, right: float) -> Axis:
    """Decades around the finite positive `values`. 0 is drawn at the left edge, NaN and inf at the right edge."""
    real = [value for value in values if math.isfinite(value) and value > 0] or [1.0]
    low, high = math.floor(math.log10(min(real))), math.ceil(math.log10(max(real)))
    high = max(high, low + 1)
    first = left + 42 if any(value <= 0 for value in values) else left + 8
    last = right - 26 if not all(math.isfinite(value) for value in values) else right - 8

    def at(value: float) -> float:
        if math.isnan(value) or value == math.inf:
            return right - 6
        if value <= 0:
            return left + 6
        return first + (last - first) * (math.log10(value) - low) / (high - low)

    step = math.ceil((high - low) / max(2, (right - left) // 60))
    ticks = [(10.0**power, f"10{str(power).translate(_SUPERSCRIPTS)}") for power in range(low, high + 1, step)]
    return Axis(at, [(0.0, "0"), *ticks] if first > left + 8 else ticks)
