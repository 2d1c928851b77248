"""What a stage of reduced precision is held to: what its rounding should cost, and the weights of its parent."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class RoundingLimits(BaseModel):
    """Limits of reduced precision. None is not checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")

    error_ratio_max: float | None = Field(
        None, ge=0, description="reduced precision: largest mean error on real texts, in units of the simulated rounding's"
    )
    parent_ratio_max: float | None = Field(
        None, ge=0, description="where the parent has the same precision: the same for the difference from the parent"
    )
    slope_error_max: float | None = Field(
        None, ge=0, description="reduced precision: largest |slope - 1| of outputs against the reference's, in units of the simulated rounding's error"
    )
    bias_max: float | None = Field(
        None, ge=0, description="reduced precision: largest mean shift of a class or dimension, in units of the simulated rounding's"
    )
    flip_margin_max: float | None = Field(
        None, ge=0, description="reduced precision: largest margin of a label that changes, in units of the rounding error"
    )
    rank_ratio_max: float | None = Field(
        None, ge=0, description="reduced precision: largest loss of rank correlation, in units of the simulated rounding's"
    )
    cosine_median_min: float | None = Field(
        None, ge=-1, le=1, description="smallest median, over the cases of one padding pattern, of the mean cosine"
    )
    certified: bool | None = Field(None, description="true: weights that contradict their certificate fail; false: they do not")


class Rounding(BaseModel):
    """How far a stage of reduced precision is from the reference on real texts, beside what its rounding should cost.

    That is measured on the twin: the reference with the same rounding simulated.
    """

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    error: float
    """Mean over all compared vectors of their relative error."""
    error_ratio: float
    """`error` in units of the twin's."""
    slope_error: float
    """|slope - 1| of outputs against the reference's, each about its mean, in units of the twin's error: a changed temperature."""
    bias: float
    """Largest mean shift of a class or dimension, in units of the twin's: its largest shift or root mean square error."""
    flip_margin: float | None
    """Largest margin by which the reference preferred a label that changed, in units of the twin's root mean square error.
    None without labels."""
    rank_ratio: float | None
    """Rank correlation of the embeddings' similarities that is lost, in units of what the twin loses."""
    parent_ratio: float | None
    """Mean difference from the parent, in units of the twin's error. None where the parent has another precision."""
    vectors: int


class Certificate(BaseModel):
    """What a comparison of the weights on disk with the parent's says.

    `certified`: every weight is the rounding of the parent's, and nothing else changed as far as `reason` says.
    `contradicted`: a weight is not. `none`: no such comparison can be made.
    """

    model_config = ConfigDict(extra="forbid")

    status: Literal["certified", "contradicted", "none"]
    reason: str
    weights: int = 0
    """Tensors compared."""


def contradiction(precision: str) -> Literal["contradicted", "none"]:
    """Return what a weight that is not its parent's means: in float32, which parity holds tightly, that there is no certificate."""
    return "none" if precision == "float32" else "contradicted"
