"""What the coverage sweeps ran, and what they measured."""

from __future__ import annotations

from pydantic import BaseModel

#: Name of the activity in which the stage to deliver runs every sweep, the longest check of most runs.
SWEEPING = "every id and length"


class SweptOutput(BaseModel, frozen=True, extra="forbid", ser_json_inf_nan="strings"):
    """How far the rows of an output are from the reference's: the norm of the difference, relative to the norm of the row."""

    median: float
    worst: float
    where: str
    """The worst row and its probe."""
    p90: float | None = None
    """90th percentile of the rows. None in reports of earlier versions."""
    small_batches: float | None = None
    """Median of the rows in batches of at most 8 rows, as real texts are compared in; None without such."""
    large_batches: float | None = None
    """Median of the rows in larger batches."""
    lengths: dict[str, float] = {}
    """Median of the rows by their number of tokens, of pairs by the tokens of the second text, and of rows by the size of their batch."""
    short_rows: float | None = None
    """Median of the short rows that are not mostly padding; None where too few were run."""
    padded_rows: float | None = None
    """Median of the short rows that are mostly padding; None where too few were run."""
    one_number: bool = False
    """Whether a row's output is one number: such errors vary more about their median than those of vectors."""


class Coverage(BaseModel, frozen=True, extra="forbid", ser_json_inf_nan="strings"):
    """The shares of a model that probes and coverage sweeps ran, and what the sweeps measured."""

    seed: int
    ids: float
    positions: float
    batch_sizes: float
    """Share of the batch sizes from 1 to the largest that the predictor makes on a CPU."""
    lengths: float
    """Share of all padded lengths."""
    text_lengths: float | None = None
    """Share of all numbers of valid tokens in a row. None in reports of 0.1."""
    token_types: float
    outputs: dict[str, SweptOutput]
    rows: int
    tokens: int
    finite: bool
