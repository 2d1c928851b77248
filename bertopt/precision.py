"""How models of reduced precision round, which decides how large their errors should be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: What half precision rounds: every weight and the result of every operator; or only what the matrix products of the encoder's layers, of a
#: projection of embeddings and of a head over the vocabulary multiply, while sums, norms and activations are float32.
HalfRounding = Literal["operators", "layer_products"]


@dataclass(frozen=True)
class Int8Rounding:
    """How an INT8 model is rounded."""

    scales: Literal["batch", "token", "static"] = "batch"
    """What one activation scale covers; a static scale is calibrated and covers all inputs."""
    embeddings: bool = False
    """Whether embedding tables have 8 bits too, with one scale for each id."""
    smooth_quant: float | None = None
    """Alpha of SmoothQuant, which moves large channels of activations into the weights."""
    smooth_shared: bool = True
    """Whether SmoothQuant also changes layers whose weights are used in several places."""
    weight_bits: Literal[7, 8] | None = 8
    """None: 7 where the model was quantised for a CPU that saturates with 8, else 8. Activations always have 8."""
    layers_only: bool = False
    """Whether only the encoder's layers and a head over the vocabulary are INT8: a projection of embeddings is bfloat16, the rest (pooler, …) float."""
