"""Run texts on a session: tokenise ahead, plan batches, run them on all streams, and restore the order."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from bertopt.core import Session, Spec
from bertopt.errors import UsageError
from bertopt.modeling import packing
from bertopt.runtime import cost_model
from bertopt.runtime.batch_limits import BatchLimits
from bertopt.runtime.batch_plan import plan
from bertopt.runtime.collector import Collector
from bertopt.runtime.single_text import SingleTextInputs
from bertopt.runtime.tokenization import Encoded, Tokenizer
from bertopt.spec import Text

if TYPE_CHECKING:
    from bertopt.core import Array

#: Fewest launches' worth of work in one piece of a call.
LAUNCHES = 16
#: Tasks whose answers need the positions of tokens in the text.
LOCATED = ("token-classification", "question-answering", "fill-mask")


@dataclass(frozen=True)
class RawOutputs:
    """Raw outputs of some texts, and how these were encoded."""

    outputs: Collector
    pieces: list[Encoded]

    @property
    def truncated(self) -> list[int]:
        return [number for piece in self.pieces for number in piece.cut]

    @property
    def tokens(self) -> int:
        return sum(len(piece.flat.ids) for piece in self.pieces)


class Runner:
    """Runs texts on `session`, which takes `spec.network_inputs`. Calls from several threads take turns, unless the session is
    `concurrent`."""

    def __init__(
        self, session: Session, spec: Spec, tokenizer: Tokenizer, limits: BatchLimits, known: cost_model.Costs | None
    ) -> None:
        self.session, self.spec, self.tokenizer, self.limits = session, spec, tokenizer, limits
        self.costs = known
        #: Called with every batch and its outputs (see `packing.Batch.padded`); single texts are then run as batches too.
        self.watch: Callable[[packing.Batch, Mapping[str, Array]], None] | None = None
        #: Makes the inputs of one text.
        self.single = SingleTextInputs(spec, tokenizer.limit)
        self._process = os.getpid()
        self._turn, self._measuring = threading.Lock(), threading.Lock()

    def one(self, text: Text, truncate: bool, first: int) -> tuple[Array, list[int], int]:
        """Return the vector [1, D] of one text, its number if it was truncated, and its number of tokens; for models with one vector for each text.

        Without plan, thread or copies: about 0.05 ms more than the session takes.
        """
        self._check_process()
        ids, types, cut = self.tokenizer.ids(text, truncate, first)
        inputs = self.single.inputs(ids, types)
        with self._turns():
            value = self.session.run(inputs)[self.spec.outputs[0]]
        return value.reshape(1, -1), [first] if cut else [], len(ids)

    def run(self, texts: Sequence[Text], truncate: bool, first: int, batch_by_batch: bool = False) -> RawOutputs:
        """Return the outputs of at least one text; the first has number `first` in errors and results. With `batch_by_batch` each batch is a
        separate call of the session, as in a server."""
        return self.run_encoded(self._pieces(texts, truncate, first), len(texts), batch_by_batch)

    def run_encoded(self, pieces: Iterator[Encoded], count: int, batch_by_batch: bool = False) -> RawOutputs:
        """Return the outputs of `count` encoded texts, at least one; each piece is planned by itself."""
        self._check_process()
        raw = RawOutputs(Collector(self.spec, count), [])
        ahead = next(pieces)
        pending: deque[tuple[int, packing.Batch]] = deque()

        def batches() -> Iterator[Mapping[str, Array]]:
            start = 0
            for piece in chain([ahead], pieces):
                raw.pieces.append(piece)
                for batch in self._batches(piece):
                    pending.append((start, batch))
                    yield batch.inputs
                start += len(piece.lengths)

        with self._turns():
            for outputs in map(self.session.run, batches()) if batch_by_batch else self.session.run_all(batches()):
                start, batch = pending.popleft()
                raw.outputs.put(start, batch, outputs)
                if self.watch is not None:
                    self.watch(batch, outputs)
        return raw

    def _batches(self, piece: Encoded) -> Iterator[packing.Batch]:
        chosen = plan(self.spec, piece.lengths, self.price(), self.limits)
        return packing.batches(self.spec, piece.flat, chosen.rows, chosen.batches)

    def _pieces(self, texts: Sequence[Text], truncate: bool, first: int) -> Iterator[Encoded]:
        located = self.spec.task in LOCATED

        def encode(start: int, end: int) -> Encoded:
            return self.tokenizer.flat(texts[start:end], truncate, first + start, located)

        # Without truncation all texts are tokenised first, so that one that is too long is refused before anything is run.
        if not truncate or len(texts) <= self.limits.one_piece:
            yield encode(0, len(texts))
            return
        with ThreadPoolExecutor(1, "bertopt-tokenizer") as thread:
            end = self.limits.first_texts
            coming = thread.submit(encode, 0, end)
            while end < len(texts):
                piece = coming.result()
                start, end = end, min(len(texts), end + following(piece.lengths, self.limits, self.costs))
                coming = thread.submit(encode, start, end)
                yield piece
            yield coming.result()

    def price(self) -> cost_model.Costs:
        """Return the costs that batches are planned by, measured on the first call where they are not fixed."""
        with self._measuring:
            if self.costs is None:
                fixed = self.session.fixed_costs
                self.costs = (
                    cost_model.expected(self.spec) if fixed else cost_model.measure(self.session, self.spec, self.limits)
                )
            return self.costs

    def _check_process(self) -> None:
        """Raise UsageError in a fork of the process that loaded the model, where the runtime's threads are missing."""
        if (here := os.getpid()) != self._process:
            raise UsageError(
                f"a predictor works only in the process that loaded it, {self._process}; this process, {here}, is a fork of "
                "it: call bertopt.load after the fork, or start processes with multiprocessing's 'spawn'"
            )

    def _turns(self) -> AbstractContextManager[object]:
        return nullcontext() if self.session.concurrent else self._turn


def following(lengths: Array, limits: BatchLimits, costs: cost_model.Costs | None) -> int:
    """Return how many texts the next piece has, given the `lengths` [N] of the previous one's. A piece is tokenised while the previous one
    runs, and is planned by itself: a GPU would wait for a much larger piece, and could not fill its batches from a very small one."""
    if limits.together is None:
        return limits.texts
    tokens = max(limits.together, LAUNCHES * costs.launch if costs is not None else 0)
    return max(1, min(limits.texts, int(tokens / lengths.mean())))
