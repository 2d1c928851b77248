"""Scaled-dot-product attention in place of the eager softmax(QKᵀ)V."""

from __future__ import annotations

import re
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

    backend: Literal["auto", "flash", "efficient", "math"] = Field(
        "auto", description="kernel to insist on; auto lets torch choose for each shape"
    )

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        return model.rewritten(self)

    def rewrite(self, network: torch.nn.Module) -> dict[str, int]:
        model: Any = network
        encoder = model.encoder
        if not getattr(encoder, "_supports_sdpa", False):
            raise Unsupported(f"transformers' {type(encoder).__name__} has no SDPA implementation")
        before = attention_calls(network)
        encoder.set_attn_implementation("sdpa")
        model.sdpa_backend = self._kernel()
        try:
            return {"attention_calls": attention_calls(network) - before}
        except RuntimeError as error:
            if not re.search("No (available kernel|viable backend)", str(error)):
                raise
            raise Unsupported(
                f"torch has no '{self.backend}' attention kernel for this model here; use backend: auto"
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

    with Count() as count, torch.inference_mode():
        network(*network.example(2, 4))
    return int(count.calls)
