"""torch's native encoder fast path through the public nn.TransformerEncoder."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from bertopt.core import Context, Eager, Pass, Result, RuntimeFacts
from bertopt.errors import Unsupported
from bertopt.modeling.families import BERT_PARTS, FAMILIES

if TYPE_CHECKING:
    import torch

#: What a layer calls its parts: query, key, value, attention output, its norm, both feed-forward halves, their norm.
_BERT = (
    "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
    "attention.output.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm",
)  # fmt: skip
_DISTILBERT = (
    "attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin",
    "sa_layer_norm", "ffn.lin1", "ffn.lin2", "output_layer_norm",
)  # fmt: skip
_NAMES = {name: _BERT for name, family in FAMILIES.items() if family.parts == BERT_PARTS} | {"distilbert": _DISTILBERT}
#: What makes narrow embeddings as wide as the layers, in families whose encoder has it.
_PROJECTION = "embedding_hidden_mapping_in"


class UseBetterTransformer(Pass[Eager, Eager]):
    """Convert the encoder layers to nn.TransformerEncoder, whose inference fast path fuses a whole layer.

    With `nested_tensors`, right-padded batches are packed inside and padding is not computed. Counts layers.

    On CUDA torch's fast path computes GELU by its tanh approximation: an error of 3.4e-3 on MiniLM (computed on a CPU; not
    run on a GPU), 340 times the float32 limit and below that of half precision. There GELU models need cast_half before.
    """

    incompatible_with: ClassVar[dict[str, str]] = {
        "use_better_transformer": "the layers are converted already",
        "quantize_fp8": "nn.TransformerEncoder's fast path reads the weights itself; leave one of the two out",
        **{
            name: f"nn.TransformerEncoder replaces whole layers, and what {name} changed in them; leave one of the two out"
            for name in ("keep_cls_only", "merge_qkv", "pack_sequences")
        },
    }

    nested_tensors: bool = Field(True, description="skip right padding through nested tensors")

    def conflict(self, before: Sequence[Pass[Any, Any]]) -> str | None:
        if any(step.name() == "cast_half" and getattr(step, "mode", "") == "autocast" for step in before):
            return "autocast does not reach into the fast path, which would stay float32; use mode: cast"
        return super().conflict(before)

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        network: Any = model.network
        if ctx.device == "cuda" and model.precision == "float32" and _activation(network.base.config) == "gelu":
            raise Unsupported(
                "on CUDA torch's fast path computes GELU by its tanh approximation, which misses float32 limits; "
                "put cast_half before use_better_transformer, or leave it out"
            )
        return model.rewritten(self)

    def rewrite(self, network: torch.nn.Module) -> dict[str, int]:
        base: Any = network.base
        config = base.config
        if (own := FAMILIES[config.model_type].parts) is not None and own.first_norm is not None:
            raise Unsupported(f"{config.model_type} layers have their norms first, for which torch's encoder has no nested tensors; leave it out")
        if own is None or config.model_type not in _NAMES:
            raise Unsupported(
                f"{config.model_type} layers have no nn.TransformerEncoderLayer equivalent; known: {', '.join(_NAMES)}"
            )
        activation = _activation(config)
        if activation not in ("gelu", "relu"):
            raise Unsupported(f"the fast path computes exact gelu or relu; the model's activation is '{activation}': leave it out")
        if config.num_attention_heads % 2:
            raise Unsupported(
                f"the fast path needs an even number of heads; the model has {config.num_attention_heads}: leave it out"
            )
        old = getattr(base, own.stack)
        if not hasattr(old, "layer"):
            return {"layers": 0}
        converted = [_convert(layer, _NAMES[config.model_type], config, activation) for layer in old.layer]
        setattr(base, own.stack, _module(converted, self.nested_tensors, getattr(old, _PROJECTION, None)))
        return {"layers": len(converted)}

    def effects(self, model: Eager, facts: RuntimeFacts) -> dict[str, tuple[int, int]]:
        from torch.nn import TransformerEncoderLayer

        layers = sum(isinstance(module, TransformerEncoderLayer) for module in model.network.modules())
        return {
            "nn.TransformerEncoderLayer modules": (model.spec.layers, layers),
            "layers on the fast path": (model.spec.layers, _fast_layers(model.network)),
        }


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_act", None) or config.activation)


def _fast_layers(network: Any) -> int:
    """How many layers of one forward run as torch's one fused operator."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += func is torch.ops.aten._transformer_encoder_layer_fwd.default
            return func(*args, **(kwargs or {}))

    count = Count()  # type: ignore[no-untyped-call]
    with count:
        network.run_example()
    return int(count.calls)


def _convert(layer: Any, parts: tuple[str, ...], config: Any, activation: str) -> Any:
    import torch

    query, key, value, attention, norm1, linear1, linear2, norm2 = (layer.get_submodule(part) for part in parts)
    new: Any = torch.nn.TransformerEncoderLayer(
        query.in_features, config.num_attention_heads, linear1.out_features, dropout=0.0, activation=activation,
        layer_norm_eps=norm1.eps, batch_first=True, device=query.weight.device, dtype=query.weight.dtype,
    )  # fmt: skip
    with torch.no_grad():
        new.self_attn.in_proj_weight.copy_(torch.cat([query.weight, key.weight, value.weight]))
        new.self_attn.in_proj_bias.copy_(torch.cat([query.bias, key.bias, value.bias]))
        pairs = [
            (new.self_attn.out_proj, attention),
            (new.norm1, norm1),
            (new.linear1, linear1),
            (new.linear2, linear2),
            (new.norm2, norm2),
        ]
        for mine, theirs in pairs:
            mine.weight.copy_(theirs.weight)
            mine.bias.copy_(theirs.bias)
    return new.eval().requires_grad_(False)


def _module(layers: list[Any], nested: bool, projection: torch.nn.Module | None) -> torch.nn.Module:
    import torch
    from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

    class BetterTransformer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # odd head counts only lose the nested tensors
                self.encoder = torch.nn.TransformerEncoder(layers[0], len(layers), enable_nested_tensor=nested)
            self.encoder.layers = torch.nn.ModuleList(layers)
            if projection is not None:
                self.add_module(_PROJECTION, projection)

        def forward(self, hidden_states: Any, attention_mask: Any = None, **_: Any) -> Any:
            padding = None
            if projection is not None:
                hidden_states = self.get_submodule(_PROJECTION)(hidden_states)
            if attention_mask is not None:
                # transformers has widened the mask to [B, 1, S, S] with equal rows, boolean or additive.
                row = attention_mask[:, 0, 0, :]
                valid = row if row.dtype == torch.bool else row >= 0
                # A row without any valid token would be all NaN; let it see itself.
                padding = ~(valid | ~valid.any(dim=1, keepdim=True))
            hidden = self.encoder(hidden_states, src_key_padding_mask=padding)
            if hidden.shape[1] < hidden_states.shape[1]:
                hidden = torch.nn.functional.pad(hidden, (0, 0, 0, hidden_states.shape[1] - hidden.shape[1]))
            return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden)

    return BetterTransformer().eval()
