"""The limits of a stage: those for reduced precision, and all."""

from __future__ import annotations

from pydantic import BaseModel, Field


class RoundingLimits(BaseModel, extra="forbid", frozen=True, ser_json_inf_nan="strings"):
    """Limits of reduced precision. None is not checked."""

    error_ratio_max: float | None = Field(
        None, ge=0, description="reduced precision: largest mean error on real texts, divided by the simulated rounding's"
    )
    worst_ratio_max: float | None = Field(
        None, ge=0, description="reduced precision: largest error of one text or token, divided by the simulated rounding's largest"
    )
    parent_ratio_max: float | None = Field(
        None, ge=0, description="where the parent has the same precision: the same for the difference from the parent"
    )
    slope_error_max: float | None = Field(
        None, ge=0, description="reduced precision: largest |slope - 1| of outputs against the reference's, divided by the simulated rounding's error"
    )
    bias_max: float | None = Field(
        None, ge=0, description="reduced precision: largest mean shift of a class or dimension, divided by the simulated rounding's"
    )
    column_ratio_max: float | None = Field(
        None, ge=0, description="reduced precision: largest deviation of the errors of a class or dimension, divided by the simulated rounding's"
    )
    flip_margin_max: float | None = Field(
        None, ge=0, description="reduced precision: largest margin of a label that changes, divided by the simulated rounding's error"
    )
    rank_ratio_max: float | None = Field(
        None, ge=0, description="reduced precision: largest loss of rank correlation, divided by the simulated rounding's"
    )
    cosine_median_min: float | None = Field(
        None, ge=-1, le=1, description="smallest median, over the rows of one padding pattern, of their batch's median cosine"
    )
    certified: bool | None = Field(None, description="true: weights that contradict their certificate fail; false: they do not")


class Limits(RoundingLimits):
    """The largest differences from the reference that pass. None is not checked. NaN never passes."""

    max_abs: float | None = Field(None, ge=0, description="largest absolute difference of any compared element")
    rel_l2: float | None = Field(None, ge=0, description="largest relative L2 difference of any case")
    cosine_min: float | None = Field(None, ge=-1, le=1, description="smallest cosine of any compared vector")
    cosine_mean: float | None = Field(None, ge=-1, le=1, description="smallest mean cosine of any case")
    label_flips_max: float | None = Field(None, ge=0, le=1, description="largest share of top-1 labels that change; of multi-label models, of texts that get other labels")
    metric_drop_max: float | None = Field(None, ge=0, le=1, description="largest drop of the task metric")
    invariance_max: float | None = Field(None, ge=0, description="largest change of a text's output by its batch or padding")
    spearman_min: float | None = Field(None, ge=-1, le=1, description="smallest rank correlation of pairwise similarities")
    top_k_overlap_min: float | None = Field(None, ge=0, le=1, description="smallest mean share of neighbours that stay")
    speedup_min: float | None = Field(None, gt=0, description="smallest end-to-end speed-up; the whole 95 % interval must be at least this")
    mix_p50_ms_max: float | None = Field(None, gt=0, description="largest median time of the timed texts, milliseconds")
    peak_rss_max: float | None = Field(None, gt=0, description="largest peak memory of the process, MB (10⁶ bytes)")
    size_max: float | None = Field(None, gt=0, description="largest size of the stage's files, MB (10⁶ bytes)")

    def over(self, other: Limits) -> Limits:
        """These limits where stated, else `other`'s."""
        return other.model_copy(update=self.model_dump(exclude_none=True))
