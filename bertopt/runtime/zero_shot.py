"""Classify texts by labels chosen at run time, with a model of natural language inference (NLI).

Each label becomes a hypothesis, "This example is {label}.", and the model says how far the text entails it. Scores are those of
transformers' zero-shot pipeline. N texts, L labels, C classes of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bertopt.errors import UsageError
from bertopt.runtime import task_outputs
from bertopt.runtime.text_inputs import as_list, check_unicode
from bertopt.runtime.tokenization import Tokenizer
from bertopt.spec import Spec

if TYPE_CHECKING:
    from bertopt.core import Array

TEMPLATE = "This example is {}."


@dataclass(frozen=True)
class ZeroShot:
    """The labels that texts are classified by, and how. Raises UsageError and TypeError for those that cannot be used."""

    labels: tuple[str, ...]
    template: str
    multi_label: bool
    entailed: int
    """The class of the model that says that a text entails the hypothesis."""
    against: int
    """The class that `multi_label` weighs it against: the first, or the last where the first says that the text entails it."""

    @classmethod
    def of(cls, spec: Spec, labels: Iterable[str], template: str = TEMPLATE, multi_label: bool = False) -> ZeroShot:
        entailed = next((number for number, name in enumerate(spec.labels) if name.lower().startswith("entail")), None)
        if spec.task != "text-classification" or entailed is None:
            have = f"; its labels are {', '.join(map(ascii, spec.labels[:5]))}" if spec.labels else ""
            raise UsageError(f"zero-shot classification needs a classifier of natural language inference, with a label 'entailment'; the model's task is {spec.task}{have}")
        if isinstance(labels, str):
            raise TypeError("candidate_labels must be a list of strings; got one string: put it in a list")
        listed = as_list(labels)
        if not len(listed):
            raise UsageError("candidate_labels: expected at least one label; got none")
        for number, label in enumerate(listed):
            if not isinstance(label, str):
                raise TypeError(f"candidate_labels[{number}] must be a string; got {type(label).__name__}")
            check_unicode(label, f"candidate_labels[{number}]")
        # Not `format`, which reads attributes and fills widths that a client may choose.
        if not isinstance(template, str) or template.count("{}") != 1 or {*template.replace("{}", "")} & {*"{}"}:
            raise UsageError(f"hypothesis_template must have one {{}}, where the label goes, and no other braces; got {ascii(template)[:100]}")
        check_unicode(template, "hypothesis_template")
        return cls(tuple(map(str, listed)), template, multi_label, entailed, 0 if entailed else -1)

    @property
    def hypotheses(self) -> list[str]:
        return [self.template.replace("{}", label) for label in self.labels]

    def pairs(self, texts: Sequence[str]) -> list[tuple[str, str]]:
        """Return each text with the hypothesis of each label: N × L pairs, those of a text one after the other."""
        hypotheses = self.hypotheses
        return [(text, hypothesis) for text in texts for hypothesis in hypotheses]

    def check_length(self, tokenizer: Tokenizer) -> None:
        """Raise UsageError for a hypothesis of which a long text might leave only a part."""
        most = (tokenizer.limit - tokenizer.fast.num_special_tokens_to_add(is_pair=True)) // 2
        encoded = tokenizer.whole.encode_batch_fast(self.hypotheses, add_special_tokens=False)
        for number, one in enumerate(encoded):
            if len(one) > most:
                raise UsageError(f"candidate_labels[{number}]: a hypothesis may have at most {most} tokens, half of what the model takes; got {len(one)}: choose a shorter label or template")

    def scores(self, logits: Array) -> Array:
        """Return the scores [N, L] of logits [N × L, C]: over the labels they sum to 1; with `multi_label`, or for one label, each is by itself."""
        of_each = logits.reshape(-1, len(self.labels), logits.shape[-1])
        if self.multi_label or len(self.labels) == 1:
            return np.asarray(task_outputs.softmax(of_each[..., [self.against, self.entailed]])[..., 1])
        return task_outputs.softmax(of_each[..., self.entailed])

    def answers(self, logits: Array) -> list[list[dict[str, Any]]]:
        """Return, for each text, its labels with their scores, best first."""
        scores = self.scores(logits)
        order = np.argsort(-scores, axis=1, kind="stable")
        return [[{"label": self.labels[i], "score": float(row[i])} for i in best] for best, row in zip(order.tolist(), scores, strict=True)]
