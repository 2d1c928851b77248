"""Measure committed stages: each in a fresh worker, against the reference and against its parent."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bertopt import stages
from bertopt.checks import coverage, framing, invariance, padding_patterns, parity, probes, ranking, worst_case
from bertopt.checks.measurements import StageMeasurements
from bertopt.checks.parity import ProbeOutputs
from bertopt.checks.probes import Probe
from bertopt.core import Device
from bertopt.errors import Unsupported
from bertopt.modeling.sentence_transformers import read_prompts
from bertopt.pipeline import labelled
from bertopt.pipeline.end_to_end import EndToEnd
from bertopt.pipeline.measurement_cache import Records, identity
from bertopt.pipeline.measurement_plan import MeasurementPlan
from bertopt.pipeline.open_stages import OpenStages
from bertopt.pipeline.progress import ProgressCallback
from bertopt.pipeline.race import race
from bertopt.pipeline.sweeps import Sweeps
from bertopt.pipeline.twins import Twins
from bertopt.results import Case, Comparison, Invariance, Parity, Quality, Ranking
from bertopt.results.coverage import SWEEPING, Coverage
from bertopt.results.fidelity import Certificate, Rounding
from bertopt.runtime import replay
from bertopt.runtime.batch_limits import MAX_BATCH
from bertopt.runtime.weight_figures import Figures
from bertopt.spec import Text
from bertopt.stages import certificates
from bertopt.workers.client import Worker, Workers
from bertopt.workers.remote_session import RemoteSession
from bertopt.workers.remote_tokenizer import RemoteTokenizer

if TYPE_CHECKING:
    from bertopt.core import Array

#: Outputs of earlier stages are kept for their children up to this much memory; beyond it they are computed again.
OUTPUT_BYTES = 64 * 2**20


class Examiner:
    """Measures committed stages. Holds the probes, the outputs of earlier stages, and workers that are still needed."""

    def __init__(
        self, workers: Workers, reference: Path, device: Device, plan: MeasurementPlan, records: Path,
        machine: dict[str, Any], on_progress: ProgressCallback,
    ) -> None:  # fmt: skip
        self.workers, self.reference, self.device, self.plan, self.on_progress = workers, reference, device, plan, on_progress
        self.spec, self.texts = plan.spec, plan.texts
        self.tokenizer = RemoteTokenizer(workers, reference)
        sample, pairs = plan.sample()
        mask_token, mask_id = self.tokenizer.mask() if plan.spec.task == "fill-mask" else ("", None)
        sample = sample if mask_id is None else probes.masked(sample, mask_token)
        sample += probes.prompted(sample, read_prompts(reference).values() if plan.spec.task == "feature-extraction" else ())
        self.probes = [
            *probes.grid(plan.spec, plan.shapes, None),
            *probes.serving(plan.spec, MAX_BATCH), *padding_patterns.probes(plan.spec, MAX_BATCH),
            *probes.texts(plan.spec, self._encode, sample, mask_id=mask_id),
            *(probes.texts(plan.spec, self._encode, pairs, "pair") if pairs else []),
        ]
        base = stages.read_manifest(reference)
        self._of_checkpoint = (base.form, base.precision) == ("eager", "float32")
        (empty,) = self._encode([""])
        frame = framing.of_empty_text(empty["input_ids"][0])
        self.sweeps = Sweeps(plan.spec, reference.name, device, self._of_checkpoint, frame)
        self.twins = Twins(workers, reference, device, plan.spec, self._encode, self.probes, on_progress, frame)
        every: list[Text] = [*sample, *pairs]
        self.alone = [inputs for text in every for inputs in self._encode([text])]
        lengths = [inputs["input_ids"].shape[1] for inputs in self.alone]
        self.end_to_end = EndToEnd(plan.spec, sample, pairs, lengths, self._of_checkpoint)
        inputs = [
            identity(reference), probes.digest(self.probes), plan.texts.digest, plan.mix, device, plan.shapes, machine,
            asdict(plan.budget),
        ]  # fmt: skip
        self.records = Records(records, inputs)
        self.open_stages = OpenStages(workers, device)
        self._prints: dict[Path, str] = {}
        self._outputs: dict[Path, dict[str, ProbeOutputs]] = {}
        self._reference_predictions: list[list[float]] | None = None
        #: Each stage's outputs for the texts of `runtime.replay` when it was measured, in this run or an earlier one.
        self.replayed: dict[Path, replay.Answers | None] = {}
        #: Figures of its weights at that time.
        self.weights: dict[Path, Figures | None] = {}

    def measure(self, name: str, directory: Path, parent: Path | None) -> StageMeasurements:
        """Return everything measured of the stage in `directory`, now or recorded for the same inputs.

        `parent` is the stage it was built from, None for the reference. Raises Unsupported where this machine cannot open
        the stage, and what its worker raises.
        """
        names = [identity(directory), identity(parent) if parent else None]
        measurements = self.records.read(names)
        if measurements is None:
            measurements = self._measure(name, directory, parent)
            self.records.write(names, measurements)
        if parent is None:
            self._reference_predictions = measurements.predictions
        self.replayed[directory], self.weights[directory] = measurements.answers, measurements.weights
        return measurements

    def sweep(self, name: str, directory: Path, parent: Path) -> StageMeasurements:
        """Return the measurements of a stage that is to be delivered, with the figures of all coverage sweeps."""
        names = [identity(directory), identity(parent), "every sweep"]
        measurements = self.records.read(names)
        if measurements is None:
            covered = self._coverage(name, directory, self.open_stages.worker(directory), every=True)
            measurements = self.measure(name, directory, parent).model_copy(update={"coverage": covered})
            self.records.write(names, measurements)
        return measurements

    def with_peaks(self, measurements: StageMeasurements, directory: Path) -> StageMeasurements:
        """Return the measurements of a stage with its worker's peak memory until now, after all that it has run for other stages."""
        stats = self.open_stages.worker(directory).call("stats")
        peaks = {name: max(filter(None, (getattr(measurements, name), stats[name])), default=None) for name in ("peak_rss_bytes", "peak_gpu_bytes")}
        return measurements.model_copy(update=peaks)

    def sweeping(self) -> contextlib.AbstractContextManager[None]:
        """Run the reference on rows of the sweeps while the block builds a stage; only on a CPU, since builders for a GPU time kernels."""
        worker = self.open_stages.running(self.reference)
        if self.device == "cuda" or worker is None:
            return contextlib.nullcontext()
        return self.sweeps.ahead(worker)

    def show(self, compared: Parity) -> Parity:
        """Return the comparison with the text and tokens of its worst case."""
        case = parity.worst_case(compared.cases, compared.worst.metric)
        worst = worst_case.show(compared.worst, case, self.probes, self.tokenizer.word)
        return compared.model_copy(update={"worst": worst})

    def _encode(self, texts: Sequence[Text]) -> list[dict[str, Array]]:
        return [self.tokenizer.batch(texts)]

    def close(self) -> None:
        self.open_stages.close()
        self.tokenizer.close()

    def _measure(self, name: str, directory: Path, parent: Path | None) -> StageMeasurements:
        self.on_progress(f"{name}: opening")
        self._make_room({self.reference, parent, directory})
        worker = self.open_stages.worker(directory)
        self.on_progress(f"{name}: parity")
        # The reference too: the time that it takes is the first estimate of a step's.
        self._outputs_of(directory)
        cases, vs_parent, peak = self._parity(directory, parent) if parent is not None else ([], None, 0.0)
        covered = self._coverage(name, directory, worker, every=False) if parent is not None else None
        self.on_progress(f"{name}: invariance")
        steady = self._invariance(directory, worker)
        ranked = self._ranking(directory) if parent is not None else None
        rounding = self._rounding(name, directory, parent) if parent is not None else None
        predicted = self._predictions(name, worker)
        self.on_progress(f"{name}: latency")
        racing = {"stage": worker}
        if parent is not None:
            racing["reference"] = self.open_stages.worker(self.reference)
            if parent != self.reference:
                racing["parent"] = self.open_stages.worker(parent)
        timed, under_the_clock = race(racing, self.spec, self.plan.shapes, self.plan.mix, self.plan.budget)
        stats = worker.call("stats")
        self.on_progress(f"{name}: effects")
        # After memory was read: graph files are read again for these.
        effects = worker.call("effects")
        certificate = self._certificate(worker, directory, parent) if parent else None
        changed = self._print(directory) != self._print(parent) if parent else None
        return StageMeasurements(
            cases=[*cases, *under_the_clock], peak=peak, vs_parent=vs_parent, latency=timed, invariance=steady, ranking=ranked,
            rounding=rounding, proven=effects["proven"], certificate=certificate,
            quality=self._quality(predicted) if predicted else None, predictions=predicted,
            effects=effects["own"], placed=effects["placed"], changed=changed, coverage=covered,
            answers=worker.call("replay"), weights=worker.call("weights"), **stats,
        )  # fmt: skip

    def _make_room(self, needed: Container[Path | None]) -> None:
        """Close workers that are not `needed`, and drop outputs of such stages beyond `OUTPUT_BYTES`."""
        self.open_stages.close_others(needed)
        while len(self._outputs) > 2 and sum(map(_bytes, self._outputs.values())) > OUTPUT_BYTES:
            del self._outputs[next(path for path in self._outputs if path not in needed)]

    def _parity(self, directory: Path, parent: Path) -> tuple[list[Case], Comparison | None, float]:
        """Return the cases against the reference, the comparison with the parent, and the reference's largest output."""
        mine = self._outputs_of(directory)
        reference = self._outputs_of(self.reference)
        theirs = self._outputs_of(parent)
        usual = parity.scales(reference.values(), self.spec)

        def against(other: Mapping[str, ProbeOutputs]) -> list[Case]:
            run_by_both = [probe for probe in self.probes if probe.name in mine and probe.name in other]
            return [parity.compare(probe, self.spec, mine[probe.name], other[probe.name], usual) for probe in run_by_both]

        cases, between = against(reference), against(theirs)
        if not cases:
            raise Unsupported("no probe fits any of the engine's profiles; widen them")
        return cases, Comparison.over(between) if between else None, parity.peak(reference.values())

    def _print(self, directory: Path) -> str:
        if directory not in self._prints:
            self._prints[directory] = self.open_stages.worker(directory).call("fingerprint")
        return self._prints[directory]

    def _outputs_of(self, directory: Path) -> dict[str, ProbeOutputs]:
        """Return the outputs of a stage by probe name, for every probe that it can run."""
        if directory not in self._outputs:
            worker = self.open_stages.worker(directory)
            session = RemoteSession(worker)
            self._outputs[directory] = {probe.name: parity.answer(session, probe, self.spec) for probe in self._fitting(worker)}
        return self._outputs[directory]

    def _fitting(self, worker: Worker) -> list[Probe]:
        return [
            probe for probe in self.probes
            if worker.fits(probe.shape) and (not worker.packed or probes.packable(self.spec, probe))
        ]  # fmt: skip

    def _coverage(self, name: str, directory: Path, worker: Worker, every: bool) -> Coverage:
        self.on_progress(f"{name}: {SWEEPING if every else 'coverage'}")
        reference, precision = self.open_stages.worker(self.reference), stages.read_manifest(directory).precision
        found = self.sweeps.measure(directory, worker, reference, self._fitting(worker), every)
        texts = {coverage.END_TO_END: self.end_to_end.compare(worker, reference, precision)}
        if every and self.end_to_end.in_one_call:
            texts[coverage.IN_ONE_CALL] = self.end_to_end.compare(worker, reference, precision, in_one_call=True)
        return found.model_copy(update={"outputs": {**found.outputs, **texts}})

    def _invariance(self, directory: Path, worker: Worker) -> Invariance | None:
        assert worker.shapes is not None, "open comes first"
        precision = stages.read_manifest(directory).precision
        return invariance.measure(RemoteSession(worker), self.spec, self.alone, worker.shapes, precision=precision)

    def _ranking(self, directory: Path) -> Ranking | None:
        """Return how the embeddings of the probes' texts rank; None where the model gives no embeddings."""
        if self.spec.pooling is None:
            return None
        mine, theirs = self._outputs[directory], self._outputs[self.reference]
        names = [probe.name for probe in self.probes if probe.padding == "text" and probe.name in mine]
        if not names:
            return None
        output = self.spec.outputs[0]
        return ranking.measure(
            np.concatenate([mine[name].vectors[output] for name in names]),
            np.concatenate([theirs[name].vectors[output] for name in names]),
        )

    def _rounding(self, name: str, directory: Path, parent: Path) -> Rounding | None:
        """Return the comparison with the stage's twin on real texts; None for float32, and where the reference is not a checkpoint."""
        manifest = stages.read_manifest(directory)
        if manifest.precision == "float32" or not self._of_checkpoint:
            return None
        kept = stages.read_manifest(parent).precision == manifest.precision
        mine, reference = self._outputs[directory], self._outputs[self.reference]
        names = [probe.name for probe in self.probes if probe.padding in probes.REAL]
        return self.twins.compare(name, names, manifest, mine, reference, self._outputs[parent] if kept else None)

    def _certificate(self, worker: Worker, directory: Path, parent: Path) -> Certificate | None:
        """Return the comparison of the weights with the parent's; None where they cannot be compared."""
        made, other = stages.read_manifest(directory), stages.read_manifest(parent)
        beside = not certificates.comparable(made, other)
        if beside and certificates.unlike(made, other) is not None:
            return None
        # One key: the same passes over the same checkpoint, from the same texts with the same libraries.
        same_build = bool(made.key) and made.key == other.key
        found = worker.call("certify", parent=str(parent.resolve()), beside=beside, same_build=same_build)
        return Certificate.model_validate(found)

    def _predictions(self, name: str, worker: Worker) -> list[list[float]] | None:
        if not labelled.measurable(self.spec, self.texts):
            return None
        self.on_progress(f"{name}: {len(self.texts.texts)} labelled texts")
        return labelled.predictions(worker, self.spec, self.texts)

    def _quality(self, predicted: list[list[float]]) -> Quality:
        return labelled.quality(self.spec, self.texts, predicted, self._reference_predictions)


def _bytes(outputs: dict[str, ProbeOutputs]) -> int:
    return sum(array.nbytes for of_probe in outputs.values() for array in of_probe.vectors.values())
