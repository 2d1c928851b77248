"""The torch module every eager form runs: a transformers model, its task head, and pooling inside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from bertopt.core import Spec


class Pooling(nn.Module):
    """Token vectors [B, S, H] and their mask [B, S] to one vector a text [B, H], in float32.

    The modes are sentence-transformers'. A fully masked row divides by 1, not by 0, so it stays finite.
    """

    def __init__(self, mode: str, normalize: bool) -> None:
        super().__init__()
        self.mode = mode
        self.normalize = normalize

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = hidden.float()
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        if self.mode == "cls":
            # The first token of the row, as sentence-transformers takes it; under left padding that is a pad token.
            pooled = hidden[:, 0]
        elif self.mode == "max":
            pooled = hidden.masked_fill(weights == 0, torch.finfo(hidden.dtype).min).amax(dim=1)
        else:
            count = weights.sum(dim=1).clamp(min=1.0)
            pooled = (hidden * weights).sum(dim=1) / (count.sqrt() if self.mode == "mean_sqrt_len" else count)
        return nn.functional.normalize(pooled, p=2.0, dim=1) if self.normalize else pooled


class Network(nn.Module):
    """int64 inputs [B, S] in `spec.inputs` order to a tuple of float32 answers in `spec.outputs` order.

    `encoder` is the transformers model (with its task head). Where the model pools, `forward` also returns the
    token vectors last: exporters keep them as `last_hidden_state`, sessions drop them.
    """

    def __init__(self, encoder: Any, spec: Spec) -> None:
        super().__init__()
        self.encoder = encoder
        self.inputs = spec.inputs
        self.task = spec.task
        self.pooling = Pooling(spec.pooling, spec.normalize) if spec.pooling else None
        self.autocast_dtype: torch.dtype | None = None
        self.sdpa_backend: Any = None
        # The same numbers that the model would make, but one row a text: ONNX's RotaryEmbedding takes no broadcast row.
        self.states_positions = spec.family == "modernbert"

    @property
    def base(self) -> Any:
        """The transformers base model: embeddings and layers, without the task head."""
        return self.encoder.base_model

    def example(self, batch: int, sequence: int) -> tuple[torch.Tensor, ...]:
        """Inputs for one traced or warming run: every row a different length, no token the padding token."""
        embedding = self.encoder.get_input_embeddings()
        device, rows = embedding.weight.device, embedding.weight.shape[0]
        ids = torch.arange(batch * sequence, device=device).reshape(batch, sequence) % max(rows - 5, 1) + min(
            4, rows - 1
        )
        lengths = sequence - torch.arange(batch, device=device) * sequence // (2 * batch)
        mask = (torch.arange(sequence, device=device) < lengths.unsqueeze(1)).long()
        by_name = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
        return tuple(by_name[name] for name in self.inputs)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        named = dict(zip(self.inputs, tensors, strict=True))
        if self.autocast_dtype is not None:
            with torch.autocast(tensors[0].device.type, dtype=self.autocast_dtype):
                answer = self._encode(named)
        else:
            answer = self._encode(named)
        return self._answers(answer, named["attention_mask"])

    def _encode(self, named: dict[str, torch.Tensor]) -> Any:
        if self.states_positions:
            ids = named["input_ids"]
            named = {**named, "position_ids": torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)}
        if self.sdpa_backend is None:
            return self.encoder(**named)
        with nn.attention.sdpa_kernel(self.sdpa_backend):
            return self.encoder(**named)

    def _answers(self, answer: Any, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.pooling is not None:
            hidden = answer.last_hidden_state
            return self.pooling(hidden, mask), hidden.float()
        if self.task == "feature-extraction":
            return (answer.last_hidden_state.float(),)
        if self.task == "question-answering":
            return answer.start_logits.float(), answer.end_logits.float()
        return (answer.logits.float(),)
