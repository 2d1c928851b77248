"""Points at which two runs of a model are compared: the outputs of the reference's modules, in order of execution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bertopt.core import Array

#: What a layer's attention, residual and normalisation included where the family has them inside, is called.
_ATTENTION = (".sa_layer_norm", ".attention", ".attn")


@dataclass(frozen=True)
class Traced:
    """Outputs of modules in order of completion. A module's later calls are `name@1`, `name@2`, …

    `same` lists for each key every module that gives that very tensor, innermost first. `layers` are the keys of the
    encoder's layers; `calls` counts each module's.
    """

    values: dict[str, Array]
    same: dict[str, tuple[str, ...]]
    layers: tuple[str, ...]
    calls: Mapping[str, int]

    def by_module(self) -> dict[str, Array]:
        """Return the tensors by every module that gives them."""
        return {name: self.values[key] for key, names in self.same.items() for name in names}


@dataclass(frozen=True)
class Point:
    """One tensor of the reference. `names` are the modules giving it, innermost first."""

    names: tuple[str, ...]
    label: str
    layer: int | None


def common(traces: Sequence[Traced]) -> tuple[list[Point], list[list[Array]]]:
    """The tensors that every one of these runs has, in order, and what they are in each run.

    A batch of one has a few more: what is the same for every row then looks like the row's own.
    """
    runs = [trace.by_module() for trace in traces]
    shared = [point for point in points(traces[0]) if all(point.names[0] in run for run in runs)]
    return shared, [[run[point.names[0]] for point in shared] for run in runs]


def points(traced: Traced) -> list[Point]:
    """Every tensor of the reference's run, in order."""
    keys = list(traced.values)
    ends = [next(i for i, key in enumerate(keys) if layer in traced.same[key]) for layer in traced.layers]
    start = next((i for i, key in enumerate(keys) if _inside(traced.same[key][0], traced.layers[:1])), 0)
    found = []
    for index, key in enumerate(keys):
        layer = next((n for n, end in enumerate(ends) if start <= index <= end), None)
        names = traced.same[key]
        found.append(Point(names, _label(names, layer, traced.layers), layer))
    return found


def _inside(key: str, layers: Sequence[str]) -> bool:
    return any(key == layer or bare(key).startswith(f"{bare(layer)}.") for layer in layers)


def bare(key: str) -> str:
    return key.partition("@")[0]


def _label(names: Sequence[str], layer: int | None, layers: Sequence[str]) -> str:
    # Innermost first: `attention.output.LayerNorm` says more than `attention`.
    name = bare(names[0])
    if layer is None:
        return name.removeprefix("encoder.")
    return f"layer {layer} · {name.removeprefix(bare(layers[layer]) + '.')}"


def checkpoints(
    all_points: Sequence[Point], shapes: Sequence[tuple[int, ...]], answers: Sequence[str]
) -> list[tuple[int, str]]:
    """Indices into `all_points`, and labels, of the embeddings, each layer's attention and output, and the answers."""
    found: list[tuple[int, str]] = []
    inside = [i for i, point in enumerate(all_points) if point.layer is not None]
    if inside:
        hidden = shapes[inside[-1]]
        before = [i for i in range(inside[0]) if shapes[i] == hidden]
        found += [(before[-1], "embeddings")] if before else []
    for number in sorted({point.layer for point in all_points if point.layer is not None}):
        mine = [i for i in inside if all_points[i].layer == number]
        attention = _attention(all_points, mine)
        if attention is not None and attention != mine[-1]:
            found.append((attention, f"layer {number} attention"))
        found.append((mine[-1], f"layer {number} output"))
    last = {name: i for i, point in enumerate(all_points) for name in point.names}
    found += [(last[name], name) for name in answers if name in last and last[name] not in {i for i, _ in found}]
    return found


def _attention(all_points: Sequence[Point], layer: Sequence[int]) -> int | None:
    """Return which of the points with indices `layer` is the layer's attention, or None."""
    for suffix in _ATTENTION:
        for index in layer:
            if any(bare(name).endswith(suffix) for name in all_points[index].names):
                return index
    return None
