"""The last layer for the first token of each text alone, where nothing reads the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from bertopt.core import Context, Eager, Pass, Result, RuntimeFacts
from bertopt.errors import Unsupported

if TYPE_CHECKING:
    import torch

#: Of a layer: query, attention output, and both halves of the feed-forward network.
_NARROWED = 4


class KeepClsOnly(Pass[Eager, Eager]):
    """Compute query, attention output and feed-forward of the last layer for the first token alone.

    For classifiers and CLS pooling. Key and value still cover all tokens, so the answers are the full model's, for
    left padding too. A pooled model no longer gives `last_hidden_state`. Counts the products narrowed to one token.
    """

    incompatible_with: ClassVar[dict[str, str]] = {
        "keep_cls_only": "the last layer runs for the first token alone already",
        "use_better_transformer": "nn.TransformerEncoder runs whole layers only; leave one of the two out",
        **{
            later: f"it changes the layers that {later} works on; put keep_cls_only before {later}"
            for later in ("merge_qkv", "pack_sequences", "cast_half")
        },
    }

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        return model.rewritten(self)

    def rewrite(self, network: torch.nn.Module) -> dict[str, int]:
        from bertopt.modeling import encoder_layers
        from bertopt.modeling.families import FAMILIES

        model: Any = network
        family = model.base.config.model_type
        if FAMILIES[family].parts is None:
            known = ", ".join(name for name, one in FAMILIES.items() if one.parts)
            raise Unsupported(f"keep_cls_only does not know the layers of {family}; known: {known}")
        if model.spec.pooling not in (None, "cls"):
            raise Unsupported(f"'{model.spec.pooling}' pooling reads every token; leave keep_cls_only out")
        if model.spec.granularity != "text":
            raise Unsupported(f"{model.spec.task} answers for every token; leave keep_cls_only out")
        if model.first_only:
            return {"narrowed_products": 0}
        encoder_layers.detach_last_layer(model.base)
        model.first_only = True
        return {"narrowed_products": _products(model)[0]}

    def effects(self, model: Eager, facts: RuntimeFacts) -> dict[str, tuple[int, int]]:
        narrow, whole = _products(model.network)
        return {
            "products of the last layer for one token": (_NARROWED, narrow),
            "products of the last layer for all tokens (key, value)": (2, whole),
        }


def _products(network: Any) -> tuple[int, int]:
    """How many products the last layer computes for one token a text, and how many for all, in one forward."""
    import torch

    from bertopt.modeling import encoder_layers

    batch, sequence = 2, 6
    seen: list[int] = []
    hooks = [
        module.register_forward_hook(lambda _, given, __: seen.append(given[0].shape[1]))
        for module in encoder_layers.distinct(network.base)[-1].modules()
        if isinstance(module, torch.nn.Linear) and network.first_only
    ]
    network.run_example(batch, sequence, hooks)
    return seen.count(1), seen.count(sequence)
