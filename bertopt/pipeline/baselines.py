"""Time the checkpoint on a GPU with TF32 and in bfloat16, in plain torch: speed-ups over fp32 without TF32 look too good."""

from __future__ import annotations

from pathlib import Path

from bertopt.checks.measurements import StageMeasurements
from bertopt.core import Device
from bertopt.errors import BertoptError
from bertopt.pipeline.measurement_cache import Records
from bertopt.pipeline.measurement_plan import MeasurementPlan
from bertopt.pipeline.progress import ProgressCallback
from bertopt.pipeline.race import race
from bertopt.results import Latency
from bertopt.workers.client import Workers

#: Eager, with the reference's attention: matrix products in TF32, or the network cast to bfloat16.
KINDS = ("tf32", "bfloat16")


def measure(
    workers: Workers, reference: Path, device: Device, plan: MeasurementPlan, records: Records,
    on_progress: ProgressCallback,
) -> tuple[dict[str, list[Latency]], list[str]]:  # fmt: skip
    """Return the figures of each baseline against the fp32 reference, and a warning for each that could not be timed.

    Their outputs are not checked: they are for comparison and never delivered.
    """
    found, warnings = {}, []
    for kind in KINDS:
        names = [f"baseline {kind}", reference.name]
        measured = records.read(names)
        if measured is None:
            on_progress(f"baseline {kind}: latency")
            try:
                measured = _measure(workers, reference, device, plan, kind)
            except BertoptError as error:
                warnings.append(f"the checkpoint as torch runs it in {kind} was not timed: {error}")
                continue
            records.write(names, measured)
        found[kind] = measured.latency
    return found, warnings


def _measure(
    workers: Workers, reference: Path, device: Device, plan: MeasurementPlan, kind: str
) -> StageMeasurements:
    with workers.start() as baseline, workers.start() as usual:
        usual.open(reference, device)
        baseline.open(reference, device)
        baseline.call("reduce", kind=kind)
        timed, _ = race({"stage": baseline, "reference": usual}, plan.spec, plan.shapes, plan.mix, plan.budget)
        stats = baseline.call("stats")
    return StageMeasurements(latency=timed, **stats)
