"""Fixed texts whose outputs an artefact records, so that another machine can check that it gives the same.

`replay_process` opens a directory in a new interpreter, as a user's service does, and writes its outputs; the run that exports compares
them with those that the stage gave when it was measured. Recorded are the size, the root mean square and `PROJECTIONS` fixed random
projections of each output. Not seen: changes that leave these figures as they are, and other texts.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING, Any

from bertopt.core import Precision
from bertopt.errors import WrongAnswer
from bertopt.results import nan_max
from bertopt.runtime.own_texts import own_words
from bertopt.runtime.text_inputs import asked

if TYPE_CHECKING:
    import numpy as np

    from bertopt.runtime.predictor import Predictor
    from bertopt.spec import Text

#: For each text and output: its number of elements, root mean square and projections.
Answers = list[list[list[float]]]

TEXTS = (
    "", "a", "The quick brown fox jumps over the lazy dog.", "Wie spät ist es?", "狗坐在垫子上",
    "Refund of order 4711, please: the parcel came open & empty!", " ".join(["many words follow"] * 40), "1 2 3",
)  # fmt: skip
#: Recorded for classifiers and re-rankers.
PAIRS = (("Wie spät ist es?", TEXTS[2]), (TEXTS[5], "1 2 3"), ("a", TEXTS[6]))
PROJECTIONS = 8
#: To a tokenizer that does not know these words, such as one of proteins, nearly all of these texts are alike: besides them, texts of words
#: that it knows are recorded, of OWN_LENGTHS words; they take the place of the others in concurrent calls.
OWN_LENGTHS = (1, 2, 3, 5, 8, 12, 40, 200)
#: One in this many words of every second of them is a mask token, if the model scales a text by these.
MASKED = 4
#: How many times each text is run concurrently with the others, each from a separate thread, and seconds until all threads have started.
ROUNDS, START_S = 4, 60.0
#: Also recorded: a text of LONG_TOKENS tokens, or as many as the model takes, and MANY short texts in one call. On another machine only the
#: kernels for long rows or large batches may be wrong.
LONG_TOKENS, MANY = 512, 33
#: Differences, relative to the root mean square, that another number of threads, batch or processor may make: for one text, and for the
#: median text.
TOLERANCE: dict[Precision, float] = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.1, "float8": 0.3, "int8": 0.3}
MEDIAN_TOLERANCE: dict[Precision, float] = {"float32": 1e-3, "float16": 0.007, "bfloat16": 0.03, "float8": 0.1, "int8": 0.1}


def answers(predictor: Predictor, compiled: bool = False) -> Answers:
    """Return the outputs for all texts in one call, then for one text alone, a long one, many short ones in one call, and pairs.

    Where the tokenizer knows few of these words, texts of words that it knows follow, and many short ones in one call. All but the first two calls are left
    out where the model is `compiled`, which takes minutes for each new shape; the long one also where each token has outputs over a
    vocabulary, which would take gigabytes.
    """
    texts = _texts(predictor)
    calls = [texts, texts[2:3]]
    if not compiled:
        long = ["word " * min(predictor.spec.text_length, LONG_TOKENS)] if predictor.spec.task != "fill-mask" else []
        pairs: list[Text] = list(PAIRS) if predictor.spec.task == "text-classification" else []
        calls += [asked(predictor.spec.task, long), _numbered(predictor, "text"), pairs]
        if own := _own_texts(predictor):
            calls += [own, _short_texts(predictor, "text")]
    return [answer for call in calls if call for answer in _call(predictor, call)]


def at_once(predictor: Predictor) -> list[Answers]:
    """Return the outputs of each text in a call alone: first one call after the other, then in `ROUNDS` rounds of concurrent calls."""
    return _beside_others([predictor], [[text] for text in _own_texts(predictor) or _texts(predictor)], batch_by_batch=False)


def calls_at_once(*predictors: Predictor) -> list[Answers]:
    """Return the outputs of calls with several texts, of another length in each, which the predictors take in turn: first one after the other,
    then in rounds of concurrent calls, every other round batch by batch as a server runs them."""
    calls = [_short_texts(predictors[0], " ".join([word] * times)) for word, times in (("one", 1), ("two", 2), ("three", 5), ("four", 12))]
    return _beside_others(predictors, calls, batch_by_batch=True)


def after_one_that_ends_early(predictor: Predictor) -> Answers:
    """Return what `answers` does after a call of many batches that was interrupted after the first."""

    def leave(*_: object) -> None:
        raise _Left

    predictor.watched(leave)
    try:
        with contextlib.suppress(_Left):
            predictor.raw(_short_texts(predictor, "left") * 8)
    finally:
        predictor.watched(None)
    return answers(predictor)


class _Left(Exception):
    """Ends a call."""


def check(found: Answers, recorded: Answers, precision: Precision, what: str) -> None:
    """Raise WrongAnswer where `found`, the outputs of `what`, differ from those recorded. NaN differs from anything.

    Artefacts of earlier versions recorded fewer outputs and projections, which are compared with the first ones. For outputs of one number, as
    a re-ranker's, differences are relative to at least the usual size: rounding is many times the size of a number near zero.
    """
    ones = [figures[1] for text in recorded for figures in text if figures[0] == 1]
    usual = math.sqrt(statistics.fmean(one**2 for one in ones)) if ones else 0.0
    errors = list[float]()
    why = "its files changed, this machine's runtime computes otherwise, or it depends on something besides its files and inputs"
    for number, (mine, theirs) in enumerate(zip(found, recorded, strict=False)):
        for a, b in zip(mine, theirs, strict=True):
            if a[0] != b[0]:
                raise WrongAnswer(f"{what}: text {number} must have outputs of {b[0]:g} numbers; got {a[0]:g}")
            error = _distance(a[1:], b[1:]) / max(b[1], usual if b[0] == 1 else 0.0, 1e-6)
            if not error <= TOLERANCE[precision]:
                raise WrongAnswer(
                    f"{what}: the outputs of text {number} differ from those recorded by {error:.3g} of their size, "
                    f"at most {TOLERANCE[precision]:g} is rounding: {why}"
                )
            errors.append(error)
    median = statistics.median(errors)
    if not median <= MEDIAN_TOLERANCE[precision]:
        raise WrongAnswer(
            f"{what}: the outputs of the median text differ from those recorded by {median:.3g} of their size, "
            f"at most {MEDIAN_TOLERANCE[precision]:g} is rounding: {why}"
        )


def _distance(found: Sequence[float], recorded: Sequence[float]) -> float:
    """Estimate the distance of outputs from those recorded by the root mean square of the differences of their projections (a single one may
    show three times as much), and at least by the difference of their root mean squares."""
    sizes, *projections = (abs(x - y) for x, y in zip(found, recorded, strict=False))
    return nan_max((sizes, math.sqrt(statistics.fmean(one**2 for one in projections))))


def _texts(predictor: Predictor) -> list[Text]:
    return asked(predictor.spec.task, TEXTS)


def _numbered(predictor: Predictor, word: str) -> list[Text]:
    return asked(predictor.spec.task, [f"{word} {number}" for number in range(MANY)])


def _short_texts(predictor: Predictor, word: str) -> list[Text]:
    """Return `MANY` short texts that differ: numbered ones or, where the tokenizer does not know such words, as long ones of words that it knows."""
    if not (words := own_words(predictor.tokenizer.whole, predictor.unknown_id)):
        return _numbered(predictor, word)
    import numpy as np

    length = len(word.split()) + 1
    rows = np.random.default_rng(length).integers(0, len(words), (MANY, length))
    return asked(predictor.spec.task, [" ".join(words[place] for place in row) for row in rows])


def _own_texts(predictor: Predictor) -> list[Text]:
    """Return texts of the tokenizer's own words; none where it knows most of the built-in texts'."""
    whole, dropped = predictor.tokenizer.whole, predictor.spec.dropped_id
    if not (words := own_words(whole, predictor.unknown_id)):
        return []
    import numpy as np

    texts = [[words[place] for place in np.random.default_rng(length).integers(0, len(words), length)] for length in OWN_LENGTHS]
    if dropped is not None:
        for text in texts[1::2]:
            text[::MASKED] = [whole.id_to_token(dropped)] * len(text[::MASKED])
    return asked(predictor.spec.task, [" ".join(text) for text in texts])


def _call(predictor: Predictor, texts: Sequence[Text], batch_by_batch: bool = False) -> Answers:
    return [[_projected(value) for _, value in sorted(named.items())] for named in predictor.raw(texts, batch_by_batch)]


def _beside_others(predictors: Sequence[Predictor], calls: Sequence[Sequence[Text]], batch_by_batch: bool) -> list[Answers]:
    """Return the outputs of all calls, which the predictors take in turn: one after the other, then for each round of concurrent calls; every
    other round runs batch by batch if `batch_by_batch`."""
    together = threading.Barrier(len(calls), timeout=START_S)
    whose = [predictors[number % len(predictors)] for number in range(len(calls))]

    def ask(predictor: Predictor, call: Sequence[Text]) -> list[Answers]:
        together.wait()
        return [_call(predictor, call, batch_by_batch and number % 2 == 1) for number in range(ROUNDS)]

    one_by_one = [_call(predictor, call) for predictor, call in zip(whose, calls, strict=True)]
    with ThreadPoolExecutor(len(calls)) as pool:
        rounds = zip(*pool.map(ask, whose, calls), strict=True)
    return [list(chain.from_iterable(of_calls)) for of_calls in (one_by_one, *rounds)]


def _projected(value: np.ndarray[Any, Any]) -> list[float]:
    import numpy as np

    flat = value.astype(np.float64).ravel()
    rng = np.random.default_rng(flat.size)
    size = math.sqrt(max(1, flat.size))
    # One projection after the other: several at once would take gigabytes for outputs over a vocabulary.
    figures = [float(np.linalg.norm(flat)) / size, *(float(rng.standard_normal(flat.size) @ flat) / size for _ in range(PROJECTIONS))]
    return [float(flat.size), *(float(f"{figure:.7g}") for figure in figures)]
