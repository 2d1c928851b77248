"""The worker's side of the search: cast again with some operators kept in float32, and compare the result with the limits."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bertopt import stages
from bertopt.checks import parity
from bertopt.checks.parity import ProbeOutputs
from bertopt.checks.probes import Probe
from bertopt.core import Compiled, Context, Eager, Model, Onnx, Rewrite, Session
from bertopt.debug.tensor_difference import relative
from bertopt.passes import registry
from bertopt.results import Case, Limits
from bertopt.sessions import open_session

#: The largest float16 number; an operator with larger outputs in float32 must be kept.
LARGEST = 65504.0
#: Share of the limits that an attempt may use.
MARGIN = 0.9


class Attempts:
    """`records` are the passes from the cast to the stage; `parent` is the stage before the cast.

    Each attempt runs them with `context`, in a new folder below its `workdir`, and looks at `probes`, or at `every` probe.
    """

    def __init__(
        self, parent: Path, records: Sequence[Mapping[str, Any]], reference: Path, context: Context, limits: Limits,
        probes: Sequence[Probe], every: Sequence[Probe],
    ) -> None:  # fmt: skip
        self.model = stages.open_stage(parent)
        self.cast: Any
        self.cast, *self.tail = [registry.restore(Rewrite.model_validate(record)) for record in records]
        self.context, self.limits = context, limits
        self.probes, self.every = list(probes), list(every)
        plain = stages.open_stage(reference)
        self.spec, self._reference = plain.spec, open_session(plain, context.device)
        self._answers: dict[str, ProbeOutputs] = {}

    def attempt(self, keep: Sequence[str], every: bool) -> list[str]:
        """The limits that are missed with `keep` in float32, in words. A probe that fails is looked at from then on."""
        wanted = self.every if every else self.probes
        with tempfile.TemporaryDirectory(dir=self.context.workdir) as folder:
            session = open_session(self._built(keep, Path(folder)), self.context.device)
            try:
                cases = [self._case(session, probe) for probe in wanted]
            except RuntimeError as error:
                # Two types met where torch casts neither: this set cannot be kept.
                return [f"it does not run: {error}"]
        limits = _tighter(self.limits) if keep else self.limits
        if not every:
            return _failures(cases, limits)
        known = {probe.name for probe in self.probes}
        wrong = [
            probe
            for probe, case in zip(self.every, cases, strict=True)
            if probe.name not in known and _failures([case], limits)
        ]
        self.probes += wrong[:2]
        return _failures(cases, limits)

    def _case(self, session: Session, probe: Probe) -> Case:
        if probe.name not in self._answers:
            self._answers[probe.name] = parity.answer(self._reference, probe, self.spec)
        return parity.compare(probe, self.spec, parity.answer(session, probe, self.spec), self._answers[probe.name])

    def _built(self, keep: Sequence[str], folder: Path) -> Model:
        model = self.model
        kept = self.cast.model_copy(update={"keep_fp32": (*self.cast.keep_fp32, *keep)})
        for number, apply in enumerate((kept, *self.tail)):
            if apply.forms()[1] is Compiled:
                # Compiling changes no precision, and takes longer than all the rest.
                break
            workdir = folder / str(number)
            workdir.mkdir()
            with registry.at_work(apply):
                model = apply(model, replace(self.context, workdir=workdir)).model
        return model

    def nodes(self) -> list[str]:
        """Nodes of the graph that the cast reduces, the most sensitive first.

        Sensitivity is the error of a node alone, fed with float32's values; what overflows comes before everything.
        """
        import onnx_ir as ir

        from bertopt.debug.trace_onnx import Tapped, halves_of, quantised_of, values_of

        assert isinstance(self.model, Onnx)
        folder = self.context.workdir / "scores"
        (folder / "half").mkdir(parents=True)
        half: Any = self.cast(self.model, replace(self.context, workdir=folder / "half")).model
        if half.precision == "int8":
            after = quantised_of(self.model.path, half.path)
            names = list(after)
        else:
            before, after = values_of(ir.load(self.model.path)), halves_of(half.path)
            # What the cast adds is no node of the graph that it is given.
            names = [name for name, node in after.items() if name in before and before[name].producer().name == node]
        plain = Tapped(self.model, names, [], folder / "plain", self.context.device)
        fed = Tapped(half, names, names, folder / "fed", self.context.device)
        scores: dict[str, float] = {}
        for probe in self.probes[:3]:
            wanted = plain.run(probe.inputs, {})
            got = fed.run(probe.inputs, wanted)
            for name in names:
                node = after[name]
                scores[node] = max(scores.get(node, 0.0), _sensitivity(got[name], wanted[name]))
        kept = {*self.cast.keep_fp32}
        return sorted((node for node in scores if node not in kept), key=lambda node: -scores[node])

    def modules(self) -> dict[str, list[str]]:
        """The encoder's modules as a tree: the children of each, of '' the outermost. Names are the cast's."""
        assert isinstance(self.model, Eager)
        network: Any = self.model.network
        tree: dict[str, list[str]] = {}
        waiting = [("", network.encoder)]
        for name, module in waiting:
            found = list(_children(name, module))
            tree[name] = [child for child, _ in found]
            waiting += found
        return tree


def _tighter(limits: Limits) -> Limits:
    """Return tighter limits, so that a set that is found does not fail on other tokens."""
    return limits.model_copy(
        update={name: MARGIN * value for name in ("rel_l2", "max_abs") if (value := getattr(limits, name)) is not None}
    )


def _failures(cases: Sequence[Case], limits: Limits) -> list[str]:
    return [failure.text for failure in parity.failures(cases, limits)]


def _children(name: str, module: Any) -> Iterator[tuple[str, Any]]:
    """A list of modules is never called itself: its entries stand for it. Dropout computes nothing."""
    import torch

    for key, child in module.named_children():
        full = f"{name}.{key}" if name else key
        if isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict):
            yield from _children(full, child)
        elif not isinstance(child, torch.nn.Dropout | torch.nn.Identity):
            yield full, child


def _sensitivity(got: Any, wanted: Any) -> float:
    if not np.isfinite(got).all() or np.abs(wanted).max(initial=0.0) > LARGEST:
        return float("inf")
    return relative(got - wanted, wanted)
