"""Compare stages with the reference from text to output; each uses the tokenizer in its own directory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bertopt.checks import probes, row_differences
from bertopt.core import Precision, Spec
from bertopt.results.coverage import SweptOutput
from bertopt.runtime import text_inputs
from bertopt.spec import Text
from bertopt.workers.client import Worker

if TYPE_CHECKING:
    from bertopt.core import Array

#: The reference also runs every tenth of the short texts of one call alone.
ALONE_STEP = 10


class EndToEnd:
    """Texts and pairs of all lengths, short texts for one call, and the reference's outputs for them, computed when first needed."""

    def __init__(
        self, spec: Spec, texts: Sequence[str], pairs: Sequence[tuple[str, str]], lengths: Sequence[int], of_checkpoint: bool
    ) -> None:
        """`lengths` are the tokens of each text, then of each pair. `of_checkpoint`: the reference is a checkpoint in float32."""
        # For question answering, only pairs: a question needs a context.
        every: list[Text] = [*pairs] if spec.task == "question-answering" else [*texts, *pairs]
        self.texts = probes.of_all_lengths(every, lengths[len(lengths) - len(every) :])
        self.in_one_call = [] if spec.task == "fill-mask" else text_inputs.asked(spec.task, probes.snippets(texts))
        self.of_checkpoint = of_checkpoint
        #: By `in_one_call`.
        self._reference: dict[bool, dict[str, Array]] = {}

    def compare(self, worker: Worker, reference: Worker, precision: Precision, in_one_call: bool = False) -> SweptOutput:
        """Return how far the outputs of the stage of this `precision` in `worker` are from the reference's."""
        texts = self.in_one_call if in_one_call else self.texts
        alone = () if in_one_call else range(len(texts))
        # Rounding is large compared with an output near zero.
        least = 0.1 if precision == "float32" else 1.0
        if in_one_call not in self._reference:
            self._reference[in_one_call] = self._expected(reference, texts, in_one_call)
        return row_differences.end_to_end(_outputs(worker, texts, alone), self._reference[in_one_call], texts, least)

    def _expected(self, reference: Worker, texts: Sequence[Text], in_one_call: bool) -> dict[str, Array]:
        found = _outputs(reference, texts, range(0, len(texts), ALONE_STEP if in_one_call else 1))
        if self.of_checkpoint:
            # Splitting into batches and restoring the order is the same code for all stages: a mistake in it shows only here.
            row_differences.check_alone(found, texts)
        return {key: value for key, value in found.items() if not (in_one_call and key.endswith(", alone"))}


def _outputs(worker: Worker, texts: Sequence[Text], alone: Sequence[int]) -> dict[str, Array]:
    """Return outputs of one call, as `<number>/<output>`, and those of the texts `alone`, as `<number>/<output>, alone`."""
    return worker.exchange("outputs", texts=texts, alone=list(alone))[1]
