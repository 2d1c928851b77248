"""What the coverage sweeps ran of a model, and what they found."""

from __future__ import annotations

from pydantic import BaseModel

#: What a run does, in its words, while the stage to deliver runs every sweep: the longest check of most runs.
SWEEPING = "every id and length"


class SweptOutput(BaseModel, frozen=True, extra="forbid", ser_json_inf_nan="strings"):
    """How far an output's rows are from the reference's: each by the norm of the difference, relative to the row's."""

    median: float
    worst: float
    where: str
    """The worst row and its probe."""
    p90: float | None = None
    """What nine rows of ten keep. None in reports of earlier versions."""
    small_batches: float | None = None
    """Median of the rows in batches of the sizes that real texts are compared in; None without such."""
    large_batches: float | None = None
    """Median of the rows in larger batches."""
    lengths: dict[str, float] = {}
    """Median of the rows by their number of tokens, of pairs by that of the second text, and of rows by the size of their batch."""
    short_rows: float | None = None
    """Median of the rows of a few tokens in batches not much longer; None where too few were run."""
    padded_rows: float | None = None
    """Median of the rows of as few tokens that are mostly padding; None where too few were run."""
    one_number: bool = False
    """Whether a row's output is one number, whose errors are spread further about their median than those of vectors."""


class Coverage(BaseModel, frozen=True, extra="forbid", ser_json_inf_nan="strings"):
    """What the probes and the coverage sweeps run of a model, as shares, and what the sweeps measure."""

    seed: int
    ids: float
    positions: float
    batch_sizes: float
    """Of those from 1 to the largest that the predictor makes on a CPU."""
    lengths: float
    """Of all padded lengths."""
    text_lengths: float | None = None
    """Of all numbers of valid tokens of a row. None in reports of 0.1."""
    token_types: float
    outputs: dict[str, SweptOutput]
    rows: int
    tokens: int
    finite: bool
