"""CUDA graphs of one-row batches: a forward is one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field, model_validator

from bertopt.core import Context, Eager, Pass, Result, RuntimeFacts
from bertopt.errors import Unsupported

if TYPE_CHECKING:
    import torch

_NO_GPU = "CUDA graphs need a GPU; set device: cuda, or leave capture_graphs out"
_NOT_PACKED = "graphs are captured of one-row batches; put pack_sequences with attention: varlen before capture_graphs"


class CaptureGraphs(Pass[Eager, Eager]):
    """Capture the forward as CUDA graphs of a few sizes and replay them. Counts the sizes.

    A batch is padded to the next size: powers of two and the halfway points between them. A graph has room for one text
    for every 16 tokens; from 1,024 tokens on there are also graphs with one for every 32 and every 64 tokens. Larger batches
    run without a graph. A graph is captured at the first batch of its size and number of texts, which takes some hundred
    milliseconds, or with `ahead` when the artefact is loaded.
    """

    incompatible_with: ClassVar[dict[str, str]] = {"capture_graphs": "the forward is captured already"}

    smallest: int = Field(64, ge=64, description="tokens of the smallest graph, a multiple of 64")
    largest: int = Field(32_768, le=262_144, description="tokens of the largest graph, a multiple of 64")
    ahead: bool = Field(False, description="capture all sizes when the artefact is loaded, not when first needed")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.smallest > self.largest or self.smallest % 64 or self.largest % 64:
            raise ValueError(
                f"smallest and largest must be multiples of 64, smallest first; got {self.smallest} and {self.largest}"
            )
        return self

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each graph, ascending."""
        steps = (64 << octave for octave in range(14))
        between = {size for step in steps for size in (step, step * 3 // 2)}
        return tuple(sorted({self.smallest, self.largest, *(s for s in between if self.smallest < s < self.largest)}))

    def conflict(self, before: Sequence[Pass[Any, Any]]) -> str | None:
        if not any(getattr(step, "attention", None) == "varlen" for step in before):
            return _NOT_PACKED
        return super().conflict(before)

    def device_conflict(self, device: str, before: Sequence[Pass[Any, Any]]) -> str | None:
        return _NO_GPU if device == "cpu" else None

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        if ctx.device != "cuda":
            raise Unsupported(_NO_GPU)
        return model.rewritten(self)

    def rewrite(self, network: torch.nn.Module) -> dict[str, int]:
        model: Any = network
        if not model.spec.one_row:
            raise Unsupported(_NOT_PACKED)
        model.graph_sizes, model.graphs_ahead = self.sizes, self.ahead
        return {"sizes": len(self.sizes)}

    def effects(self, model: Eager, facts: RuntimeFacts) -> dict[str, tuple[int, int]]:
        found = {"captured graph, or more": (1, min(1, facts.captured_graphs or 0))}
        return found | ({"graphs captured ahead": (len(self.sizes), facts.captured_graphs or 0)} if self.ahead else {})
