"""Profile a torch network with `torch.profiler`; the module that runs names the layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bertopt.core import Compiled, Eager, Session
from bertopt.debug import timed_calls
from bertopt.debug.trace_torch import replace_forward
from bertopt.report.profile import AFTER, BEFORE, UNKNOWN
from bertopt.sessions.torch import TorchSession

_LAYER, _CALL = "bertopt::layer", "bertopt::call"


class TorchProfiler:
    """A session and what its operators took."""

    def __init__(self, model: Eager | Compiled) -> None:
        self._compiled = isinstance(model, Compiled)
        self._layers = model.spec.layers
        self.session = TorchSession(model, "cpu")

    def measure(self, session: Session) -> tuple[list[float], dict[tuple[str, str], tuple[int, float]]]:
        """Return milliseconds of each call, and (layer, operator) to (calls, milliseconds) over all of them."""
        def step() -> None:
            with torch.profiler.record_function(_CALL):
                session.step()

        sums: dict[tuple[str, str], tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with _marked(self.session.network, self._compiled), torch.profiler.profile(activities=cpu) as recorded:
            timed_calls.warm_up(session)
            times = timed_calls.timed(step)
        for key, ms in self._operators(recorded.events()):
            calls, known = sums[key]
            sums[key] = calls + 1, known + ms
        return times, sums

    def _operators(self, events: Any) -> Iterator[tuple[tuple[str, str], float]]:
        """Each operator's own time, without those that it calls. What modules and Python take is no operator's."""
        calls: dict[int, list[Any]] = defaultdict(list)
        for event in events:
            call = next((parent.id for parent in _parents(event) if parent.name == _CALL), None)
            if call is not None:
                calls[call].append(event)
        for inside in calls.values():
            yield from self._of_call(inside)

    def _of_call(self, events: list[Any]) -> Iterator[tuple[tuple[str, str], float]]:
        marks = sorted((event for event in events if event.name == _LAYER), key=lambda event: event.time_range.start)
        numbers = {event.id: number for number, event in enumerate(marks)}
        for event in events:
            if event.name == _LAYER or not event.self_cpu_time_total:
                continue
            layer = UNKNOWN
            if len(marks) == self._layers:
                number = next((numbers[each.id] for each in _parents(event) if each.id in numbers), None)
                outside = BEFORE if event.time_range.start < marks[0].time_range.start else AFTER
                layer = outside if number is None else f"layer {number}"
            name = event.name
            if self._compiled and not name.startswith(("aten::", "mkldnn::", "mkl::", "onednn::")):
                name = "CompiledFxGraph"
            yield (layer, name), event.self_cpu_time_total / 1000


def _parents(event: Any) -> Iterator[Any]:
    while event.cpu_parent is not None:
        event = event.cpu_parent
        yield event


@contextmanager
def _marked(network: Any, compiled: bool) -> Iterator[None]:
    """Mark the calls of the encoder's layers: the entries of the outermost lists of modules, and a last layer by itself.

    Not hooks: torch's encoder fast path gives way to a slower one where a module has hooks. A compiled network would be
    compiled again, so its layers stay unmarked.
    """
    undo: list[Callable[[], None]] = []
    names: list[str] = []
    for name, module in [] if compiled else list(network.named_modules()):
        if any(name.startswith(f"{outer}.") for outer in names):
            continue
        if name.rpartition(".")[2] == "last":
            names.append(name)
            undo.append(_mark(module))
        elif isinstance(module, torch.nn.ModuleList):
            names.append(name)
            undo += [_mark(child) for child in module]
    try:
        yield
    finally:
        for each in undo:
            each()


def _mark(module: Any) -> Callable[[], None]:
    forward = module.forward

    def marked(*args: Any, **options: Any) -> Any:
        with torch.profiler.record_function(_LAYER):
            return forward(*args, **options)

    return replace_forward(module, marked)
