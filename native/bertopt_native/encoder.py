"""A packed model on this CPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from bertopt_native import _core

Output = Literal["tokens", "first", "mean", "max", "logits", "splade", "splade_log1p"]
_OUTPUTS = get_args(Output)


class Encoder:
    """Runs a packed file. Safe to call from several threads at once, and after a fork.

    `threads` is the number of threads that one call may use, the calling one included; by default as many as this
    process may run on. `isa` picks an instruction set of `supported()`; by default the best, or what the environment
    variable `BERTOPT_NATIVE_ISA` says.

    `huge_pages` copies the products' weights into huge pages: some per cent faster, more for single texts. Without, the
    file's pages are used as they are, and processes share them.

    Raises `BadFile` for a file that is cut short, damaged or of another layout version, `Unsupported` where this CPU
    has none of the instruction sets.
    """

    def __init__(
        self, path: str | os.PathLike[str], threads: int | None = None, isa: str | None = None, huge_pages: bool = True
    ) -> None:
        if threads is None:
            threads = len(os.sched_getaffinity(0))
        if not 1 <= threads <= 1024:
            raise ValueError(f"threads must be from 1 to 1024; got {threads}")
        self._core = _core.Encoder(os.fspath(path), threads, isa or "", huge_pages)
        self.info: dict[str, Any] = self._core.info()
        """Sizes, `isa` used, `products` with weights and how many of them are INT8 (`int8_products`)."""

    def run(
        self,
        ids: NDArray[Any] | Sequence[int],
        starts: NDArray[Any] | Sequence[int],
        token_types: NDArray[Any] | Sequence[int] | None = None,
        output: Output = "tokens",
        normalize: bool = False,
        positions: NDArray[Any] | Sequence[int] | None = None,
    ) -> NDArray[np.float32]:
        """Return the last hidden states of K texts of T tokens in all.

        `ids` [T] are the texts one after another, without padding; text i has tokens `starts[i]` to `starts[i + 1]`, so
        `starts` [K + 1] begins with 0 and ends with T. `token_types` [T] are 0 by default, `positions` [T] what the
        family counts by default.

        Returns [T, H] for `tokens`; [K, H] for `first` (each text's first token), `mean` and `max` (over its tokens),
        to length 1 if `normalize`. An empty text gets a row of zeros. Of a file with a head over the vocabulary of V ids also [T, V] for
        `logits`, and [K, V] for `splade`: log(1 + relu(x)) of the largest logit x of the text's tokens, for `splade_log1p` that logarithm once more. A text's numbers do not depend on its neighbours,
        on the order, or on the number of threads, to the last bit.

        Raises `ValueError` for ids, types, positions, lengths or a head that the model does not have.
        """
        if output not in _OUTPUTS:
            raise ValueError(f"output must be one of {', '.join(map(repr, _OUTPUTS))}; got {output!r}")
        if normalize and output in ("tokens", "logits"):
            raise ValueError(f"normalize needs an output of one row per text; got output={output!r}")
        return self._core.run(
            _integers("ids", ids),
            _integers("starts", starts),
            None if token_types is None else _integers("token_types", token_types),
            None if positions is None else _integers("positions", positions),
            _OUTPUTS.index(output),
            normalize,
        )


def _integers(name: str, values: NDArray[Any] | Sequence[int]) -> NDArray[np.int64]:
    """Return `values` as a contiguous vector of int64; raises ValueError where that would change a number."""
    a = np.asarray(values)
    if a.ndim != 1:
        raise ValueError(f"{name} must have one dimension; got shape {list(a.shape)}")
    if a.size and a.dtype.kind not in "iu":
        raise ValueError(f"{name} must be whole numbers; got {a.dtype}")
    if a.dtype == np.uint64 and a.size and a.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} must fit int64; got {a.min()} to {a.max()}")
    return np.ascontiguousarray(a, np.int64)
