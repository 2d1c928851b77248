"""Run texts in separate calls, and check that an output stays unchanged later and that the caller may overwrite it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bertopt.errors import WrongAnswer

if TYPE_CHECKING:
    from bertopt.core import Array
    from bertopt.runtime.predictor import Predictor
    from bertopt.spec import Text


#: Texts that are run once more after their outputs were overwritten.
AGAIN = 4


def answers(predictor: Predictor, texts: Sequence[Text]) -> Iterator[dict[str, Array]]:
    """Yield the raw outputs of each text by name. Raises WrongAnswer where a call changes the previous call's outputs, or returns what the
    caller wrote into them: many callers normalise or centre embeddings in place."""
    first: list[tuple[Mapping[str, Array], dict[str, Array]]] = []
    before: tuple[Mapping[str, Array], dict[str, Array]] | None = None
    for number, text in enumerate(texts):
        (given,) = predictor.raw([text])
        if before is not None and not _equal(*before):
            raise WrongAnswer(
                f"the output for text {number - 1} was changed by the call for the next one: the model returns memory that it reuses; "
                "return a copy in each call (`output.clone()`)"
            )
        before = given, {name: value.copy() for name, value in given.items()}
        first += [before] if number < AGAIN else []
        yield before[1]
    for number, (earlier, copy) in enumerate(first):
        writable = {name: value for name, value in earlier.items() if value.flags.writeable}
        for value in writable.values():
            value[...] = np.nan
        (again,) = predictor.raw([texts[number]])
        if any((np.isnan(again[name]) & ~np.isnan(copy[name])).any() for name in writable):
            raise WrongAnswer(
                f"the output for text {number} changed with what its caller wrote into the array that the call before returned: the model keeps "
                "outputs; return a copy in each call (`output.clone()`)"
            )


def _equal(given: Mapping[str, Array], copy: Mapping[str, Array]) -> bool:
    return all(given[name].tobytes() == value.tobytes() for name, value in copy.items())
