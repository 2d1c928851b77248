"""What is measured of one stage: numbers without verdicts. `gates.judge` holds them against limits."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from bertopt.results import Case, Comparison, Invariance, Latency, Quality, Ranking
from bertopt.results.coverage import Coverage
from bertopt.results.fidelity import Certificate, Rounding


class StageMeasurements(BaseModel, extra="forbid", frozen=True, ser_json_inf_nan="strings"):
    """Everything measured of one stage; what was not measured is None or empty. Verdicts are not kept: limits may change."""

    cases: list[Case] = []
    """Parity with the reference, a case for each probe; empty for the reference itself."""
    peak: float = 0.0
    """The largest element of the reference's outputs for the probes."""
    vs_parent: Comparison | None = None
    latency: list[Latency] = []
    invariance: Invariance | None = None
    ranking: Ranking | None = None
    rounding: Rounding | None = None
    """Against the twin; None for float32."""
    proven: float | None = None
    """Share of the products' weights that are in the claimed precision and used; None for float32, and where the runtime does not say."""
    certificate: Certificate | None = None
    quality: Quality | None = None
    predictions: list[list[float]] | None = None
    """For each labelled text, as `task_metrics.predictions` encodes them: later stages are compared with the reference's."""
    effects: dict[str, tuple[int, int]] = {}
    """What the committed model shows of its pass: counts expected and seen."""
    placed: dict[str, tuple[int, int]] = {}
    """The same for effects that do not depend on the pass: where the runtime runs the model, and in which precision."""
    changed: bool | None = None
    """Whether the committed model is another than its parent's. None for the reference."""
    facts: dict[str, Any] = {}
    peak_rss_bytes: int | None = None
    peak_gpu_bytes: int | None = None
    coverage: Coverage | None = None
    """None for the reference itself."""
    answers: list[list[list[float]]] | None = None
    """Outputs for the texts of `runtime.replay`, which the delivered copy must give too. None where the runtime is not bertopt's."""
    weights: dict[str, list[float]] | None = None
    """Figures of each tensor of a torch network, which what is delivered must have too: see `runtime.weight_figures`."""
