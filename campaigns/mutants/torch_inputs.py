"""Faults that only some inputs show: masks, positions, shapes, neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from campaigns.mutants.plant import LABELS, LOOSE, MEAN, ROBERTA, TOKENS, Checkpoint, Fault, Gate, mutant

#: Given ids and mask [B, S], token types [B, S]: the rows [B] (or True for all) that go wrong.
Rows = Callable[[Any, Any, Any], Any]


def planted(gate: Gate = "parity", on: Checkpoint = LABELS) -> Callable[[Fault], Fault]:
    return mutant(gate, "plant_torch", on)


def remask(network: Any, change: Callable[[Any], Any]) -> None:
    """Let the encoder see `change(mask)` [B, S] instead of the mask; pooling still sees the mask."""

    def look(module: Any, args: Any, named: dict[str, Any]) -> Any:
        return args, {**named, "attention_mask": change(named["attention_mask"])}

    network.encoder.register_forward_pre_hook(look, with_kwargs=True)


def off(network: Any, rows: Rows, by: float = 1e-3) -> None:
    """Answers of `rows` are `by` times too large: no label changes."""
    import torch

    def spoil(module: Any, inputs: tuple[Any, ...], answers: tuple[Any, ...]) -> tuple[Any, ...]:
        wrong = torch.as_tensor(rows(*inputs)).expand(len(inputs[0]))
        wrong = wrong.reshape(-1, *[1] * (answers[0].dim() - 1))
        return (torch.where(wrong, answers[0] * (1 + by), answers[0]), *answers[1:])

    network.register_forward_hook(spoil)


@planted()
def ignored_mask(network: Any) -> None:
    """Attention sees padding."""
    remask(network, lambda mask: mask * 0 + 1)


@planted()
def causal_mask(network: Any) -> None:
    """Tokens see only what comes before them."""
    import torch

    def causal(mask: Any) -> Any:
        seen = torch.ones(mask.shape[1], mask.shape[1]).tril() * mask[:, None, None, :]
        return (1 - seen) * torch.finfo(torch.float32).min

    remask(network, causal)


@planted()
def weak_mask(network: Any) -> None:
    """The mask subtracts 8 from a score instead of infinity."""
    remask(network, lambda mask: (1.0 - mask[:, None, None, :].float()) * -8.0)


@planted()
def mask_as_length(network: Any) -> None:
    """The mask is read as a length, as ONNX Runtime's fusions do: right padding stays right."""
    import torch

    remask(network, lambda mask: (torch.arange(mask.shape[1]) < mask.sum(1, keepdim=True)).long())


@planted()
def filled_holes(network: Any) -> None:
    """Everything between the first and the last valid token is attended to."""

    def fill(mask: Any) -> Any:
        return (mask.cummax(1).values * mask.flip(1).cummax(1).values.flip(1)).long()

    remask(network, fill)


@planted()
def first_row_s_mask(network: Any) -> None:
    """The first row's mask is used for the whole batch."""
    remask(network, lambda mask: mask[:1].expand_as(mask))


@planted()
def lost_tail(network: Any) -> None:
    """Lengths that are no multiple of 8 lose their last token, as in a kernel without a tail."""

    def cut(mask: Any) -> Any:
        mask = mask.clone()
        if mask.shape[1] > 8 and mask.shape[1] % 8:
            mask[:, -1] = 0
        return mask

    remask(network, cut)


@planted()
def dropped_token_types(network: Any) -> None:
    """The second segment is taken for the first: only pairs show it."""
    table = network.base.embeddings.token_type_embeddings.weight
    table[1] = table[0]


@planted()
def position_offset(network: Any) -> None:
    """Positions count from 1."""
    table = network.base.embeddings.position_embeddings.weight
    table.copy_(table.roll(-1, 0).clone())


@planted(on=ROBERTA)
def positions_from_the_left(network: Any) -> None:
    """RoBERTa's positions count padding too: only left padding shows it."""
    import torch

    first = network.base.embeddings.padding_idx + 1

    def number(module: Any, args: Any, named: dict[str, Any]) -> Any:
        ids = named["input_ids"]
        return args, {**named, "position_ids": (torch.arange(ids.shape[1]) + first).expand_as(ids)}

    network.encoder.register_forward_pre_hook(number, with_kwargs=True)


@planted()
def short_position_table(network: Any) -> None:
    """Positions beyond 64 repeat the 64th."""
    table = network.base.embeddings.position_embeddings.weight
    table[64:] = table[63]


@planted()
def last_position(network: Any) -> None:
    """The last position's embedding is missing: only the maximum length shows it."""
    network.base.embeddings.position_embeddings.weight[-1] = 0


