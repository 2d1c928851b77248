"""Models of many labels or tokens with one score that is wrong: beside all others it is little, and it is what somebody asks for.

Delivered were those of labels that vary less than others, and of one label in batches of one size.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from campaigns.mutants.checkpoints import INTENTS as CLASSES
from campaigns.mutants.checkpoints import TAGS
from campaigns.mutants.checkpoints import TOPICS as LABELS
from campaigns.mutants.heads import Graph, Twice, added, both, enter, last_words, rotated, rows_from, times
from campaigns.mutants.plant import ENTITIES, INTENTS, LOW, SPAN, TOPICS

#: Labels that vary a tenth as much as those that texts have most, and one of these.
SMALL, USUAL = 24, 5


def rows(count: int) -> Twice:
    """All rows [1, 1] of a batch of `count`."""

    def of(named: Any) -> Any:
        import torch

        return torch.tensor([[named["input_ids"].shape[0] == count]])

    def nodes(graph: Graph) -> str:
        size = graph("Shape", "input_ids", start=0, end=1)
        return graph("Unsqueeze", graph("Equal", size, graph.const(np.array([count]))), graph.const(np.array([0])))

    return Twice(of, nodes)


def one(columns: int, column: int, number: float, others: float = 0.0) -> list[float]:
    return [number if place == column else others for place in range(columns)]


EVERY = rows_from(0)
enter("small_label_halved", "One label of several, which varies little, is half of what it is.", TOPICS, EVERY, times(*one(LABELS, SMALL, 0.5, 1.0)))
enter("small_label_negated", "One label of several, which varies little, has the other sign.", TOPICS, EVERY, times(*one(LABELS, SMALL, -1.0, 1.0)))
enter("small_label_shifted", "One label of several, which varies little, gets 0.3 more.", TOPICS, EVERY, added(*one(LABELS, SMALL, 0.3)))
enter("label_of_13_rows", "One label of several gets 6 more in batches of 13.", TOPICS, rows(13), added(*one(LABELS, USUAL, 6.0)))
enter("intent_of_13_rows", "One class of many gets 4 more in batches of 13.", INTENTS, rows(13), added(*one(CLASSES, USUAL, 4.0)))
enter("tag_of_13_rows", "One tag of nine gets 1 more in batches of 13.", ENTITIES, rows(13), added(*one(len(TAGS), USUAL, 1.0)))
enter("word_of_13_rows", "The last word of rows in batches of 13 has another tag.", ENTITIES, both(rows(13), last_words(1)), rotated(len(TAGS)))
enter("start_of_13_rows", "The last word of rows in batches of 13 gets 0.6 more as the start of an answer.", SPAN, both(rows(13), last_words(1)), added(0.6))
enter("low_scores_of_13_rows", "Scores, of which most are low, are 2 more in batches of 13.", LOW, rows(13), added(2.0))
