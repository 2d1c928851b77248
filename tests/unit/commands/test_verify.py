"""Verification of an artefact: what it says of its timing."""

from __future__ import annotations

from bertopt.commands.verify import timed_in_full
from bertopt.report import formatting


def test_a_quick_export_does_not_make_a_verification_quick() -> None:
    exported = {"model": "org/name", "timing": {"quick": True, "mix_s": 2.5}}
    found = timed_in_full(exported)
    assert formatting.is_quick(exported) and not formatting.is_quick(found)
    assert found["timing"]["mix_s"] == 2.5 and timed_in_full({}) == {}
