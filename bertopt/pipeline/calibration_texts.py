"""Warn where static INT8 was calibrated on too few texts."""

from __future__ import annotations

from collections.abc import Sequence

from bertopt.passes import registry
from bertopt.recipe.parser import Step
from bertopt.results import Stage

#: With fewer texts, ranges clip the activations of other texts: correct passes then miss `error_ratio_max`.
FEWEST = 8


def warnings(steps: Sequence[Step], rows: Sequence[Stage], texts: int) -> list[str]:
    """Return a warning for each stage with static INT8 if there are fewer than `FEWEST` texts."""
    if texts >= FEWEST:
        return []
    roundings = {step.name: registry.int8_rounding(step.pass_) for step in steps}
    calibrated = [row.name for row in rows if row.precision == "int8" and (how := roundings.get(row.name)) and how.scales == "static"]
    return [
        f"the INT8 ranges of '{name}' come from {texts} text{'' if texts == 1 else 's'} of inputs.texts and may not fit others, which shows as "
        f"error_ratio; give at least {FEWEST}, better a hundred"
        for name in calibrated
    ]
