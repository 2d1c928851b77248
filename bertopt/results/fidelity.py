"""What a stage of reduced precision is held to: what its rounding should cost, and the weights of its parent."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class Rounding(BaseModel, extra="forbid", ser_json_inf_nan="strings"):
    """How far a stage of reduced precision is from the reference on real texts, beside what its rounding should cost.

    That is measured on the twin: the reference with the same rounding simulated. Of several twins every figure is beside the
    one that costs most.
    """

    error: float
    """Mean over all compared vectors of their relative error."""
    error_ratio: float
    """`error` in units of the twin's."""
    worst_ratio: float | None = None
    """The largest relative error of a vector, or relative to the usual one where that is larger, in units of the twin's largest.
    None in reports of earlier versions."""
    slope_error: float
    """|slope - 1| of outputs against the reference's, each about its mean, in units of the twin's error, relative
    to the outputs or to how they vary: a changed temperature."""
    bias: float
    """Largest mean shift of a class or dimension, in units of the twin's: its largest shift or root mean square error."""
    column_ratio: float | None = None
    """Largest standard deviation of the errors of one class or dimension, in units of the twin's: of that one's errors, or of all where
    those are larger. None for spans, one number, few vectors, and in reports of earlier versions."""
    flip_margin: float | None
    """Largest margin by which the reference preferred a label that changed, in units of the twin's root mean square error.
    None without labels."""
    rank_ratio: float | None
    """Rank correlation of the embeddings' similarities that is lost, in units of what the twin loses."""
    parent_ratio: float | None
    """Mean difference from the parent, in units of the twin's error. None where the parent has another precision."""
    vectors: int


class Certificate(BaseModel, extra="forbid"):
    """What a comparison of the weights on disk with the parent's says.

    `certified`: every weight is the rounding of the parent's, and nothing else changed as far as `reason` says.
    `contradicted`: a weight is not. `none`: no such comparison can be made.
    """

    status: Literal["certified", "contradicted", "none"]
    reason: str
    weights: int = 0
    """Tensors compared."""


def contradiction(precision: str) -> Literal["contradicted", "none"]:
    """Return what a weight that is not its parent's means: in float32, which parity holds tightly, that there is no certificate."""
    return "none" if precision == "float32" else "contradicted"
