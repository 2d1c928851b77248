"""Models whose head is wrong in a part of its outputs: numbers of unlike size, tags of some tokens, ends of answers, scores of later rows.

Delivered were those of small numbers beside large ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from bertopt.core import Context, Onnx, Result
from campaigns.mutants.loose_limits import BF16
from campaigns.mutants.plant import (
    ENTITIES,
    INT8_LINE,
    NUMBERS,
    RANKER,
    SDPA,
    SPAN,
    Checkpoint,
    Step,
    behind,
    mutant,
)

LINES: dict[str, tuple[Step, ...]] = {"float32": (SDPA,), "bf16": (SDPA, BF16), "int8": INT8_LINE}


class Graph:
    """Nodes behind a graph's outputs: each call adds one and gives the name of its output."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {}

    def const(self, value: Any) -> str:
        name = f"planted_constant_{len(self.constants)}"
        self.constants[name] = np.asarray(value)
        return name

    def __call__(self, kind: str, *inputs: str, **attributes: Any) -> str:
        from onnx import helper

        name = f"planted_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def numbers(self, axis: int) -> str:
        """0, 1, … along an axis of the batch [B, S]."""
        size = self("Gather", self("Shape", "input_ids"), self.const(np.int64(axis)))
        return self("Range", self.const(np.int64(0)), size, self.const(np.int64(1)))

    def tokens(self) -> str:
        """The valid tokens of each row [B, 1]."""
        return self("ReduceSum", "attention_mask", self.const(np.array([1])), keepdims=1)


class Twice(NamedTuple):
    """One thing in torch, of inputs by name or of an output, and as nodes that give the same."""

    torch: Callable[[Any], Any]
    nodes: Callable[[Graph], str]


def rows_from(first: int) -> Twice:
    """Rows [B, 1] from number `first` on."""

    def of(named: Any) -> Any:
        import torch

        return (torch.arange(named["input_ids"].shape[0]) >= first)[:, None]

    def nodes(graph: Graph) -> str:
        late = graph("GreaterOrEqual", graph.numbers(0), graph.const(np.int64(first)))
        return graph("Unsqueeze", late, graph.const(np.array([1])))

    return Twice(of, nodes)


def places_from(first: int) -> Twice:
    """Tokens [1, S] from place `first` on."""

    def of(named: Any) -> Any:
        import torch

        return (torch.arange(named["input_ids"].shape[1]) >= first)[None]

    def nodes(graph: Graph) -> str:
        late = graph("GreaterOrEqual", graph.numbers(1), graph.const(np.int64(first)))
        return graph("Unsqueeze", late, graph.const(np.array([0])))

    return Twice(of, nodes)


def longer_than(tokens: int) -> Twice:
    """Rows [B, 1] of more than `tokens` tokens."""
    return Twice(
        lambda named: named["attention_mask"].sum(1, keepdim=True) > tokens,
        lambda graph: graph("Greater", graph.tokens(), graph.const(np.int64(tokens))),
    )


def last_words(count: int) -> Twice:
    """The last tokens [B, S] of each row before the one that ends it."""

    def of(named: Any) -> Any:
        import torch

        places, end = torch.arange(named["input_ids"].shape[1]), named["attention_mask"].sum(1, keepdim=True) - 1
        return (places >= end - count) & (places < end)

    def nodes(graph: Graph) -> str:
        places, end = graph.numbers(1), graph("Sub", graph.tokens(), graph.const(np.int64(1)))
        late = graph("GreaterOrEqual", places, graph("Sub", end, graph.const(np.int64(count))))
        return graph("And", late, graph("Less", places, end))

    return Twice(of, nodes)


def both(one: Twice, other: Twice) -> Twice:
    return Twice(lambda named: one.torch(named) & other.torch(named), lambda graph: graph("And", one.nodes(graph), other.nodes(graph)))


def rotated(columns: int) -> Twice:
    """Each label has the one's before it, but the first, which is O."""
    order = [0, columns - 1, *range(1, columns - 1)]
    return Twice(lambda right: right[..., order], lambda graph: graph("Gather", "right", graph.const(np.array(order)), axis=-1))


def added(*numbers: float) -> Twice:
    def of(right: Any) -> Any:
        import torch

        return right + torch.tensor(numbers)

    return Twice(of, lambda graph: graph("Add", "right", graph.const(np.array(numbers, np.float32))))


def times(*numbers: float) -> Twice:
    def of(right: Any) -> Any:
        import torch

        return right * torch.tensor(numbers)

    return Twice(of, lambda graph: graph("Mul", "right", graph.const(np.array(numbers, np.float32))))


def _in_torch(network: Any, where: Twice, wrong: Twice, output: int) -> None:
    import torch

    def spoil(module: Any, inputs: Any, answers: Any) -> Any:
        right = answers[output]
        found = where.torch(dict(zip(network.inputs, inputs, strict=True)))
        found = found.unsqueeze(-1) if right.dim() == 3 else found
        return (*answers[:output], torch.where(found, wrong.torch(right), right), *answers[output + 1 :])

    network.register_forward_hook(spoil)


def _in_graph(model: Onnx, ctx: Context, where: Twice, wrong: Twice, output: int) -> Result[Onnx]:
    from onnx import helper

    graph = Graph()
    found = where.nodes(graph)
    found = graph("Unsqueeze", found, graph.const(np.array([-1]))) if model.spec.granularity == "token" else found
    changed = wrong.nodes(graph)
    return behind(model, ctx, lambda name: [*graph.nodes, helper.make_node("Where", [found, changed, "right"], [name])], graph.constants, output)


def enter(name: str, about: str, on: Checkpoint, where: Twice, wrong: Twice, lines: tuple[str, ...] = ("bf16", "int8"), output: int = 0) -> None:
    """Enter a model that gives `wrong` outputs for the rows or tokens `where`, in each of `lines`."""
    for line in lines:

        def plant(*given: Any, way: Any = _in_graph if line == "int8" else _in_torch) -> Any:
            return way(*given, where, wrong, output)

        plant.__name__, plant.__doc__ = f"{name}_in_{line}", f"In {line}: {about}"
        mutant("rounding", "plant_graph" if line == "int8" else "plant_torch", on, LINES[line])(plant)


EVERY = ("float32", "bf16", "int8")
enter("rating_without_bias", "The smaller of two numbers lost its bias.", NUMBERS, rows_from(0), added(-3.0, 0.0))
enter("rating_halved", "The smaller of two numbers is half of what it is.", NUMBERS, rows_from(0), times(0.5, 1.0))
enter("rating_of_long_texts", "The smaller of two numbers is 1 more for texts of more than 40 tokens.", NUMBERS, longer_than(40), added(1.0, 0.0), EVERY)
enter("tags_beyond_64", "Tags of tokens from place 64 on are others.", ENTITIES, places_from(64), rotated(9))
enter("last_words_of_later_rows", "The last two words of rows from the ninth on have other tags.", ENTITIES, both(last_words(2), rows_from(8)), rotated(9), EVERY)
enter("softer_tags_of_later_rows", "Tags of rows from the ninth on have scores a tenth too small.", ENTITIES, rows_from(8), times(0.9))
enter("ends_of_long_texts", "The last three words of texts of more than 64 tokens lose 3 as ends of answers.", SPAN, both(last_words(3), longer_than(64)), added(-3.0), EVERY, 1)
enter("score_of_later_rows", "Scores of rows from the ninth on are 0.3 more.", RANKER, rows_from(8), added(0.3), EVERY)
