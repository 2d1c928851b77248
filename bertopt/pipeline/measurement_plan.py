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
from bertopt.runtime import text_inputs
from bertopt.spec import Text

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

    def sample(self) -> tuple[list[str], list[tuple[str, str]]]:
        """Return the texts and pairs to probe with: a seeded choice of the recipe's, and the built-in ones, of which every second
        where the recipe has `OWN_TEXTS` or more."""
        asked = self.texts.asked(self.spec.task)
        if not self.texts.source:
            texts, own = list(self.texts.texts), []
        else:
            chosen = [asked[i] for i in sorted(np.random.default_rng(0).permutation(len(asked))[:OWN_TEXTS])]
            built_in = (self.texts.built_in or probes.built_in_texts())[:: 1 if len(chosen) < OWN_TEXTS else 2]
            texts = list(dict.fromkeys([*(text for text in chosen if isinstance(text, str)), *built_in]))
            own = list(dict.fromkeys(text for text in chosen if not isinstance(text, str)))
        return texts, [*own, *probes.pairs(self.spec, texts)]


def mix_texts(spec: Spec, texts: Texts) -> tuple[Text, ...]:
    """Return the texts and pairs to time end to end, taken evenly; texts without a question are asked one."""
    every = text_inputs.asked(spec.task, texts.texts) if texts.second is None else texts.asked(spec.task)
    return tuple(every[:: max(1, len(every) // MIX_TEXTS)][:MIX_TEXTS])
