"""The `parameters` of a request, as Hugging Face's clients name what they say of a task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from bertopt.core import Spec
from bertopt.errors import UsageError
from bertopt.runtime.answer_options import DEFAULTS, AnswerOptions
from bertopt.runtime.task_outputs import MAX_ANSWER_TOKENS
from bertopt.runtime.zero_shot import TEMPLATE, ZeroShot
from bertopt.serve.errors import RequestError, from_validation
from bertopt.serve.payloads import PredictParameters

#: Most tokens that are given for one mask: an answer of a whole vocabulary for each of many masks takes gigabytes.
MOST_FILLINGS = 100
#: Parameters that have one value here, and that value.
_FIXED = {
    "targets": None, "max_question_len": None, "max_seq_len": None, "max_answer_len": MAX_ANSWER_TOKENS, "align_to_words": False,
    "handle_impossible_answer": False,
}  # fmt: skip
#: Parameters that go with `candidate_labels`.
_WITH_LABELS = ("hypothesis_template", "multi_label")
#: Parameters that one task alone has.
_OF_TASK = {"doc_stride": "question-answering", "ignore_labels": "token-classification", "function_to_apply": "text-classification"}


def answer_options(asked: PredictParameters, spec: Spec) -> AnswerOptions:
    """Return how answers are to be given. Raises RequestError (422) for what the model's task does not have, or bertopt does otherwise."""
    for name, only in _FIXED.items():
        if getattr(asked, name) not in (None, only):
            expected = "none" if only is None else str(only).lower()
            raise _refused(name, f": expected {expected}; got {ascii(getattr(asked, name))[:40]}: leave it out")
    for name in ("candidate_labels", *_WITH_LABELS):
        if getattr(asked, name) is not None:
            raise _refused(name, " goes with candidate_labels, for / and /predict of a zero-shot classifier: leave it out")
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


def zero_shot_labels(asked: PredictParameters, spec: Spec) -> ZeroShot:
    """Return the labels that texts are to be classified by. Raises RequestError (422) for those that cannot be used, for a model that is not
    made for it, and for parameters beside them that go with other answers."""
    others = set(asked.model_fields_set) - {"candidate_labels", *_WITH_LABELS}
    for name in sorted(others):
        if getattr(asked, name) not in (None, _FIXED.get(name)):
            raise _refused(name, " does not go with candidate_labels: leave one of both out")
    template = TEMPLATE if asked.hypothesis_template is None else asked.hypothesis_template
    try:
        return ZeroShot.of(spec, asked.candidate_labels or (), template, bool(asked.multi_label))
    except UsageError as error:
        named = next((name for name in ("candidate_labels", "hypothesis_template") if str(error).startswith(name)), None)
        raise RequestError(422, f"parameters.{error}" if named else f"parameters.candidate_labels: {error}", f"parameters.{named or 'candidate_labels'}") from error


def from_mapping(parameters: Mapping[str, Any]) -> PredictParameters:
    """Return those of KServe's `parameters` that are a task's. Raises RequestError (422) for a wrong kind of value."""
    try:
        return PredictParameters.model_validate(dict(parameters))
    except ValidationError as error:
        wrong = from_validation(error)
        raise RequestError(422, f"parameters.{wrong.message}", "parameters") from error


def _refused(name: str, why: str) -> RequestError:
    return RequestError(422, f"parameters.{name}{why}", f"parameters.{name}")
