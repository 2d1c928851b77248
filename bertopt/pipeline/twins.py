"""Run the twins of stages of reduced precision, and compare each stage with its own (see `bertopt.checks.twin`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bertopt.checks import framing, gates, parity, twin
from bertopt.checks.framing import Frame
from bertopt.checks.parity import ProbeOutputs
from bertopt.checks.probes import REAL, Probe
from bertopt.core import Device, HalfRounding, Int8Rounding, Precision, Spec
from bertopt.passes import registry
from bertopt.passes.registry import AnyPass
from bertopt.pipeline.progress import ProgressCallback
from bertopt.quantization import calibration_inputs
from bertopt.results.fidelity import Rounding
from bertopt.stages import Manifest
from bertopt.system import environment
from bertopt.workers import protocol
from bertopt.workers.client import Workers
from bertopt.workers.remote_session import RemoteSession

if TYPE_CHECKING:
    from bertopt.core import Array

#: Unusual batches that a twin with static scales is calibrated on besides real texts: each kind in each length.
ODD_BATCHES = 18
#: One in this many batches of real texts calibrates it: about as many texts as a pass takes, of all lengths.
CALIBRATED = 3


class Twins:
    """The outputs of one reference's twins for the real texts among `probes`, each computed once."""

    def __init__(
        self, workers: Workers, reference: Path, device: Device, spec: Spec, encode: Callable[[Sequence[Any]], list[dict[str, Array]]],
        probes: Sequence[Probe], on_progress: ProgressCallback, frame: Frame | None = None,
    ) -> None:  # fmt: skip
        """`frame` is what the tokenizer puts around a text."""
        self.workers, self.reference, self.device, self.spec, self.encode = workers, reference, device, spec, encode
        self.probes, self.on_progress = probes, on_progress
        #: For question answering, which tokens belong to the context, by probe name.
        self._contexts = None
        if spec.granularity == "span":
            real = [probe for probe in probes if probe.padding in REAL]
            self._contexts = {probe.name: framing.second_texts(probe.inputs, frame)[probe.rows] for probe in real}
        self._outputs: dict[tuple[Precision, Int8Rounding | HalfRounding, int], dict[str, ProbeOutputs]] = {}

    def compare(
        self, stage_name: str, probe_names: Sequence[str], manifest: Manifest, stage: Mapping[str, ProbeOutputs],
        reference: Mapping[str, ProbeOutputs], parent: Mapping[str, ProbeOutputs] | None,
    ) -> Rounding | None:  # fmt: skip
        """Return how far a stage's outputs are from the reference's, both by probe name; `parent` as in `twin.compare`."""
        precision = manifest.precision
        how = _int8_rounding(manifest) if precision == "int8" else _half_rounding(manifest)

        def compared(draw: int) -> Rounding | None:
            simulated = self._run(stage_name, precision, how, draw)
            if precision == "float16" and not twin.finite(simulated):
                # The checkpoint overflows in float16, which keep_fp32 prevents in the stage: compare with bfloat16's rounding instead.
                simulated = self._run(stage_name, "bfloat16", how, draw)
            return twin.compare(self.spec, probe_names, stage, simulated, reference, parent, self._contexts)

        limits = gates.effective_limits(precision)
        return twin.beside(twin.DRAWS, compared, lambda found: not gates.rounding_failures(found, limits))

    def _run(self, stage_name: str, precision: Precision, how: Int8Rounding | HalfRounding, draw: int) -> dict[str, ProbeOutputs]:
        """Return one twin's outputs by probe name. Static scales are calibrated on some of the same texts and on odd inputs."""
        key = (precision, how, draw)
        if key not in self._outputs:
            self.on_progress(f"{stage_name}: simulating {precision}")
            real = [probe for probe in self.probes if probe.padding in REAL]
            static = isinstance(how, Int8Rounding) and how.scales == "static"
            batches = [*self._odd_inputs(), *(probe.inputs for probe in real[::CALIBRATED])] if static else []
            with self.workers.start() as worker:
                worker.exchange(
                    "open_twin", protocol.numbered(batches), directory=str(self.reference.resolve()), device=self.device,
                    precision=precision, how=asdict(how) if isinstance(how, Int8Rounding) else how, draw=draw, batches=len(batches),
                )  # fmt: skip
                session = RemoteSession(worker)
                self._outputs[key] = {probe.name: parity.answer(session, probe, self.spec) for probe in real}
        return self._outputs[key]

    def _odd_inputs(self) -> list[dict[str, Array]]:
        """Return inputs unlike any text, as passes calibrate on them."""
        (empty,) = self.encode([("", "") if self.spec.task == "question-answering" else ""])
        rng = np.random.default_rng(0)
        return [calibration_inputs.odd(self.spec, empty["input_ids"][0], number, rng) for number in range(ODD_BATCHES)]


def _passes(manifest: Manifest) -> list[AnyPass]:
    """Return the passes that made a stage and are known here."""
    return [registry.restore(record) for record in manifest.passes if registry.get(record.name) is not None]


def _half_rounding(manifest: Manifest) -> HalfRounding:
    """Return what rounds in a stage of half precision: less than every operator if one of its passes says so."""
    stated = (registry.half_rounding(one) for one in _passes(manifest))
    return next((one for one in stated if one != "operators"), "operators")


def _int8_rounding(manifest: Manifest) -> Int8Rounding:
    """Return how the INT8 products of a stage round, as the first pass that writes such products says."""
    stated = (registry.int8_rounding(one) for one in _passes(manifest))
    how = next((one for one in stated if one is not None), Int8Rounding())
    if how.weight_bits is None:
        saturates = manifest.device == "cpu" and environment.saturates_int8(" ".join(manifest.environment["isa"]))
        return replace(how, weight_bits=7 if saturates else 8)
    return how
