"""A packed network with the interface of a padded one, so that checks need not know its layout."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from bertopt.core import RuntimeFacts, Session, Spec
from bertopt.modeling import packing
from bertopt.sessions.inputs import check

if TYPE_CHECKING:
    from bertopt.core import Array


class PackedSession(Session):
    """Takes padded batches [B, S] for a session over rows that hold several texts each.

    Of every row the tokens whose `attention_mask` is 1 are one text, in the order of their columns, with the positions that
    they have in the padded batch: left padding and holes therefore answer as in the padded network. What cannot is the
    answer of a masked first column, which a head may read: the packed network has no such token and reads the first valid
    one (see `checks.probes.packable`). Padding and fully masked rows answer 0.
    """

    def __init__(self, rows: Session, spec: Spec) -> None:
        self.rows, self.spec = rows, spec
        self.streams, self.concurrent, self.block = rows.streams, rows.concurrent, rows.block
        self.asynchronous, self.fixed_costs, self.buckets = rows.asynchronous, rows.fixed_costs, rows.buckets
        self._packing: _Packing | None = None

    def load(self, inputs: Mapping[str, Array]) -> None:
        self._packing = _Packing(self.spec, inputs, self.block)
        self.rows.load(self._packing.batch.inputs)

    def step(self) -> None:
        self.rows.step()

    def fetch(self) -> dict[str, Array]:
        assert self._packing is not None, "load comes first"
        return self._packing.padded(self.rows.fetch())

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        packed = _Packing(self.spec, inputs, self.block)
        return packed.padded(self.rows.run(packed.batch.inputs))

    def run_all(self, batches: Iterable[Mapping[str, Array]]) -> Iterator[dict[str, Array]]:
        pending: deque[_Packing] = deque()

        def packed() -> Iterator[Mapping[str, Array]]:
            for inputs in batches:
                pending.append(_Packing(self.spec, inputs, self.block))
                yield pending[-1].batch.inputs

        for answers in self.rows.run_all(packed()):
            yield pending.popleft().padded(answers)

    def facts(self) -> RuntimeFacts:
        return self.rows.facts().model_copy(update={"layout": "packed", "row_length": self.spec.row_length})


class _Packing:
    """One padded batch as rows, and the way back."""

    def __init__(self, spec: Spec, inputs: Mapping[str, Array], block: int) -> None:
        check(inputs, spec.inputs)
        self.spec = spec
        self.mask = inputs["attention_mask"] != 0
        self.texts = np.flatnonzero(self.mask.any(axis=1))
        _, flat = packing.unpadded(spec, inputs)
        lengths = flat.lengths
        # Texts of one length leave no padding to save: then longer rows only mean more attention.
        even = bool((lengths == lengths[0]).all())
        room = packing.whole(lengths, block)
        if spec.one_row:
            rows = packing.together(lengths)
        else:
            rows = packing.singly(lengths) if even else packing.best_fit(room, spec.row_length or int(room.max()))
        (self.batch,) = packing.batches(spec, flat, rows, [(0, len(rows.used))])

    def padded(self, outputs: Mapping[str, Array]) -> dict[str, Array]:
        found = {}
        for name, value in outputs.items():
            if self.spec.granularity == "text":
                found[name] = np.zeros((len(self.mask), *value.shape[2:]), value.dtype)
                if len(self.texts):
                    found[name][self.texts[self.batch.texts]] = self.batch.by_text(value)
                continue
            found[name] = np.zeros((*self.mask.shape, *value.shape[2:]), value.dtype)
            if len(self.texts):
                flat = np.empty((int(self.mask.sum()), *value.shape[2:]), value.dtype)
                flat[self.batch.source] = self.batch.by_token(value)
                found[name][self.mask] = flat
        return found
