"""What every stage of a run is measured on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from bertopt.checks import probes
from bertopt.core import Spec
from bertopt.pipeline.race import Budget
from bertopt.recipe.texts import Texts
from bertopt.runtime.tokenization import Text

#: Texts in one turn of the mix, taken evenly from the recipe's.
MIX_TEXTS = 8
#: Most of the recipe's own texts that are probed, besides the built-in ones.
OWN_TEXTS = 96


@dataclass(frozen=True)
class MeasurementPlan:
    """What every stage is measured on."""

    spec: Spec
    shapes: tuple[tuple[int, int], ...]
    """[B, S]"""
    texts: Texts
    mix: tuple[Text, ...]
    """Texts of one turn of the end-to-end timing."""
    budget: Budget

    @classmethod
    def of(cls, spec: Spec, shapes: Sequence[tuple[int, int]], texts: Texts, budget: Budget) -> Self:
        return cls(spec, tuple(shapes), texts, mix_texts(spec, texts), budget)

    def sample(self) -> list[str]:
        """Return the texts to probe with: a seeded choice of the recipe's, and the built-in ones, of which every second where the
        recipe has `OWN_TEXTS` or more."""
        if not self.texts.source:
            return list(self.texts.texts)
        chosen = np.random.default_rng(0).permutation(len(self.texts.texts))[:OWN_TEXTS]
        built_in = probes.built_in_texts()[:: 1 if len(chosen) < OWN_TEXTS else 2]
        return list(dict.fromkeys([*(self.texts.texts[i] for i in sorted(chosen)), *built_in]))


def mix_texts(spec: Spec, texts: Texts) -> tuple[Text, ...]:
    """Return the texts to time end to end, taken evenly; pairs where the model answers questions."""
    paired = spec.task == "question-answering"
    step = max(1, len(texts.texts) // MIX_TEXTS)
    return tuple(("what?", text) if paired else text for text in texts.texts[::step])[:MIX_TEXTS]
