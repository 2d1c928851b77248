"""Compare a stage's speed, memory and size with the limits that a recipe states. There are none by default."""

from __future__ import annotations

from bertopt.checks.measurements import StageMeasurements
from bertopt.results import Failure, Gate, Latency, Limits

MB = 1e6
#: What each upper limit is about, and its unit.
_WORDS = {
    "mix_p50_ms_max": ("the median time of the timed texts", "ms"), "peak_rss_max": ("the peak memory", "MB"),
    "size_max": ("the size of the files", "MB"),
}  # fmt: skip


def failures(measurements: StageMeasurements, size_bytes: int | None, limits: Limits) -> list[Failure]:
    """Return every stated limit that the stage misses, or whose figure was not measured.

    `speedup_min` holds where the whole 95 % interval of the end-to-end speed-up is at least that; an interval that contains the limit does
    not pass (state 0.98 to accept a stage that is as fast as the checkpoint). A void timing cannot be waived. The other figures have no
    interval. Not looked at: single shapes, p90 and p99, GPU memory, other machines.
    """
    texts = _texts(measurements.latency)
    found = []
    if limits.speedup_min is not None:
        ratio = texts.vs_reference if texts else None
        what = f"the end-to-end speed-up must be at least {limits.speedup_min:g}"
        if ratio is None:
            warning = (texts.warning if texts else None) or "it was not timed"
            found.append(Failure(gate="latency", metric=None, text=f"{what}; it is not known: {warning}"))
        elif not ratio.low >= limits.speedup_min:
            text = f"{what}; got {ratio.ratio:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
            if ratio.high >= limits.speedup_min:
                text += ", which does not show it: raise timing.mix_s, or time on a quieter machine"
            found.append(Failure(gate="latency", metric="speedup_min", text=text))
    for metric, gate, value in measured(measurements, size_bytes):
        limit = getattr(limits, metric)
        if metric in _WORDS and limit is not None and (value is None or not value <= limit):
            what, unit = _WORDS[metric]
            got = "it was not measured" if value is None else f"got {value:.4g} {unit}"
            name = None if value is None else metric
            found.append(Failure(gate=gate, metric=name, text=f"{what} may be at most {limit:g} {unit}; {got}"))
    return found


def measured(measurements: StageMeasurements, size_bytes: int | None) -> list[tuple[str, Gate, float | None]]:
    """Return each limit of speed, memory and size with its gate and the measured figure, None where there is none."""
    texts = _texts(measurements.latency)
    return [
        ("speedup_min", "latency", texts.vs_reference.low if texts and texts.vs_reference else None),
        ("mix_p50_ms_max", "latency", texts.p50_ms if texts else None),
        ("peak_rss_max", "resources", _mb(measurements.peak_rss_bytes)),
        ("size_max", "resources", _mb(size_bytes)),
    ]


def _texts(latency: list[Latency]) -> Latency | None:
    return next((case for case in latency if case.kind == "mix"), None)


def _mb(size: int | None) -> float | None:
    return None if size is None else size / MB
