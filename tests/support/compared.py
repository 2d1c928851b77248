"""Probes, and two sessions of one model compared on them as the parity gate does."""

from __future__ import annotations

from collections.abc import Sequence

from bertopt.checks import parity, probes
from bertopt.checks.probes import Probe
from bertopt.core import Session
from bertopt.results import Case
from bertopt.spec import Spec


def probe(of: Spec, padding: str, shape: tuple[int, int] = (4, 6)) -> Probe:
    return next(each for each in probes.grid(of, [shape], None) if each.padding == padding and each.shape == shape)


def cases(ours: Session, theirs: Session, spec: Spec, shapes: Sequence[tuple[int, int]]) -> list[Case]:
    """Return how far `ours` is from `theirs`, in every padding pattern of each shape [B, S]."""
    return [
        parity.compare(probe, spec, parity.answer(ours, probe, spec), parity.answer(theirs, probe, spec))
        for probe in probes.grid(spec, shapes, None)
    ]
