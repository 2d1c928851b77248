"""Options of a predictor's answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from bertopt.core import Spec
from bertopt.errors import UsageError
from bertopt.runtime.entities import Aggregation
from bertopt.runtime.task_outputs import TopK


@dataclass(frozen=True)
class AnswerOptions:
    """How answers are worded, and how long texts are handled."""

    top_k: TopK = "default"
    aggregation_strategy: Aggregation = "none"
    prompt_name: str | None = None
    stride: int | None = None

    def check(self, spec: Spec) -> None:
        """Raise UsageError for an option that the task does not have, or an invalid value."""
        if self.top_k != "default" and spec.task not in ("text-classification", "fill-mask"):
            raise UsageError(f"top_k goes with text-classification and fill-mask; the model's task is {spec.task}: leave it out")
        if self.top_k != "default":
            check_most("top_k", self.top_k)
        if self.aggregation_strategy not in get_args(Aggregation):
            raise UsageError(
                f"aggregation_strategy must be one of {', '.join(get_args(Aggregation))}; got {self.aggregation_strategy!r}"
            )
        if self.aggregation_strategy != "none" and spec.task != "token-classification":
            raise UsageError(f"aggregation_strategy goes with token-classification; the model's task is {spec.task}: leave it out")
        if self.stride is not None:
            self._check_stride(spec)

    def _check_stride(self, spec: Spec) -> None:
        if spec.task not in ("question-answering", "token-classification"):
            raise UsageError(f"stride goes with question-answering and token-classification; the model's task is {spec.task}: leave it out")
        if isinstance(self.stride, bool) or not isinstance(self.stride, int) or self.stride < 0:
            raise UsageError(f"stride must be a whole number of tokens from 0, or None to have long texts cut off; got {self.stride!r}")
        if spec.task == "token-classification" and self.aggregation_strategy == "none":
            raise UsageError("stride goes with entities, which are merged where windows overlap: give aggregation_strategy too, such as 'simple'")


DEFAULTS = AnswerOptions()


def check_most(name: str, value: object) -> None:
    """Raise UsageError where `value` is neither None nor a whole number from 1."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise UsageError(f"{name} must be a whole number from 1, or None for all; got {value!r}")
