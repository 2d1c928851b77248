"""Check the inputs of a session: that none is missing, and that ids fit into the runtime's integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bertopt.errors import UsageError

if TYPE_CHECKING:
    from bertopt.core import Array, Spec

#: OpenVINO computes in int32, and would answer for the id modulo 2³².
LARGEST_INT32 = 2**31 - 1


def check(inputs: Mapping[str, Array], names: Sequence[str]) -> None:
    """Raise UsageError where one of the inputs `names` is missing."""
    missing = [name for name in names if name not in inputs]
    if missing:
        raise UsageError(
            f"the model takes {', '.join(names)}; got no {', '.join(missing)}: give an int64 array [B, S] for each"
        )


def check_int32(inputs: Mapping[str, Array], spec: Spec) -> None:
    """Raise UsageError where an input is missing, or an id is more than int32 holds."""
    check(inputs, spec.network_inputs)
    ids = inputs["input_ids"]
    if ids.size and int(ids.max()) > LARGEST_INT32:
        raise UsageError(f"input_ids must be below the vocabulary's {spec.vocabulary}; got {int(ids.max())}")
