"""Scaled-dot-product attention in place of the eager softmax(QKᵀ)V."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from bertopt.core import Context, Eager, Pass, Result, RuntimeFacts
from bertopt.errors import Unsupported

if TYPE_CHECKING:
    import torch


class UseSdpa(Pass[Eager, Eager]):
    """Run attention through torch's scaled_dot_product_attention. Counts the attention calls of one forward."""

    incompatible_with: ClassVar[dict[str, str]] = {
        "use_sdpa": "attention runs through scaled_dot_product_attention already; set backend: where it is first used",
        "use_better_transformer": "nn.TransformerEncoder brings its own attention, none is left to switch; leave one of the two out",
    }

    backend: Literal["auto", "flash", "efficient", "cudnn", "math"] = Field(
        "auto",
        description="kernel to insist on; auto lets torch choose for each shape, on CUDA among all but cudnn, "
        "which prepares for every new shape for tens of milliseconds",
    )

    def conflict(self, before: Sequence[Pass[Any, Any]]) -> str | None:
        if any(getattr(step, "attention", None) == "varlen" for step in before):
            return "pack_sequences with attention: varlen brings its own attention; leave one of the two out"
        return super().conflict(before)

    def device_conflict(self, device: str, before: Sequence[Pass[Any, Any]]) -> str | None:
        if device == "cuda" and self.backend == "flash":
            return "torch's flash kernel takes no mask on CUDA, and padding needs one; use backend: cudnn or efficient"
        if device == "cuda" and self.backend == "cudnn" and not any(step.name() == "cast_half" for step in before):
            return "torch's cudnn kernel takes half precision only; put use_sdpa after cast_half"
        if device == "cpu" and self.backend in ("cudnn", "efficient"):
            return f"torch has no '{self.backend}' attention kernel for a CPU; use backend: flash, math or auto"
        return None

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        result = model.rewritten(self)
        if self.backend != "auto":
            self._try(result.model.network, ctx.device)
        return result

    def rewrite(self, network: torch.nn.Module) -> dict[str, int]:
        from bertopt.modeling import encoder_layers

        model: Any = network
        encoder = model.encoder
        if not (getattr(encoder, "_supports_sdpa", False) or encoder_layers.attends_by_function(encoder)):
            raise Unsupported(f"transformers' {type(encoder).__name__} has no SDPA implementation; leave use_sdpa out")
        before = attention_calls(network)
        encoder_layers.attend_by(encoder, "sdpa")
        calls = attention_calls(network) - before
        # Only now: here the network is on the CPU, which lacks kernels that the stage's device has.
        model.sdpa_backend = self._kernel()
        return {"attention_calls": calls}

    def _try(self, network: torch.nn.Module, device: str) -> None:
        """Run once where the stage will run. Raises Unsupported where torch has no such kernel for this model there."""
        import torch

        if device == "cuda" and not torch.cuda.is_available():
            raise Unsupported(f"backend: {self.backend} needs a GPU, and torch sees none here; use backend: auto")
        try:
            attention_calls(copy.deepcopy(network).to(device))
        except RuntimeError as error:
            if not re.search("No (available kernel|viable backend)", str(error)):
                raise
            raise Unsupported(
                f"torch has no '{self.backend}' attention kernel for this model on {device}; use backend: auto"
            ) from error

    def effects(self, model: Eager, facts: RuntimeFacts) -> dict[str, tuple[int, int]]:
        network: Any = model.network
        found = {"attention calls": (model.spec.layers, attention_calls(network))}
        if self.backend != "auto":
            found[f"forward held to the '{self.backend}' kernel"] = (1, int(network.sdpa_backend == self._kernel()))
        return found

    def _kernel(self) -> Any:
        """torch's name for `backend`; None leaves the choice to it."""
        from torch.nn.attention import SDPBackend

        kernels = {
            "flash": SDPBackend.FLASH_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "cudnn": SDPBackend.CUDNN_ATTENTION,
            "math": SDPBackend.MATH,
        }
        return kernels.get(self.backend)


def attention_calls(network: Any) -> int:
    """How many times one forward calls scaled_dot_product_attention."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Count(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += func is torch.nn.functional.scaled_dot_product_attention
            return func(*args, **(kwargs or {}))

    with Count() as count:
        network.run_example()
    return int(count.calls)
