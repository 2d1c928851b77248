"""Encoder products in 8-bit floating point."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from bertopt.core import Context, Eager, Pass, Result, RuntimeFacts
from bertopt.errors import Unsupported

if TYPE_CHECKING:
    import torch

_ORDER = "the rest of the network stays in bfloat16; put cast_half with dtype: bfloat16 and mode: cast before quantize_fp8"


class QuantizeFp8(Pass[Eager, Eager]):
    """Multiply in fp8 (e4m3) in the encoder's linear layers. Counts the layers.

    Weights have a scale for each output and are quantised from the checkpoint when the stage is opened; activations have
    a scale for each token, computed in every forward, so that a text's outputs do not depend on its batch. Task heads,
    embeddings, attention and LayerNorm stay in bfloat16, as do layers whose sizes are no multiples of 16, and the last layer of
    the encoder, whose errors no later layer dampens (`keep_last_layers`). Faster than
    bfloat16 only on GPUs with fp8 (sm89 and later), best after compile_torch has fused the scaling; others refuse it. A
    CPU runs it slowly.
    """

    incompatible_with: ClassVar[dict[str, str]] = {
        "quantize_fp8": "the encoder multiplies in fp8 already",
        "use_better_transformer": "nn.TransformerEncoder's fast path reads the weights itself; leave one of the two out",
    }

    keep_bf16: tuple[str, ...] = Field(
        (), description="modules to leave in bfloat16: names, ends of names or patterns, such as layer.3.output"
    )
    keep_last_layers: int = Field(
        1, ge=0, description="layers at the end of the encoder to leave in bfloat16; never more than a third of all"
    )

    def conflict(self, before: Sequence[Pass[Any, Any]]) -> str | None:
        cast = next((step for step in before if step.name() == "cast_half"), None)
        if (getattr(cast, "dtype", ""), getattr(cast, "mode", "")) != ("bfloat16", "cast"):
            return _ORDER
        return super().conflict(before)

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        import torch

        from bertopt.modeling import fp8

        if model.precision != "bfloat16":
            raise Unsupported(_ORDER)
        if ctx.device == "cpu" and (reason := fp8.cpu_refusal()):
            raise Unsupported(reason)
        if ctx.device == "cuda" and (here := torch.cuda.get_device_capability()) < (8, 9):
            raise Unsupported(f"fp8 needs a GPU of sm89 or later; this one is sm{here[0]}{here[1]}: leave quantize_fp8 out")
        return model.rewritten(self, precision="float8")

    def rewrite(self, network: torch.nn.Module) -> dict[str, int]:
        from bertopt.modeling.fp8 import Fp8Linear, takes

        base: Any = network.base
        if base.config.model_type == "squeezebert":
            raise Unsupported("SqueezeBERT's products are grouped convolutions, for which there is no fp8 kernel; leave quantize_fp8 out")
        chosen = {name: layer for name, layer in self._unkept(base) if takes(layer)}
        for name, layer in chosen.items():
            parent, _, own = name.rpartition(".")
            setattr(base.get_submodule(parent), own, Fp8Linear(layer).train(layer.training))
        return {"linear_layers": len(chosen)}

    def effects(self, model: Eager, facts: RuntimeFacts) -> dict[str, tuple[int, int]]:
        from bertopt.modeling.fp8 import DTYPE, Fp8Linear, takes

        layers = [layer for _, layer in self._unkept(model.network.base)]
        quantised = [layer for layer in layers if isinstance(layer, Fp8Linear)]
        left = sum(takes(layer) for layer in layers)
        return {
            "linear layers in fp8": (max(1, len(quantised)), sum(layer.weight.dtype == DTYPE for layer in quantised)),
            "linear layers left in bfloat16": (0, left),
        }

    def _unkept(self, base: Any) -> Iterator[tuple[str, Any]]:
        """The layers, by name, that lie in none of the modules to keep. Raises Unsupported for a pattern that names none."""
        from bertopt.modeling.encoder_layers import chosen, distinct

        modules = {name: module for name, module in base.named_modules() if name}
        kept = {id(inner) for name in chosen(modules, self.keep_bf16, "keep_bf16") for inner in modules[name].modules()}
        # What stands beside the layers of the encoder (pooler, projection of embeddings) is small.
        layers = distinct(base)
        layers = layers[: len(layers) - min(self.keep_last_layers, len(layers) // 3)]
        inside = {id(inner) for layer in layers for inner in layer.modules()}
        return ((name, module) for name, module in modules.items() if id(module) in inside - kept)
