"""Make the input arrays of a single text quickly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from bertopt.core import Spec
from bertopt.modeling import packing

if TYPE_CHECKING:
    from bertopt.core import Array


class SingleTextInputs:
    """Makes the inputs of single texts of up to `length` tokens. Arrays that do not depend on the text are made once and must not be
    written to."""

    def __init__(self, spec: Spec, length: int) -> None:
        self.spec = spec
        zeros, ones = np.zeros((1, length), np.int64), np.ones((1, length), np.int64)
        positions = np.arange(spec.position_offset, spec.position_offset + length)[None]
        self._fixed = {
            "attention_mask": ones, "segment_ids": ones, "token_type_ids": zeros, "position_ids": positions,
            "first_tokens": np.zeros((1, 1), np.int64),
        }  # fmt: skip
        #: The padding's id where positions are counted without it: a text that contains it needs computed positions.
        self._reserved_id = spec.position_offset - 1 if spec.layout == "packed" and spec.positions == "counted" else None

    def inputs(self, ids: Sequence[int], types: Sequence[int] | None) -> dict[str, Array]:
        """Return the arrays of `spec.network_inputs`, [1, S]. `types` None: all are 0."""
        found: dict[str, Array] = {"input_ids": np.array([ids], np.int64)}
        if types is not None:
            found["token_type_ids"] = np.array([types], np.int64)
        if self._reserved_id is not None and self._reserved_id in ids:
            found["position_ids"] = packing.counted(self.spec, found["input_ids"][0], np.zeros(len(ids), np.int64))[
                None
            ]
        return {
            name: found[name] if name in found else self._fixed[name][:, : len(ids)]
            for name in self.spec.network_inputs
        }
