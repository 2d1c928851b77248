"""Faults of running: caches, clocks, compilers, neighbours in time."""

from __future__ import annotations

import copy
from typing import Any

from campaigns.mutants.plant import LABELS, mutant, part


class Late:
    """An answer that is only queued when the step returns, as on a device: who reads it waits for it."""

    def __init__(self, compute: Any) -> None:
        self._compute, self._answer = compute, None

    def float(self) -> Any:
        if self._answer is None:
            self._answer = self._compute()[0].float()
        return self._answer


@mutant("parity", "plant_torch")
def stale_outputs(network: Any) -> None:
    """Each shape answers what it was asked the time before."""
    kept: dict[Any, Any] = {}

    def swap(module: Any, inputs: Any, answers: Any) -> Any:
        before = kept.get(inputs[0].shape, answers)
        kept[inputs[0].shape] = answers
        return before

    network.register_forward_hook(swap)


@mutant("parity", "plant_torch")
def frozen_capture(network: Any) -> None:
    """A captured graph replays its first input: each shape always gives its first answer."""
    kept: dict[Any, Any] = {}
    network.register_forward_hook(lambda module, inputs, answers: kept.setdefault(inputs[0].shape, answers))


@mutant("latency", "plant_torch")
def unfinished_step(network: Any) -> None:
    """A step returns before its work is done: the clock skips synchronisation."""
    whole = network.forward
    network.forward = lambda *tensors: (Late(lambda: whole(*tensors)),)


@mutant("timed", "plant_torch")
def wrong_when_warm(network: Any) -> None:
    """From the third new input in a row at one shape, unpadded, answers are 0.1 % off: captured after warming up."""
    seen: list[Any] = [None, None, 0]

    def spoil(module: Any, inputs: Any, answers: Any) -> Any:
        shape, content = inputs[0].shape if bool(inputs[1].all()) else None, inputs[0].numpy().tobytes()
        new = shape == seen[0] and content != seen[1]
        seen[:] = [shape, content, seen[2] + 1 if new else 1]
        return (answers[0] * 1.001, *answers[1:]) if shape is not None and seen[2] > 2 else answers

    network.register_forward_hook(spoil)


@mutant("parity", "plant_torch")
def wrong_when_repeated(network: Any) -> None:
    """From the third run on one input, answers are 0.1 % off, as buffers reused too early make them."""
    seen: list[Any] = [None, 0]

    def spoil(module: Any, inputs: Any, answers: Any) -> Any:
        key = inputs[0].numpy().tobytes()
        seen[:] = [key, seen[1] + 1 if key == seen[0] else 1]
        return (answers[0] * 1.001, *answers[1:]) if seen[1] > 2 else answers

    network.register_forward_hook(spoil)


@mutant("parity", "plant_torch")
def one_run_in_sixteen(network: Any) -> None:
    """Every sixteenth answer is 0.1 % off, as a race between threads makes it."""
    runs = [0]

    def spoil(module: Any, inputs: Any, answers: Any) -> Any:
        runs[0] += 1
        return (answers[0] * 1.001, *answers[1:]) if runs[0] % 16 == 0 else answers

    network.register_forward_hook(spoil)


@mutant("effects", "plant_compiled")
def never_compiled(network: Any) -> None:
    """Claims one compiled graph; nothing is compiled."""


@mutant("effects", "plant_compiled")
def fell_back_to_eager(network: Any) -> None:
    """The compiler fails, errors are suppressed, and eager code runs."""
    import torch

    def broken(graph: Any, example: Any) -> Any:
        raise RuntimeError("no C++ compiler")

    torch._dynamo.config.suppress_errors = True
    network.compile(backend=broken, dynamic=True)


@mutant("effects", "plant_compiled")
def broken_graph(network: Any) -> None:
    """Each layer is compiled around a graph break, not the model as one graph."""
    import torch

    disable: Any = torch._dynamo.disable
    for layer in network.base.encoder.layer:
        layer.attention.forward = disable(layer.attention.forward)
    network.compile(backend="aot_eager", dynamic=True)


@part
def keeps_answers(network: Any) -> None:
    """Keeps every answer by its input, and gives a copy."""
    kept: dict[Any, Any] = {}
    whole = network.forward

    def forward(*tensors: Any) -> Any:
        key = tuple(tensor.numpy().tobytes() for tensor in tensors)
        if key not in kept:
            kept[key] = whole(*tensors)
        return copy.deepcopy(kept[key])

    network.forward = forward


@mutant("latency", "")
def cached_answers(bench: Any) -> tuple[list[str], str]:
    """Answers are right, but kept by input: a clock that sees an input twice sees no work, and calls it faster."""
    report = bench.recipe(LABELS, ({"pass": "plant_torch", "mutant": "keeps_answers", "name": "mutant"},))
    row = report.stage("mutant")
    assert row.status == "ok", row.reason
    ratios = [case.vs_reference.ratio for case in row.latency if case.vs_reference]
    said = f"never more than {max(ratios):.1f} times as fast" if ratios else "every figure is void"
    # Looking an answer up takes a thirtieth of computing it.
    return (["latency"] if all(ratio < 3 for ratio in ratios) else []), said
