"""The parts of transformers' encoder layers that passes rewrite, by family. R rows, L tokens, Q queries, H hidden."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from bertopt.errors import Unsupported
from bertopt.modeling import families
from bertopt.modeling.families import Parts

#: Cosines and sines of rotary positions.
Turns = tuple[torch.Tensor, torch.Tensor]


class Attention(nn.Module):
    """A family's self-attention under the family's names, whose projections can be merged.

    Tokens [R, Q, H] attend to `memory` [R, L, H], which is themselves unless given. The mask [R, 1, Q, L] is boolean
    or added to the scores, as the attention of the configuration takes it. With rotary positions, `position_embeddings` are the cosines and
    sines [R, L, D] of `memory`, `asking_embeddings` those of the tokens where they are others.
    """

    def __init__(self, old: Any, config: Any) -> None:
        super().__init__()
        for name, child in old.named_children():
            self.add_module(name, child)
        self.config = config
        self.head_size = int(old.attention_head_size)
        self.is_causal = False

    @property
    def parts(self) -> Parts:
        return parts_of(self.config)

    def merge(self, names: Sequence[str], name: str) -> None:
        """Put the projections `names` into one product called `name`, their outputs one after the other."""
        old: list[Any] = [self.get_submodule(part) for part in names]
        weight = old[0].weight
        with torch.device("meta"):
            merged = nn.Linear(old[0].in_features, sum(part.out_features for part in old), bias=old[0].bias is not None)
        merged.weight = nn.Parameter(torch.cat([part.weight for part in old]), requires_grad=weight.requires_grad)
        if old[0].bias is not None:
            merged.bias = nn.Parameter(torch.cat([part.bias for part in old]), requires_grad=weight.requires_grad)
        for part in names:
            delattr(self, part)
        self.add_module(name, merged.train(self.training))

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None, memory: torch.Tensor | None = None, position_embeddings: Turns | None = None,
        asking_embeddings: Turns | None = None, **_: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        projected = self._projected(hidden_states, hidden_states if memory is None else memory)
        query, key, value = (each.view(*each.shape[:-1], -1, self.head_size).transpose(1, 2) for each in projected)
        if position_embeddings is not None:
            query, key = _turned(query, asking_embeddings or position_embeddings), _turned(key, position_embeddings)
        if position_bias is not None:
            attention_mask = position_bias if attention_mask is None else position_bias + attention_mask
        attend: Any = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, _eager)
        context = attend(self, query, key, value, attention_mask, dropout=0.0, scaling=self.head_size**-0.5)[0]
        context = context.flatten(2)
        if self.parts.output is not None:
            context = self.get_submodule(self.parts.output)(context)
        # ALBERT's residual and norm are inside.
        if "LayerNorm" in self._modules:
            context = self.get_submodule("LayerNorm")(hidden_states + context)
        return context, None

    def _projected(self, asking: torch.Tensor, memory: torch.Tensor) -> Sequence[torch.Tensor]:
        if "qkv" in self._modules:
            merged: torch.Tensor = self.get_submodule("qkv")(asking)
            return merged.chunk(3, dim=-1)
        query, key, value = self.parts.projections
        asked = self.get_submodule(query)(asking)
        if "kv" in self._modules:
            return (asked, *self.get_submodule("kv")(memory).chunk(2, dim=-1))
        return asked, self.get_submodule(key)(memory), self.get_submodule(value)(memory)


def _turned(vectors: torch.Tensor, by: Turns) -> torch.Tensor:
    """Queries or keys [R, heads, L, D] turned by their positions, in float32 as transformers does it."""
    cosine, sine = (each.unsqueeze(1) for each in by)
    front, back = vectors.float().chunk(2, dim=-1)
    return (vectors.float() * cosine + torch.cat((-back, front), dim=-1) * sine).to(vectors.dtype)


def _eager(
    _: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float,
    **__: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    scores = query @ key.transpose(2, 3) * scaling
    weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


def parts_of(config: Any) -> Parts:
    """Names of modules in a model whose family has `parts`."""
    found = families.of(config).parts
    assert found is not None
    return found


def distinct(base: Any) -> list[Any]:
    """Every layer of a base model once, in order, the last one also where `detach_last_layer` took it out."""
    if families.of(base.config).parts is None:
        return [*(getattr(base, "layers", None) or getattr(base.encoder, "layer", None) or base.encoder.layers)]
    stack = getattr(base, parts_of(base.config).stack)
    if base.config.model_type == "albert":
        layers = [layer for group in stack.albert_layer_groups for layer in group.albert_layers]
    else:
        layers = list(stack.layer)
    return [*layers, *([stack.last] if hasattr(stack, "last") else [])]


def attention(layer: Any, base: Any) -> Attention:
    """Return a layer's `Attention`, after putting it in place of the family's module if that was not done yet."""
    parts = parts_of(base.config)
    there = layer.get_submodule(parts.attention)
    if not isinstance(there, Attention):
        there = Attention(there, base.config).train(there.training)
        parent, _, name = parts.attention.rpartition(".")
        setattr(layer.get_submodule(parent), name, there)
    return there


def attends_by_function(encoder: Any) -> bool:
    """Whether `attend_by` can exchange the function that a transformers model attends by."""
    return bool(encoder._supports_attention_backend) or families.of(encoder.base_model.config).fixed_attention


def attend_by(encoder: Any, name: str) -> None:
    """Let every layer attend by the function that transformers knows as `name`."""
    base = encoder.base_model
    if not families.of(base.config).fixed_attention:
        encoder.set_attn_implementation(name)
        return
    for layer in distinct(base):
        attention(layer, base)
    base.config._attn_implementation = name


def chosen(modules: Mapping[str, Any], patterns: Sequence[str], option: str) -> set[str]:
    """Names of the modules that the patterns match, whole or from a dot on. Raises Unsupported for a pattern of `option` that
    matches none."""
    names: set[str] = set()
    for pattern in patterns:
        found = {name for name in modules if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")}
        if not found:
            some = ", ".join(f"'{name}'" for name in [*modules][-3:])
            raise Unsupported(f"{option} must name modules of the encoder, such as {some}; got '{pattern}'")
        names |= found
    return names


def detach_last_layer(base: Any) -> None:
    """Take the last layer out of the base model's stack, which then returns that layer's input: see `run_detached_layer`."""
    config = base.config
    stack = getattr(base, parts_of(config).stack)
    if config.model_type == "albert":
        if config.num_hidden_groups != 1 or config.inner_group_num != 1:
            raise Unsupported(
                f"ALBERT's layers must be one group of one; got {config.num_hidden_groups} of {config.inner_group_num}"
            )
        shared = stack.albert_layer_groups[0].albert_layers[0]
        kept = {id(each): each for each in (*shared.parameters(), *shared.buffers(), config)}
        stack.last = copy.deepcopy(shared, kept)
        config.num_hidden_layers -= 1
    else:
        stack.last = stack.layer[-1]
        stack.layer = stack.layer[:-1]
    attention(stack.last, base)
    if norm := parts_of(config).last_norm:
        stack.last_norm = base.get_submodule(norm)
        base.set_submodule(norm, nn.Identity())


def run_detached_layer(
    base: Any, hidden: torch.Tensor, first: torch.Tensor, mask: Any, bias_rows: Any, turns: tuple[Turns, Turns] | None = None
) -> torch.Tensor:
    """The layer that `detach_last_layer` took out, for the tokens `first` [R, Q, H] of `hidden` [R, L, H] alone.

    `mask` is [R, 1, Q, L]; `bias_rows` takes from scores [R, heads, L, L] the rows of these tokens; `turns` are those of all tokens and of these.
    """
    parts = parts_of(base.config)
    stack = getattr(base, parts.stack)
    layer = stack.last
    if parts.first_norm is not None:
        norm, (every, asking) = layer.get_submodule(parts.first_norm), turns or (None, None)
        context, _ = layer.attention.self(norm(first), mask, memory=norm(hidden), position_embeddings=every, asking_embeddings=asking)
        given = stack.last_norm(layer.feed_forward_chunk(layer.attention.output(context, first)))
    elif base.config.model_type == "mpnet":
        bias = bias_rows(base.encoder.compute_position_bias(hidden))
        context, _ = layer.attention.attn(first, mask, bias, memory=hidden)
        attended = layer.attention.LayerNorm(context + first)
        given = layer.output(layer.intermediate(attended), attended)
    elif base.config.model_type == "rembert":
        # Its layer passes nothing on to the attention that it does not know.
        context, _ = layer.attention.self(first, mask, memory=hidden)
        given = layer.feed_forward_chunk(layer.attention.output(context, first))
    else:
        given = layer(first, mask, memory=hidden)
    assert isinstance(given, torch.Tensor)
    return given


def classify(encoder: Any, first: torch.Tensor) -> torch.Tensor:
    """Logits [N, C] of texts whose first tokens are `first` [N, 1, H], by the model's own sequence classifier."""
    family, base = encoder.config.model_type, encoder.base_model
    if families.FAMILIES[family].classifier[0].endswith(".pooler.dense"):
        first = base.pooler(first)
    elif family == "albert":
        first = base.pooler_activation(base.pooler(first[:, 0]))
    elif family == "distilbert":
        first = torch.relu(encoder.pre_classifier(first[:, 0]))
    logits = encoder.classifier(first)
    assert isinstance(logits, torch.Tensor)
    return logits
