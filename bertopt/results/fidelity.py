"""What a stage of reduced precision is compared with: the error that its rounding should have, and the weights of its parent."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class Rounding(BaseModel, extra="forbid", ser_json_inf_nan="strings"):
    """How far a stage of reduced precision is from the reference on real texts, relative to the error that its rounding should have.

    That is measured on the twin: the reference with the same rounding simulated. Of several twins, each figure is relative to the one with the
    largest error.
    """

    error: float
    """Mean over all compared vectors of their relative error."""
    error_ratio: float
    """`error` in units of the twin's."""
    worst_ratio: float | None = None
    """The largest error of a vector, relative to its size or the usual one, whichever is larger, in units of the twin's largest. None in
    reports of earlier versions."""
    slope_error: float
    """|slope - 1| of outputs against the reference's, each about its mean, in units of the twin's error relative to the outputs or to their
    variation. It shows a changed temperature."""
    bias: float
    """Largest mean shift of a class or dimension, in units of the twin's: its largest shift or root mean square error."""
    column_ratio: float | None = None
    """Largest standard deviation of the errors of one class or dimension, in units of the twin's for the same one, or for all where that is
    larger. None for spans, one number, few vectors, and in reports of earlier versions."""
    flip_margin: float | None
    """Largest margin by which the reference preferred a label that changed, in units of the twin's root mean square error.
    None without labels."""
    rank_ratio: float | None
    """Loss of rank correlation of the embeddings' similarities, in units of the twin's loss."""
    parent_ratio: float | None
    """Mean difference from the parent, in units of the twin's error. None where the parent has another precision."""
    vectors: int


class Certificate(BaseModel, extra="forbid"):
    """The result of comparing the weights on disk with the parent's.

    `certified`: every weight is the parent's, equal or rounded, and nothing else changed as far as `reason` says. `contradicted`: a weight is
    not. `none`: such a comparison is not possible.
    """

    status: Literal["certified", "contradicted", "none"]
    reason: str
    weights: int = 0
    """Tensors compared."""


def contradiction(precision: str) -> Literal["contradicted", "none"]:
    """Return the status for a weight that is not its parent's: in float32, where parity has tight limits, just `none`."""
    return "none" if precision == "float32" else "contradicted"
