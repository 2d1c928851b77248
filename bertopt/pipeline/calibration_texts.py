"""Whether the recipe's texts were enough for the ranges of static INT8."""

from __future__ import annotations

from collections.abc import Sequence

from bertopt.passes import registry
from bertopt.recipe.parser import Step
from bertopt.results import Stage

#: With fewer texts, ranges cut off much of what others need: `error_ratio_max` then refuses right passes.
FEWEST = 8


def warnings(steps: Sequence[Step], rows: Sequence[Stage], texts: int) -> list[str]:
    """Return a warning for each stage whose ranges come from so few texts that they may not fit others."""
    if texts >= FEWEST:
        return []
    roundings = {step.name: registry.int8_rounding(step.pass_) for step in steps}
    calibrated = [row.name for row in rows if row.precision == "int8" and (how := roundings.get(row.name)) and how.scales == "static"]
    return [
        f"the INT8 ranges of '{name}' come from {texts} text{'' if texts == 1 else 's'} of inputs.texts and may not fit others, which shows as "
        f"error_ratio; give at least {FEWEST}, better a hundred"
        for name in calibrated
    ]
