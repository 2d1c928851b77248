"""The worker's side of `bertopt debug`: compare reference and stage, and try casting less of the stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertopt import stages
from bertopt.checks import probes
from bertopt.checks.probes import Probe
from bertopt.core import Compiled, Context, Device, Eager, Model, Onnx
from bertopt.debug.attempts import Attempts
from bertopt.debug.layer_errors import AlignedTraces, Runner, compare
from bertopt.debug.trace_points import Point, Traced, checkpoints, common
from bertopt.results import Limits
from bertopt.runtime import text_inputs
from bertopt.runtime.tokenization import Tokenizer
from bertopt.spec import Text

if TYPE_CHECKING:
    from bertopt.core import Array

#: A probe with more tokens is looked at only if it is the parity check's worst.
SMALL_TOKENS = 512
#: Seeds for the tokens of each of the recipe's shapes.
MORE = 9


class StageInspector:
    """Opens stages from their directories. `line` are the stage's, the reference first, the stage last; `scratch` is an empty
    directory to work in."""

    def __init__(
        self, line: list[str], device: Device, shapes: list[list[int]], texts: list[Any], worst: str | None,
        scratch: str,
    ) -> None:  # fmt: skip
        self.line, self.device, self.shapes = [Path(path) for path in line], device, [(b, s) for b, s in shapes]
        self.texts = text_inputs.from_json(texts)
        manifest = stages.read_manifest(self.line[0])
        self.spec = manifest.spec
        self.tokenizer = Tokenizer(self.line[0], self.spec, self.spec.max_length)
        self.model: Model = stages.open_stage(self.line[-1])
        self.every = self._probes()
        self.probes = self._chosen(worst)
        self._scratch = Path(scratch)
        self._tapped: dict[tuple[tuple[int, ...], tuple[int, ...]], Any] = {}

    def _probes(self) -> list[Probe]:
        sample: list[Text] = list(dict.fromkeys([*self.texts[:64], *probes.built_in_texts()]))

        def encode(batch: Sequence[Any]) -> list[dict[str, Array]]:
            return [self.tokenizer.batch(self.tokenizer.encode(list(batch)))]

        found = [*probes.grid(self.spec, self.shapes, None), *probes.texts(self.spec, encode, sample)]
        # Parity also compares outputs computed during timing, with other tokens each time.
        timed = [shape for shape in self.shapes if shape[0] * shape[1] <= SMALL_TOKENS]
        for seed in range(1, MORE):
            more = (probe for probe in probes.grid(self.spec, timed, None, seed) if probe.padding == "none")
            found += [replace(probe, name=f"{probe.name}, seed {seed}") for probe in more if probe.shape in timed]
        return [probe for probe in found if self.model.shapes.fit(*probe.shape) is not None]

    def _chosen(self, worst: str | None) -> list[Probe]:
        """Return the probe with the worst parity, the smallest batch in every padding pattern, and a batch of texts."""
        named = [probe for probe in self.every if worst is not None and worst.endswith(f", {probe.name}")]
        small = min((p.shape for p in self.every if p.shape[0] > 1 and p.shape[1] > 1), default=self.every[0].shape)
        grid = [
            probe
            for probe in self.every
            if probe.shape == small and probe.padding != "masked_row" and "seed" not in probe.name
        ]
        text = [
            probe for probe in self.every if probe.padding == "text" and probe.shape[0] * probe.shape[1] <= SMALL_TOKENS
        ]
        return list({probe.name: probe for probe in (*named, *grid, *text[:1])}.values())

    def search(self, parent: str, records: list[dict[str, Any]], limits: dict[str, Any]) -> None:
        """Prepare attempts: `records` are the passes from the cast to the stage, `parent` what they start from."""
        tokenizer = Tokenizer(self.line[0], self.spec)  # cuts texts as passes read them

        def encode(texts: Sequence[Any]) -> dict[str, Array]:
            return tokenizer.batch(tokenizer.encode(texts))

        context = Context(self._scratch, self.device, tuple(self.shapes), tuple(self.texts), encode=encode)
        self._attempts = Attempts(
            Path(parent), records, self.line[0], context, Limits.model_validate(limits), self.probes, self.every,
        )  # fmt: skip

    def units(self) -> list[str] | dict[str, list[str]]:
        """What can be kept in float32: nodes, the most sensitive first, or a tree of modules."""
        return self._attempts.nodes() if isinstance(self._attempts.model, Onnx) else self._attempts.modules()

    def on_cpu_half(self) -> bool:
        """Whether ONNX Runtime's CPU kernels run the stage's half precision, much of it in float32."""
        return (
            self.device == "cpu"
            and isinstance(self._attempts.model, Onnx)
            and self._attempts.cast.name() != "quantize_int8"
        )

    def attempt(self, keep: list[str], every: bool) -> list[str]:
        """See `Attempts.attempt`."""
        return self._attempts.attempt(keep, every)

    def compare(self) -> dict[str, Any]:
        """A `DebugFindings` as JSON."""
        found = compare(self.aligned, self.line[-1].name.rpartition("-")[0], self.model.form)
        found.notes = self.notes
        return found.model_dump(mode="json")

    @cached_property
    def notes(self) -> list[str]:
        notes = []
        if isinstance(self.model, Compiled):
            notes.append("torch.compile leaves no modules to look into: this is the eager network it compiles")
        lost = len(self.points) - len(self.aligned.names)
        if lost:
            notes.append(f"{lost} of the reference's tensors have no counterpart in the stage (fused or left out)")
        return notes

    @cached_property
    def _traces(self) -> dict[str, Traced]:
        from bertopt.debug.trace_torch import trace

        reference: Any = stages.open_stage(self.line[0])
        network = reference.network.to(self.device)
        return {p.name: trace(network, p.inputs, self.spec.outputs, self.spec.layers) for p in self.probes}

    @property
    def _first(self) -> Traced:
        return self._traces[self.probes[0].name]

    @cached_property
    def points(self) -> list[Point]:
        return common([*self._traces.values()])[0]

    @cached_property
    def reference(self) -> dict[str, list[Array]]:
        """What the points are in the reference, by probe."""
        return dict(zip(self._traces, common([*self._traces.values()])[1], strict=True))

    @cached_property
    def aligned(self) -> AlignedTraces:
        fast = self.tokenizer.fast
        names, run = self._onnx() if isinstance(self.model, Onnx) else self._torch()
        shown = names if isinstance(self.model, Onnx) else self._plain_names(names)
        return AlignedTraces(self.probes, self.points, self.reference, self.spec.outputs, names, shown, run, fast.id_to_token)

    def _plain_names(self, names: Mapping[int, str]) -> dict[int, str]:
        """The innermost module's name says most; a layer that a pass put in another's place has only its own."""
        return {i: self.points[i].names[0] if name in self.points[i].names else name for i, name in names.items()}

    def _torch(self) -> tuple[dict[int, str], Runner]:
        """Return what the stage's torch network calls the points, by index, and how it is run."""
        from bertopt.debug.trace_torch import trace

        assert isinstance(self.model, Eager | Compiled)
        network: Any = self.model.network.to(self.device)
        plain = trace(network, self.probes[0].inputs, self.spec.outputs, self.spec.layers)
        there = plain.by_module()
        # Layers by number: a pass may have put others in their place.
        layers = dict(zip(self._first.layers, plain.layers, strict=False))
        names: dict[int, str] = {}
        for index, (point, value) in enumerate(zip(self.points, self.reference[self.probes[0].name], strict=True)):
            own = (layers.get(name, name) for name in reversed(point.names))
            name = next((name for name in own if name in there and there[name].shape == value.shape), None)
            if name is not None:
                names[index] = name

        def run(probe: Probe, wanted: Sequence[int], given: Mapping[int, Array]) -> Mapping[int, Array]:
            fed = {names[index]: value for index, value in given.items()}
            traced = trace(network, probe.inputs, self.spec.outputs, self.spec.layers, fed).by_module()
            return {index: traced[names[index]] for index in wanted}

        return names, run

    def _by_value(self, wanted: Sequence[int], taken: set[str]) -> dict[int, str]:
        """Values of a graph that has lost its names, found by what they hold on two probes."""
        from bertopt.debug.trace_onnx import Tapped, floats_of, nearest

        model: Any = self.model
        tapped = Tapped(model, floats_of(model.path), [], self._scratch / "every", self.device)
        probes = self.probes[:2]
        values = {probe.name: tapped.run(probe.inputs, {}) for probe in probes}
        found: dict[int, str] = {}
        for index in wanted:
            reference = {probe.name: self.reference[probe.name][index] for probe in probes}
            name = nearest(reference, values, taken | set(found.values()))
            if name is not None:
                found[index] = name
        return found

    def _onnx(self) -> tuple[dict[int, str], Runner]:
        """Return what the stage's graph calls the points, by index, and how it is run."""
        from bertopt.debug.trace_onnx import Tapped, match

        model: Any = self.model
        graphs = [path / "onnx" / "model.onnx" for path in self.line if (path / "onnx" / "model.onnx").is_file()]
        names = match(self.points, self._first.calls, model.path, graphs[0])
        shapes = [value.shape for value in self.reference[self.probes[0].name]]
        wanted = [index for index, _ in checkpoints(self.points, shapes, self.spec.outputs)]
        if len([index for index in wanted if index in names]) * 2 < len(wanted):
            names |= self._by_value([index for index in wanted if index not in names], set(names.values()))

        def run(probe: Probe, wanted: Sequence[int], given: Mapping[int, Array]) -> Mapping[int, Array]:
            key = (tuple(wanted), tuple(given))
            if key not in self._tapped:
                folder = self._scratch / str(len(self._tapped))
                self._tapped[key] = Tapped(
                    model, [names[i] for i in wanted], [names[i] for i in given], folder, self.device
                )
            values = self._tapped[key].run(probe.inputs, {names[i]: value for i, value in given.items()})
            return {index: values[names[index]] for index in wanted}

        plain = run(self.probes[0], list(names), {})
        reference = self.reference[self.probes[0].name]
        return {i: name for i, name in names.items() if plain[i].shape == reference[i].shape}, run
