"""Fixed texts whose outputs an artefact records: whoever opens it elsewhere can see that it still gives them.

`replay_process` opens a directory in a new interpreter, as a user's service does, and writes its outputs: the run that exports
compares them with those of its worker when the stage was measured. Recorded are the size, the root mean square and `PROJECTIONS`
fixed random projections of each output; what leaves all of these as they are is not seen, nor is any other text.
"""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from bertopt.core import Precision
from bertopt.errors import WrongAnswer

if TYPE_CHECKING:
    import numpy as np

    from bertopt.runtime.predictor import Predictor
    from bertopt.runtime.tokenization import Text

#: For each text and output: its size, root mean square and projections.
Answers = list[list[list[float]]]

TEXTS = (
    "", "a", "The quick brown fox jumps over the lazy dog.", "Wie spät ist es?", "狗坐在垫子上",
    "Refund of order 4711, please: the parcel came open & empty!", " ".join(["many words follow"] * 40), "1 2 3",
)  # fmt: skip
PROJECTIONS = 4
#: How often each text is run alone beside the others, each from a separate thread; and seconds until all have started.
ROUNDS, START_S = 3, 60.0
#: Differences that another number of threads, batch or processor may make, relative to the root mean square.
TOLERANCE: dict[Precision, float] = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.1, "float8": 0.3, "int8": 0.3}


def answers(predictor: Predictor) -> Answers:
    """Return the outputs for all texts in one call, then for one text alone."""
    texts = _texts(predictor)
    outputs = [*predictor.raw(texts), *predictor.raw(texts[2:3])]
    return [[_projected(value) for _, value in sorted(named.items())] for named in outputs]


def at_once(predictor: Predictor) -> list[Answers]:
    """Return the outputs of each text, called alone: one call after the other, and then in `ROUNDS` rounds beside the others' calls."""
    texts = _texts(predictor)
    together = threading.Barrier(len(texts), timeout=START_S)

    def ask(text: Text) -> list[list[list[float]]]:
        together.wait()
        return [_one(predictor, text) for _ in range(ROUNDS)]

    one_by_one = [_one(predictor, text) for text in texts]
    with ThreadPoolExecutor(len(texts)) as pool:
        rounds = list(pool.map(ask, texts))
    return [one_by_one, *([of_text[number] for of_text in rounds] for number in range(ROUNDS))]


def check(found: Answers, recorded: Answers, precision: Precision, what: str) -> None:
    """Raise WrongAnswer where `found`, the outputs of `what`, differ from those recorded. NaN differs from anything."""
    for number, (mine, theirs) in enumerate(zip(found, recorded, strict=True)):
        for a, b in zip(mine, theirs, strict=True):
            if a[0] != b[0]:
                raise WrongAnswer(f"{what}: text {number} must have outputs of {b[0]:g} numbers; got {a[0]:g}")
            error = max(abs(x - y) for x, y in zip(a[1:], b[1:], strict=True)) / max(b[1], 1e-6)
            if not error <= TOLERANCE[precision]:
                raise WrongAnswer(
                    f"{what}: the outputs of text {number} differ from those recorded by {error:.3g} of their size, "
                    f"at most {TOLERANCE[precision]:g} is rounding: the model depends on something besides its files and inputs"
                )


def _texts(predictor: Predictor) -> list[Text]:
    return [("what?", text) for text in TEXTS] if predictor.spec.task == "question-answering" else list(TEXTS)


def _one(predictor: Predictor, text: Text) -> list[list[float]]:
    (named,) = predictor.raw([text])
    return [_projected(value) for _, value in sorted(named.items())]


def _projected(value: np.ndarray[Any, Any]) -> list[float]:
    import numpy as np

    flat = value.astype(np.float64).ravel()
    matrix = np.random.default_rng(flat.size).standard_normal((PROJECTIONS, flat.size))
    size = math.sqrt(max(1, flat.size))
    figures = [float(np.linalg.norm(flat)) / size, *(matrix @ flat / size).tolist()]
    return [float(flat.size), *(float(f"{figure:.7g}") for figure in figures)]
