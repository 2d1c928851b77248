"""Rows that hold several texts, so that no padding is computed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from bertopt.core import Context, Eager, Pass, Result, RuntimeFacts, Spec
from bertopt.errors import Unsupported

if TYPE_CHECKING:
    import torch


class PackSequences(Pass[Eager, Eager]):
    """Let the network take rows of several texts (`Spec.network_inputs`); tokens attend within their text only.

    Answers that are one a text are gathered inside, so a pooled model no longer gives `last_hidden_state`. Counts
    the inputs added.
    """

    incompatible_with: ClassVar[dict[str, str]] = {
        "pack_sequences": "rows hold several texts already; set row_length: where they are first packed",
        "use_better_transformer": "nn.TransformerEncoder's fast path masks padding only, not texts from each other; leave one of the two out",
        "cast_half": "half precision is for the finished network; put pack_sequences before cast_half",
    }

    row_length: int = Field(256, ge=16, description="tokens of one row; a longer text makes its rows longer")

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        result = model.rewritten(self)
        return Result(replace(result.model, spec=self._packed(model.spec)), result.changes)

    def rewrite(self, network: torch.nn.Module) -> dict[str, int]:
        from bertopt.modeling import encoder_layers

        model: Any = network
        family, pooling = model.base.config.model_type, model.spec.pooling
        if family not in encoder_layers.PARTS:
            raise Unsupported(
                f"{family} takes no mask between tokens that keeps its relative positions; families that can be packed: "
                f"{', '.join(encoder_layers.PARTS)}"
            )
        if pooling == "max":
            raise Unsupported("max pooling of packed rows would take a copy of the row for every text in it")
        before = set(model.inputs)
        model.spec = self._packed(model.spec)
        return {"inputs": len(set(model.inputs) - before)}

    def effects(self, model: Eager, facts: RuntimeFacts) -> dict[str, tuple[int, int]]:
        own, others = _reach(model.network)
        return {
            "tokens of a row": (self.row_length, model.spec.row_length or 0),
            "text that its own tokens change, or more": (1, min(1, own)),
            "texts that another's tokens change": (0, others),
        }

    def _packed(self, spec: Spec) -> Spec:
        return spec.model_copy(update={"layout": "packed", "row_length": self.row_length})


def _reach(network: Any) -> tuple[int, int]:
    """Change the first text of a packed row: 1 where its own answer changes, and how many other texts' do."""
    import torch

    inputs = dict(zip(network.inputs, network.example(2, 12), strict=True))
    segments = inputs["segment_ids"]
    ids = inputs["input_ids"]
    other = torch.where((segments == 1) & (torch.arange(len(ids), device=ids.device)[:, None] == 0), ids + 1, ids)
    with torch.inference_mode():
        before = network(*inputs.values())
        after = network(*{**inputs, "input_ids": other}.values())
    changed: set[tuple[int, int]] = set()
    for old, new in zip(before, after, strict=True):
        differs = ~torch.isclose(old, new, rtol=1e-4, atol=1e-5)
        if differs.dim() > 2:
            differs = differs.any(dim=-1)
        for row, place in differs.nonzero().tolist():
            text = place + 1 if "first_tokens" in inputs else int(segments[row, place])
            changed.add((row, text))
    own = {(0, 1)}
    # Padding attends to padding: nobody reads its answers.
    return len(changed & own), len({where for where in changed - own if where[1]})
