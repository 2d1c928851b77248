"""What `bertopt debug` finds, JSON-ready."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class _Result(BaseModel):
    # JSON has no NaN: it is written as the string "NaN" and read back as a float.
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")


class Row(_Result):
    """One tensor of the stage beside the reference's, at its worst over the probes. Only valid tokens count."""

    label: str
    """`layer 1 attention`, `layer 1 · attention.self.query`, `logits`."""
    tensor: str
    """The module whose output it is, or the graph's name of the value."""
    layer: int | None
    own: float
    """rel_l2 added since the previous tensor: computed from the reference's values there."""
    total: float
    """rel_l2 of a free run, errors of all layers before included."""
    max_abs: float
    """Largest absolute difference added here."""
    growth: float | None
    """This `total` over that of the row before."""
    peak: float
    """Largest magnitude in the reference: float16 ends at 65504."""
    probe: str
    row: int
    token: int | None
    """Position in the row; None where the tensor has one vector a text."""
    token_text: str | None
    element: int


class Keep(_Result):
    """A set of operators or modules that, kept in float32, lets the stage pass its limits."""

    names: list[str]
    runs: int
    minimal: bool
    """Whether each of them was shown to be needed; False where the allowed runs were used up before."""
    recipe: str
    """The step, as it should stand in the recipe."""


class DebugFindings(_Result):
    stage: str
    form: str
    probes: list[str]
    layers: list[Row]
    """Embeddings, every layer's attention and output, answers; in the order in which they are computed."""
    tensors: list[Row] = []
    """Inside the first layer whose error jumps: every tensor that both sides have."""
    first_layer: Row | None = None
    """The first row of `layers` whose own error jumps; None where none stands out."""
    first_tensor: Row | None = None
    notes: list[str] = []
    keep: Keep | None = None
