"""Hold a stage's speed, memory and size against the limits that a recipe states. There are none by default."""

from __future__ import annotations

from bertopt.checks.measurements import StageMeasurements
from bertopt.results import Failure, Latency, Limits

MB = 1e6


def failures(measurements: StageMeasurements, size_bytes: int | None, limits: Limits) -> list[Failure]:
    """Return every stated limit that the stage misses, or that was not measured.

    `speedup_min` is missed where the whole 95 % interval of the end-to-end speed-up lies below it, and where the timing is
    void; see `undecided` for intervals that contain it. The other figures have no interval and are compared as they are.
    """
    texts = _texts(measurements.latency)
    found = []
    if limits.speedup_min is not None:
        ratio = texts.vs_reference if texts else None
        what = f"the end-to-end speed-up must be at least {limits.speedup_min:g}"
        if ratio is None:
            warning = (texts.warning if texts else None) or "it was not timed"
            found.append(Failure(gate="latency", metric=None, text=f"{what}; it is not known: {warning}"))
        elif not ratio.high >= limits.speedup_min:
            text = f"{what}; got {ratio.ratio:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
            found.append(Failure(gate="latency", metric="speedup_min", text=text))
    measured = (
        ("mix_p50_ms_max", "latency", "the median time of the timed texts", "ms", texts.p50_ms if texts else None),
        ("peak_rss_max", "resources", "the peak memory", "MB", _mb(measurements.peak_rss_bytes)),
        ("size_max", "resources", "the size of the files", "MB", _mb(size_bytes)),
    )
    for metric, gate, what, unit, value in measured:
        limit = getattr(limits, metric)
        if limit is not None and (value is None or not value <= limit):
            got = "it was not measured" if value is None else f"got {value:.4g} {unit}"
            name = None if value is None else metric
            found.append(Failure(gate=gate, metric=name, text=f"{what} may be at most {limit:g} {unit}; {got}"))
    return found


def undecided(latency: list[Latency], limits: Limits) -> str | None:
    """Return a sentence where the interval contains `speedup_min`, so that the timing neither keeps nor misses it."""
    texts = _texts(latency)
    ratio = texts.vs_reference if texts else None
    if limits.speedup_min is None or ratio is None or not ratio.low < limits.speedup_min <= ratio.high:
        return None
    return (
        f"speedup_min {limits.speedup_min:g} is neither kept nor missed: the speed-up is {ratio.ratio:.3f} "
        f"[{ratio.low:.3f}, {ratio.high:.3f}]; raise timing.mix_s, or time on a quieter machine"
    )


def _texts(latency: list[Latency]) -> Latency | None:
    return next((case for case in latency if case.kind == "mix"), None)


def _mb(size: int | None) -> float | None:
    return None if size is None else size / MB
