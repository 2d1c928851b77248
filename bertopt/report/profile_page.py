"""A profile as one HTML file: a picture of where the time goes, tables, and attention where it was requested."""

from __future__ import annotations

from pathlib import Path

from bertopt.report import html
from bertopt.report.profile import BETWEEN, CLASSES, Attention, Profile
from bertopt.report.svg import WIDTH, Svg, linear_axis
from bertopt.system import atomic_write

_ROW, _LEFT, _RIGHT, _TOP = 26, 170, 1060, 46
#: Side of a cell of a heat-map [px], and its shades from 0 to 1.
_CELL, _SHADES = 13, 12


def write(profile: Profile, path: Path) -> None:
    """Write the page to `path`, whole or not at all."""
    atomic_write.write(path, page(profile))


def page(profile: Profile) -> str:
    """Return the page."""
    return html.template("profile.html.jinja").render(
        profile=profile, picture=picture(profile), between=BETWEEN, classes=CLASSES,
        maps=[(i, heat_map(profile.attention, i)) for i in range(len(profile.attention.layers))] if profile.attention else [],
    )  # fmt: skip


def picture(profile: Profile) -> str:
    """Draw one bar a layer, in the colours of its operators' classes; the last bar is what no operator accounts for."""
    layers = profile.by_layer()
    largest = max([*layers.values(), profile.between_ms, 1e-9])
    svg = Svg(WIDTH, "Time of one call by layer and class of operator")
    axis = linear_axis(largest, _LEFT, _RIGHT, "ms")
    axis.draw(svg, 40, _TOP + _ROW * (len(layers) + 1))
    svg.heads((0, "layer"))
    y = _TOP
    for layer, ms in layers.items():
        svg.text(0, y + 16, layer, "strong")
        start = 0.0
        for number, name in enumerate(CLASSES):
            part = sum(row.ms for row in profile.rows if (row.layer, row.operators) == (layer, name))
            if part / largest > 5e-4:
                svg.rect(axis.at(start), axis.at(start + part), y + 4, 16, f"k{number}")
            start += part
        svg.text(axis.at(ms) + 8, y + 16, f"{ms:.3f}")
        y += _ROW
    svg.text(0, y + 16, BETWEEN, "soft")
    svg.rect(axis.at(0), axis.at(max(profile.between_ms, 0.0)), y + 4, 16, "unsure")
    svg.text(axis.at(max(profile.between_ms, 0.0)) + 8, y + 16, f"{profile.between_ms:.3f}", "soft")
    return svg.finish(y + _ROW)


def heat_map(attention: Attention, layer: int) -> str:
    """Draw one layer's attention: a row for each token that attends, a column for each that is attended to."""
    side, lead = _CELL * len(attention.tokens), 96
    svg = Svg(lead + side + 10, f"Attention of layer {layer}")
    for number, token in enumerate(attention.tokens):
        svg.name(0, number * _CELL + 11, token, lead, "token")
    shades: dict[int, list[tuple[int, int]]] = {}
    for y, row in enumerate(attention.layers[layer]):
        for x, share in enumerate(row):
            shades.setdefault(round(min(share, 1.0) ** 0.5 * _SHADES), []).append((x, y))
    for shade, cells in sorted(shades.items()):
        svg.cells([(lead + x * _CELL, y * _CELL) for x, y in cells], _CELL - 1, shade / _SHADES)
    return svg.finish(side + 4)
