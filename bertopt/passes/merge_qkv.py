"""One matrix product for query, key and value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from bertopt.core import Context, Eager, Pass, Result, RuntimeFacts
from bertopt.errors import Unsupported

if TYPE_CHECKING:
    import torch

_REASONS = {
    "modernbert": "ModernBERT's query, key and value are one product already; leave merge_qkv out",
    "deberta": "DeBERTa's query, key and value are one product already; leave merge_qkv out",
    "mobilebert": "MobileBERT's value is projected from another tensor than its query and key; leave merge_qkv out",
    "convbert": "ConvBERT's query is multiplied into its convolutions too; leave merge_qkv out",
    "squeezebert": "SqueezeBERT's query, key and value are grouped convolutions, which do not merge into one; leave merge_qkv out",
    "deberta-v2": "DeBERTa-v2 projects its relative positions with the query and key matrices too; leave merge_qkv out",
}


class MergeQkv(Pass[Eager, Eager]):
    """Project query, key and value in one product, then split. Counts merged products of one forward.

    After `keep_cls_only` the last layer asks for one token: its query stays apart, key and value are merged.
    """

    incompatible_with: ClassVar[dict[str, str]] = {
        "merge_qkv": "query, key and value are merged already",
        "use_better_transformer": "nn.TransformerEncoder projects query, key and value in one product itself; leave one of the two out",
        **{
            later: f"it changes the layers that {later} works on; put merge_qkv before {later}"
            for later in ("pack_sequences", "cast_half")
        },
    }

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        return model.rewritten(self)

    def rewrite(self, network: torch.nn.Module) -> dict[str, int]:
        from bertopt.modeling import encoder_layers, families

        base: Any = network.base
        family = base.config.model_type
        if families.of(base.config).parts is None:
            raise Unsupported(_REASONS.get(family, f"merge_qkv does not know the layers of {family}; leave merge_qkv out"))
        before = _calls(network)[0]
        for layer in encoder_layers.distinct(base):
            attention = encoder_layers.attention(layer, base)
            query, key, value = attention.parts.projections
            if query not in attention._modules or key not in attention._modules:
                continue
            last = network.first_only and layer is encoder_layers.distinct(base)[-1]
            attention.merge((key, value) if last else (query, key, value), "kv" if last else "qkv")
        return {"merged_products": _calls(network)[0] - before}

    def effects(self, model: Eager, facts: RuntimeFacts) -> dict[str, tuple[int, int]]:
        merged, separate = _calls(model.network)
        return {"merged projections": (model.spec.layers, merged), "separate key and value projections": (0, separate)}


def _calls(network: Any) -> tuple[int, int]:
    """How many merged products, and how many separate keys and values, one forward computes."""

    from bertopt.modeling import encoder_layers

    parts = encoder_layers.parts_of(network.base.config)
    calls = {True: 0, False: 0}

    def counting(merged: bool) -> Any:
        def count(*_: Any) -> None:
            calls[merged] += 1

        return count

    hooks = [
        child.register_forward_hook(counting(name in ("qkv", "kv")))
        for layer in encoder_layers.distinct(network.base)
        for name, child in layer.get_submodule(parts.attention).named_children()
        if name in ("qkv", "kv", *parts.projections[1:])
    ]
    network.run_example(hooks=hooks)
    return calls[True], calls[False]
