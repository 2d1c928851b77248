"""Made-up stages and reports as a run leaves them: measured, judged, and compared with a baseline."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from bertopt.checks import gates
from bertopt.pipeline import rows
from bertopt.pipeline.rows import StageBuild
from bertopt.results import Latency, Limits, Quality, Ratio, Report, Stage, Waiver
from tests.support.measured import measured

BF16 = Limits(rel_l2=0.06, cosine_min=0.999, label_flips_max=0.02)
TODAY = datetime.date(2026, 6, 1)
HERE = {"cpu": "a CPU", "cores": 2, "isa": ["avx2"], "packages": {"torch": "2.13"}, "python": "3.12"}


def row(
    name: str = "bf16", limits: Limits | None = None, parent: float = 1e-3, waivers: Sequence[Waiver] = (),
    ancestors: Mapping[str, float] | None = None, **changed: Any,
) -> Stage:  # fmt: skip
    """A measured and judged stage; `changed` are figures of its one parity case, or measurements."""
    quality = Quality(metric="accuracy", value=0.9, reference=0.9, change=0.0, n=100)
    fields = {"latency": [timed(2.0), timed(2.0, None)], "quality": quality, "peak_rss_bytes": 2**30, **changed}
    measurements = measured(parent, **fields)
    outcome = gates.judge(
        name, measurements, limits or BF16, changes={"tensors": 1}, today=TODAY,
        waivers=waivers, ancestors=ancestors,
    )  # fmt: skip
    build = StageBuild("eager", "bfloat16", {}, 1.0, 100 * 2**20)
    return rows.make(1, name, outcome, build, measurements, after="reference")


def timed(ratio: float, batch: int | None = 8, spread: float = 0.02, ms: float = 10.0) -> Latency:
    versus = Ratio(ratio=ratio, low=ratio - spread, high=ratio + spread)
    return Latency(kind="shape" if batch else "mix", batch=batch, sequence=batch and 128, n=9, p50_ms=ms, p90_ms=ms,
                   p99_ms=None, texts_per_s=1.0, vs_reference=versus)  # fmt: skip


def report(*rows: Stage, **changed: Any) -> Report:
    first = Stage(index=0, name="reference", status="ok", form="eager", precision="float32", size_bytes=200 * 2**20)
    fields: dict[str, Any] = {
        "bertopt_version": "1", "recipe": {"model": "org/name"}, "environment": HERE,
        "model": {"source": "org/name", "sha256": "0", "family": "bert", "task": "text-classification", "warnings": []},
    }  # fmt: skip
    return Report(**{**fields, **changed}, stages=[first, *rows])
