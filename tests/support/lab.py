"""Tiny models after some passes, held to the limits of their precision."""

from __future__ import annotations

import functools
from typing import Any

from bertopt.checks import parity, probes
from bertopt.checks.parity import DEFAULT_LIMITS, ProbeOutputs
from bertopt.core import Eager, Model, Pass
from bertopt.results import Limits
from bertopt.sessions import open_session
from tests.support.built import Built

AnyPass = Pass[Any, Any]
#: The defaults, but: of 34 texts of a random model with three close labels one flip is 0.029 already, so two may
#: happen; and bf16 vectors of three numbers have been 0.99899 apart.
SMALL = Limits(label_flips_max=0.06)
LIMITS = {
    "float32": DEFAULT_LIMITS["float32"],
    "float16": SMALL.over(DEFAULT_LIMITS["float16"]),
    "bfloat16": Limits(label_flips_max=0.06, cosine_min=0.998).over(DEFAULT_LIMITS["bfloat16"]),
    "int8": SMALL.over(DEFAULT_LIMITS["int8"]),
}


class Lab(Built):
    """Models after some passes, and the answers of the references, each computed once."""

    def reference(self, family: str) -> Eager:
        model: Eager = self.build(family).model
        return model

    def answers(self, model: Model) -> dict[str, ProbeOutputs]:
        session = open_session(model, threads=1)
        grid = probes.grid(model.spec, [(2, 8), (3, 16)], None)
        return {probe.name: parity.answer(session, probe, model.spec) for probe in grid}

    @functools.cache  # noqa: B019
    def _reference_answers(self, family: str) -> dict[str, ProbeOutputs]:
        return self.answers(self.reference(family))

    def check(self, family: str, model: Model) -> None:
        mine, theirs = self.answers(model), self._reference_answers(family)
        found = [
            parity.compare(probe, model.spec, mine[probe.name], theirs[probe.name])
            for probe in probes.grid(model.spec, [(2, 8), (3, 16)], None)
        ]
        assert {case.padding for case in found} == set(probes.PADDINGS)
        verdict = parity.judge(found, LIMITS[model.precision], None)
        assert verdict.passed, verdict.worst