@planted()
def wrong_beyond_64(network: Any) -> None:
    """Sequences longer than 64 are 0.1 % off."""
    off(network, lambda ids, mask, types: ids.shape[1] > 64)


@planted()
def wrong_at_sequence_1(network: Any) -> None:
    """Single tokens are 0.1 % off."""
    off(network, lambda ids, mask, types: ids.shape[1] == 1)


@planted()
def wrong_in_batches(network: Any) -> None:
    """All rows of a batch but the first are 0.1 % off."""
    import torch

    off(network, lambda ids, mask, types: torch.arange(len(ids)) > 0)


@planted()
def wrong_in_large_batches(network: Any) -> None:
    """Batches larger than any of the recipe's shapes are 0.1 % off; the predictor makes batches of up to 32."""
    off(network, lambda ids, mask, types: len(ids) > 8)


@planted()
def wrong_for_left_padding(network: Any) -> None:
    """Rows that begin with padding are 0.1 % off."""
    off(network, lambda ids, mask, types: (mask[:, 0] == 0) & (mask.sum(1) > 0))


@planted()
def wrong_for_pairs(network: Any) -> None:
    """Rows with a second segment are 0.1 % off."""
    off(network, lambda ids, mask, types: types.sum(1) > 0)


@planted()
def wrong_for_empty_texts(network: Any) -> None:
    """Rows of two tokens in a padded batch, as an empty text makes, are 0.1 % off."""
    off(network, lambda ids, mask, types: (mask.sum(1) == 2) & (ids[:, 0] == 2))


@planted()
def neighbours(network: Any) -> None:
    """A thousandth of the batch's mean leaks into each answer: one text alone is exact."""

    def leak(module: Any, inputs: Any, answers: Any) -> Any:
        return (answers[0] + 1e-3 * (answers[0].mean(0) - answers[0]), *answers[1:])

    network.register_forward_hook(leak)


@mutant("invariance", "plant_torch", limits={**LOOSE, "invariance_max": 1e-4})
def neighbours_within_limits(network: Any) -> None:
    """One scale for the whole batch, as dynamic INT8 has, within the limits of parity."""

    def rounded(module: Any, inputs: Any, output: Any) -> Any:
        scale = output.abs().max() / 127
        return (output / scale).round() * scale

    network.base.embeddings.register_forward_hook(rounded)


@planted("finite")
def nan_in_one_row(network: Any) -> None:
    """One row of one shape is NaN."""

    def spoil(module: Any, inputs: Any, answers: Any) -> Any:
        if inputs[0].shape == (2, 16):
            answers[0][1, 0] = float("nan")
        return answers

    network.register_forward_hook(spoil)


@planted("finite")
def nan_in_masked_rows(network: Any) -> None:
    """Fully masked rows are NaN, as a softmax over nothing but -inf gives."""

    def spoil(module: Any, inputs: Any, answers: Any) -> Any:
        answers[0][inputs[1].sum(1) == 0] = float("nan")
        return answers

    network.register_forward_hook(spoil)


@planted("finite", on=TOKENS)
def inf_in_padding(network: Any) -> None:
    """Padding tokens answer inf."""

    def spoil(module: Any, inputs: Any, answers: Any) -> Any:
        return (answers[0].masked_fill(inputs[1].unsqueeze(-1) == 0, float("inf")),)

    network.register_forward_hook(spoil)


@planted(on=TOKENS)
def shifted_tokens(network: Any) -> None:
    """Each token carries its left neighbour's label."""
    network.register_forward_hook(lambda module, inputs, answers: (answers[0].roll(1, 1),))


@planted()
def squeezed_batch_of_one(network: Any) -> None:
    """A batch of one loses its batch dimension."""
    network.register_forward_hook(lambda module, inputs, answers: (answers[0].squeeze(0), *answers[1:]))


@mutant("ranking", "plant_torch", MEAN, limits={**LOOSE, "spearman_min": 0.99, "top_k_overlap_min": 0.9})
def ranks_lost(network: Any) -> None:
    """Embeddings are drawn together: every cosine is high, but the nearest neighbours are others."""
    from torch import nn

    def draw(module: Any, inputs: Any, answers: Any) -> Any:
        bent = answers[0] + 0.5 * answers[0].roll(1, 1)
        return (nn.functional.normalize(bent, dim=1), *answers[1:])

    network.register_forward_hook(draw)


@mutant("quality", "plant_torch", limits={**LOOSE, "metric_drop_max": 0.05}, labelled=True)
def biased_label(network: Any) -> None:
    """One label is favoured."""
    network.encoder.classifier.bias[1] += 3.0
