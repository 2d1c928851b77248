"""Rows that hold several texts, so that no padding is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from bertopt.core import Context, Eager, Pass, Result, RuntimeFacts, Spec
from bertopt.errors import Unsupported

if TYPE_CHECKING:
    import torch


class PackSequences(Pass[Eager, Eager]):
    """Let the network take rows of several texts (`Spec.network_inputs`); tokens attend within their text only.

    Outputs of which each text has one are gathered inside, so a pooled model no longer gives `last_hidden_state`. Counts
    the inputs added, or with attention: varlen the attention calls.

    `attention: varlen` makes a batch one row and computes attention text by text, without a mask: on CUDA by torch's
    variable-length kernel, which takes half precision and head sizes that are multiples of 8 (put the step after
    cast_half); on a CPU by one call for each text, which is slow. It cannot be exported to ONNX.
    """

    incompatible_with: ClassVar[dict[str, str]] = {
        "pack_sequences": "rows hold several texts already; set row_length: where they are first packed",
        "use_better_transformer": "nn.TransformerEncoder's fast path masks padding only, not texts from each other; leave one of the two out",
    }

    attention: Literal["masked", "varlen"] = Field(
        "masked", description="masked: rows of row_length tokens and a mask; varlen: a batch is one row, without a mask"
    )
    row_length: int | None = Field(
        None, ge=16, description="tokens of one row, by default 256, or 32768 with varlen; a longer text makes its row longer"
    )

    @property
    def tokens(self) -> int:
        """Tokens of one row."""
        return self.row_length or (32_768 if self.attention == "varlen" else 256)

    def conflict(self, before: Sequence[Pass[Any, Any]]) -> str | None:
        if self.attention == "masked" and any(step.name() == "cast_half" for step in before):
            return "half precision is for the finished network; put pack_sequences before cast_half"
        return super().conflict(before)

    def device_conflict(self, device: str, before: Sequence[Pass[Any, Any]]) -> str | None:
        if device == "cuda" and self.attention == "varlen" and not any(step.name() == "cast_half" for step in before):
            return "attention: varlen takes half precision only on CUDA; put pack_sequences after cast_half"
        return None

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        if self.attention == "varlen" and ctx.device == "cuda":
            self._check_cuda(model)
        result = model.rewritten(self)
        return Result(replace(result.model, spec=self._packed(model.spec)), result.changes)

    def rewrite(self, network: torch.nn.Module) -> dict[str, int]:
        from bertopt.modeling import neighbours
        from bertopt.modeling.families import FAMILIES

        model: Any = network
        family, pooling = model.base.config.model_type, model.spec.pooling
        packed = [name for name, one in FAMILIES.items() if one.parts or one.packs]
        if family in neighbours.FAMILIES:
            raise Unsupported(f"tokens of {family} read those beside them, which in a packed row may be another text's; leave pack_sequences out")
        if family not in packed:
            raise Unsupported(
                f"{family} takes no mask between tokens that keeps its relative positions, or its head reads all tokens; "
                f"families that can be packed: {', '.join(packed)}"
            )
        if pooling == "max" or model.spec.sparse:
            raise Unsupported(f"{pooling} pooling of packed rows would copy the row for every text in it; leave pack_sequences out")
        if self.attention == "varlen":
            self._use_varlen(model)
        before = set(model.inputs)
        model.spec = self._packed(model.spec)
        if self.attention == "varlen":
            return {"attention_calls": _varlen_calls(model)}
        return {"inputs": len(set(model.inputs) - before)}

    def _check_cuda(self, model: Eager) -> None:
        import torch

        from bertopt.modeling import varlen

        half = getattr(torch, model.precision, torch.bfloat16)
        if reason := varlen.unsupported(half, model.spec.hidden // model.spec.heads):
            raise Unsupported(reason)

    def _use_varlen(self, network: Any) -> None:
        from bertopt.modeling import encoder_layers, varlen

        encoder = network.encoder
        if network.base.config.model_type == "mpnet" or not encoder_layers.attends_by_function(encoder):
            raise Unsupported(
                f"{network.base.config.model_type} has no attention that can be replaced; use attention: masked"
            )
        if network.spec.dropped_id is not None:
            raise Unsupported(f"{network.base.config.model_type} scales a text by its mask tokens, which are counted by a mask between tokens; use attention: masked")
        varlen.register()
        encoder_layers.attend_by(encoder, varlen.NAME)

    def effects(self, model: Eager, facts: RuntimeFacts) -> dict[str, tuple[int, int]]:
        own, others = _reach(model.network)
        return {
            **self._shape(model),
            "text that its own tokens change, or more": (1, min(1, own)),
            "texts that another's tokens change": (0, others),
        }

    def _shape(self, model: Eager) -> dict[str, tuple[int, int]]:
        found = {"tokens of a row": (self.tokens, model.spec.row_length or 0)}
        if self.attention == "varlen":
            found["attention calls without a mask"] = (model.spec.layers, _varlen_calls(model.network))
        return found

    def _packed(self, spec: Spec) -> Spec:
        one_row = self.attention == "varlen"
        return spec.model_copy(update={"layout": "packed", "row_length": self.tokens, "one_row": one_row})


def _varlen_calls(network: Any) -> int:
    """How many times one forward attends from text to text."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from bertopt.modeling import varlen

    calls = 0

    def count(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return varlen.attend(*args, **named)

    ALL_ATTENTION_FUNCTIONS[varlen.NAME] = count
    try:
        network.run_example()
    finally:
        del ALL_ATTENTION_FUNCTIONS[varlen.NAME]
    return calls


def _reach(network: Any) -> tuple[int, int]:
    """Change the first text of a packed row: 1 where its own answer changes, and how many other texts' do.

    Where a model answers every text alike, such as an untrained classifier, there is nothing to see: 1 and 0.
    """
    import torch

    inputs = dict(zip(network.inputs, network.example(2, 12), strict=True))
    segments = inputs["segment_ids"]
    ids = inputs["input_ids"]
    first = (segments == 1) & (torch.arange(len(ids), device=ids.device)[:, None] == 0)
    with torch.inference_mode():
        before, after, every = (network(*{**inputs, "input_ids": torch.where(moved, ids + 1, ids)}.values()) for moved in (segments < 0, first, segments > 0))
    if not any(_differs(old, new).any() for old, new in zip(before, every, strict=True)):
        return 1, 0
    changed: set[tuple[int, int]] = set()
    for old, new in zip(before, after, strict=True):
        differs = _differs(old, new)
        if differs.dim() > 2:
            differs = differs.any(dim=-1)
        for row, place in differs.nonzero().tolist():
            text = place + 1 if network.spec.granularity == "text" else int(segments[row, place])
            changed.add((row, text))
    own = {(0, 1)}
    # Padding attends to padding: nobody reads its answers.
    return len(changed & own), len({where for where in changed - own if where[1]})


def _differs(old: Any, new: Any) -> Any:
    """Return where two answers differ by more than rounding, which is relative to the largest: logits may be 1e-9."""
    import torch

    return ~torch.isclose(old, new, rtol=1e-4, atol=1e-5 * min(1.0, float(old.abs().max())))
