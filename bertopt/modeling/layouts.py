"""How a network is fed: one text a row, or several. R rows of L tokens, K texts a row, H hidden, D answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bertopt.modeling import varlen
from bertopt.spec import SPLADE

if TYPE_CHECKING:
    from bertopt.core import Spec


class Padded:
    """One text a row, int64 [B, S], padded where `attention_mask` is 0."""

    def __init__(self, named: dict[str, torch.Tensor], base: Any) -> None:
        self.named, self.base = named, base
        # What transformers' models take.
        self.inputs: dict[str, torch.Tensor] = named

    def first(self, hidden: torch.Tensor) -> torch.Tensor:
        """The first token of the row, [B, 1, H]; under left padding that is a pad token, as transformers reads it."""
        return hidden[:, :1]

    def first_mask(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """What that token attends to, [B, 1, 1, S], in transformers' own words."""
        from transformers.masking_utils import create_bidirectional_mask

        whole: torch.Tensor | None = create_bidirectional_mask(
            config=self.base.config, inputs_embeds=hidden, attention_mask=self.named["attention_mask"]
        )
        return None if whole is None else whole[:, :, :1]

    def first_rows(self, scores: torch.Tensor) -> torch.Tensor:
        return scores[:, :, :1]

    def pool(self, hidden: torch.Tensor, mode: str) -> torch.Tensor:
        """Token vectors [B, S, H] to one vector a text [B, H], in float32.

        The modes are `bertopt.spec.PoolingMode`. A fully masked row divides by 1, not by 0, so it stays finite.
        """
        if mode in SPLADE:
            return self._splade(hidden, "sum" in mode, "log1p" in mode)
        hidden = hidden.float()
        weights = self.named["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        if mode == "cls":
            return hidden[:, 0]
        if mode == "max":
            return hidden.masked_fill(weights == 0, torch.finfo(hidden.dtype).min).amax(dim=1)
        return _mean((hidden * weights).sum(dim=1), weights.sum(dim=1), mode)

    def _splade(self, logits: torch.Tensor, summed: bool, twice: bool) -> torch.Tensor:
        """Logits [B, S, V] to weights [B, V]: the sum of the tokens' or the largest, after one logarithm or two. The largest logit has the
        largest weight, so there the logarithm follows the maximum: S times less work, and no second array of that size."""
        logits = logits.masked_fill(self.named["attention_mask"].unsqueeze(-1) == 0, 0.0)
        weights = (logits if summed else logits.amax(dim=1)).float().relu().log1p()
        weights = weights.log1p() if twice else weights
        return weights.sum(dim=1) if summed else weights

    @staticmethod
    def by_text(answers: torch.Tensor) -> torch.Tensor:
        """Answers [B, 1, D] as they leave the network."""
        return answers.squeeze(1)

    @staticmethod
    def example(spec: Spec, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Inputs with these ids [B, S]: every row a different length."""
        mask = _lengths(ids).unsqueeze(1) > torch.arange(ids.shape[1], device=ids.device)
        return {"input_ids": ids, "attention_mask": mask.long(), "token_type_ids": torch.zeros_like(ids)}


class Packed:
    """Rows of several texts, as `Spec.network_inputs` says. A token attends to its own text; padding to padding."""

    def __init__(self, named: dict[str, torch.Tensor], base: Any) -> None:
        self.base = base
        self.segments = named["segment_ids"]
        self.columns = named.get("first_tokens")
        self.inputs: dict[str, torch.Tensor] = {
            name: tensor for name, tensor in named.items() if name not in ("segment_ids", "first_tokens")
        } | {"attention_mask": self._mask(self.segments)}

    def _mask(self, queries: torch.Tensor) -> torch.Tensor:
        """[R, 1, Q, L] from the queries' segments [R, Q]; never a row without a token, so that no softmax is empty."""
        same = queries[:, None, :, None] == self.segments[:, None, None, :]
        if self.base.config._attn_implementation == "sdpa":
            return same
        dtype = self.base.get_input_embeddings().weight.dtype
        return torch.where(same, torch.zeros((), dtype=dtype, device=same.device), torch.finfo(dtype).min)

    def first(self, hidden: torch.Tensor) -> torch.Tensor:
        """The first token of every text, [R, K, H]."""
        assert self.columns is not None
        return hidden.gather(1, self.columns.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))

    def first_mask(self, hidden: torch.Tensor) -> torch.Tensor:
        """What these tokens attend to, [R, 1, K, L]."""
        assert self.columns is not None
        return self._mask(self.segments.gather(1, self.columns))

    def first_rows(self, scores: torch.Tensor) -> torch.Tensor:
        assert self.columns is not None
        return scores.gather(2, self.columns[:, None, :, None].expand(-1, scores.shape[1], -1, scores.shape[3]))

    def pool(self, hidden: torch.Tensor, mode: str) -> torch.Tensor:
        """Token vectors [R, L, H] to one vector a text [R, K, H], in float32. A slot without a text is 0."""
        if mode == "cls":
            return self.first(hidden).float()
        assert self.columns is not None
        hidden = hidden.float()
        numbers = torch.arange(1, self.columns.shape[1] + 1, device=hidden.device)
        members = (self.segments.unsqueeze(1) == numbers[None, :, None]).to(hidden.dtype)
        return _mean(members @ hidden, members.sum(dim=2, keepdim=True), mode)

    @staticmethod
    def by_text(answers: torch.Tensor) -> torch.Tensor:
        return answers

    @staticmethod
    def example(spec: Spec, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Inputs with these ids [R, L]: several texts a row, their number and the padding different in every row."""
        rows, length = ids.shape
        # No dimension is another's size, or tracing would take the two for one.
        slots = next(number for number in range(2, 5) if number not in (rows, length))
        segments, positions = torch.zeros_like(ids), torch.zeros_like(ids)
        first = ids.new_zeros(rows, slots)
        for row, valid in enumerate(_lengths(ids).tolist()):
            texts = min(slots - row % 2, valid)
            starts = [text * valid // texts for text in range(texts)]
            for text, (start, end) in enumerate(zip(starts, [*starts[1:], valid], strict=True)):
                segments[row, start:end] = text + 1
                positions[row, start:end] = torch.arange(end - start, device=ids.device)
                first[row, text] = start
        return {
            "input_ids": ids, "token_type_ids": torch.zeros_like(ids), "position_ids": positions + spec.position_offset,
            "segment_ids": segments, "first_tokens": first,
        }  # fmt: skip


class OneRow(Packed):
    """One row of texts, then padding; attention takes where they begin instead of a mask."""

    def __init__(self, named: dict[str, torch.Tensor], base: Any) -> None:
        places = named["first_tokens"].shape[1]
        self.places = places
        self.bounds = varlen.boundaries(named["segment_ids"][0], places, base.config.max_position_embeddings)
        super().__init__(named, base)

    def _mask(self, queries: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.bounds, self.bounds])[None, None]

    def first_mask(self, hidden: torch.Tensor) -> torch.Tensor:
        """One query a place, none for padding, [1, 1, 2, N + 1]."""
        queries = torch.arange(self.bounds.shape[0], device=hidden.device, dtype=torch.int32).clamp(max=self.places)
        return torch.stack([queries, self.bounds])[None, None]

    def pool(self, hidden: torch.Tensor, mode: str) -> torch.Tensor:
        """As `Packed.pool`, from each text's tokens alone: NaN in padding reaches no text."""
        if mode == "cls":
            return self.first(hidden).float()
        # Padding has separate bags, no longer than a text: a GPU adds the tokens of a bag one after the other, and a graph's padding
        # may be thousands. The last bag ends with the row, as on CUDA every last bag does, whatever the last offset is.
        bounds, tokens = self.bounds.long(), torch.arange(hidden.shape[1], device=hidden.device)
        summed = nn.functional.embedding_bag(tokens, hidden[0].float(), bounds, mode="sum", include_last_offset=True)
        return _mean(summed[: self.places], bounds[: self.places + 1].diff().unsqueeze(1).float(), mode)[None]

    @staticmethod
    def example(spec: Spec, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Inputs with these ids [R, L] in one row of R × L tokens: texts as long as a padded example's, then padding."""
        lengths = _lengths(ids)
        starts = lengths.cumsum(0) - lengths
        steps = torch.arange(ids.numel(), device=ids.device)
        text = torch.searchsorted(starts, steps, right=True) - 1
        valid = steps < lengths.sum()
        return {
            "input_ids": ids.reshape(1, -1), "token_type_ids": torch.zeros_like(ids).reshape(1, -1),
            "position_ids": torch.where(valid, steps - starts[text], 0)[None] + spec.position_offset,
            "segment_ids": torch.where(valid, text + 1, 0)[None], "first_tokens": starts[None],
        }  # fmt: skip


def _lengths(ids: torch.Tensor) -> torch.Tensor:
    """Valid tokens of each row of an example: from all of them down to half."""
    rows, length = ids.shape
    return length - torch.arange(rows, device=ids.device) * length // (2 * rows)


def _mean(summed: torch.Tensor, count: torch.Tensor, mode: str) -> torch.Tensor:
    count = count.clamp(min=1.0)
    return summed / (count.sqrt() if mode == "mean_sqrt_len" else count)


class Pooling(nn.Module):
    """Token vectors to one vector a text, in float32: [B, D] of padded rows, [R, K, D] of packed ones. `dense` makes D of H."""

    def __init__(self, mode: str, dense: nn.Module | None, normalize: bool) -> None:
        super().__init__()
        self.mode, self.dense, self.normalize = mode, dense, normalize

    def forward(self, hidden: torch.Tensor, rows: Padded | Packed, first_only: bool = False) -> torch.Tensor:
        """`first_only`: `hidden` is the first token of every text already, [R, K, H]."""
        pooled = rows.by_text(hidden).float() if first_only else rows.pool(hidden, self.mode)
        pooled = pooled if self.dense is None else self.dense(pooled)
        return nn.functional.normalize(pooled, p=2.0, dim=-1) if self.normalize else pooled
