"""The `parameters` of a request, as Hugging Face's clients name what they say of a task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from bertopt.core import Spec
from bertopt.errors import UsageError
from bertopt.runtime.answer_options import DEFAULTS, AnswerOptions
from bertopt.runtime.task_outputs import MAX_ANSWER_TOKENS
from bertopt.serve.errors import RequestError, from_validation
from bertopt.serve.payloads import PredictParameters

#: Most tokens that are given for one mask: an answer of a whole vocabulary for each of many masks takes gigabytes.
MOST_FILLINGS = 100
#: Parameters that have one value here, and that value.
_FIXED = {
    "targets": None, "max_question_len": None, "max_seq_len": None, "max_answer_len": MAX_ANSWER_TOKENS, "align_to_words": False,
    "handle_impossible_answer": False,
}  # fmt: skip
#: Parameters that one task alone has.
_OF_TASK = {"doc_stride": "question-answering", "ignore_labels": "token-classification", "function_to_apply": "text-classification"}


def answer_options(asked: PredictParameters, spec: Spec) -> AnswerOptions:
    """Return how answers are to be given. Raises RequestError (422) for what the model's task does not have, or bertopt does otherwise."""
    for name, only in _FIXED.items():
        if getattr(asked, name) not in (None, only):
            expected = "none" if only is None else str(only).lower()
            raise _refused(name, f": expected {expected}; got {ascii(getattr(asked, name))[:40]}: leave it out")
    for name, task in _OF_TASK.items():
        if getattr(asked, name) is not None and spec.task != task:
            raise _refused(name, f" goes with {task}; the model's task is {spec.task}: leave it out")
    if asked.stride is not None and asked.doc_stride is not None:
        raise _refused("doc_stride", " is another name of stride: give one of both")
    top_k: Any = "default" if asked.top_k is None or (asked.top_k == 1 and spec.task == "question-answering") else asked.top_k
    if spec.task == "fill-mask" and top_k != "default" and top_k > MOST_FILLINGS:
        raise _refused("top_k", f": expected at most {MOST_FILLINGS}; got {top_k}")
    stride = asked.doc_stride if asked.stride is None else asked.stride
    how = AnswerOptions(top_k, asked.aggregation_strategy or DEFAULTS.aggregation_strategy, stride=stride)
    try:
        how.check(spec)
    except UsageError as error:
        raise RequestError(422, f"parameters.{error}", "parameters") from error
    return how


def from_mapping(parameters: Mapping[str, Any]) -> PredictParameters:
    """Return those of KServe's `parameters` that are a task's. Raises RequestError (422) for a wrong kind of value."""
    try:
        return PredictParameters.model_validate(dict(parameters))
    except ValidationError as error:
        wrong = from_validation(error)
        raise RequestError(422, f"parameters.{wrong.message}", "parameters") from error


def _refused(name: str, why: str) -> RequestError:
    return RequestError(422, f"parameters.{name}{why}", f"parameters.{name}")
