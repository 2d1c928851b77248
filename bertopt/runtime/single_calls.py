"""Texts in separate calls, one after the other: an answer that was given must stay what it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from bertopt.errors import WrongAnswer

if TYPE_CHECKING:
    from bertopt.core import Array
    from bertopt.runtime.predictor import Predictor
    from bertopt.runtime.tokenization import Text


def answers(predictor: Predictor, texts: Sequence[Text]) -> Iterator[dict[str, Array]]:
    """Yield the raw outputs of each text by name. Raises WrongAnswer where a call changes what the call before it gave."""
    before: tuple[Mapping[str, Array], dict[str, Array]] | None = None
    for number, text in enumerate(texts):
        (given,) = predictor.raw([text])
        if before is not None and not _equal(*before):
            raise WrongAnswer(
                f"the output for text {number - 1} was changed by the call for the next one: the model returns memory that it reuses; "
                "return a copy in each call (`output.clone()`)"
            )
        before = given, {name: value.copy() for name, value in given.items()}
        yield before[1]


def _equal(given: Mapping[str, Array], copy: Mapping[str, Array]) -> bool:
    return all(given[name].tobytes() == value.tobytes() for name, value in copy.items())
