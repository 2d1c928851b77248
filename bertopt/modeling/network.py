"""The torch module of every eager form: a transformers model with its task head, and pooling."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend
from torch.utils.hooks import RemovableHandle

from bertopt.modeling import deberta, distance_buckets, encoder_layers, neighbours, query_blocks
from bertopt.modeling.families import classifier_pooling, is_rotary
from bertopt.modeling.layouts import OneRow, Packed, Padded, Pooling

if TYPE_CHECKING:
    from bertopt.core import Spec


#: Attention kernels that take any shape at once. cuDNN's, which torch prefers on sm90 and sm100, first prepares a plan for
#: every new batch size and length, in every thread anew: 40 ms a text of natural lengths on an H200, against 4 ms of work.
UNPLANNED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


#: [B, S] that a compiled network runs first wherever it is opened. torch.compile tunes its kernels for the first sizes that it sees, which
#: would otherwise be those of the first text or check.
TUNED_FOR = {"cpu": (8, 128), "cuda": (32, 128)}
#: Settings of Inductor where no mode asks it to tune. Left alone it tunes products of fp8 all the same on large GPUs: it compiles and
#: times some hundred kernels for each size of them (torch 2.11 to 2.14, `tuned_scaled_mm`), which takes minutes.
UNTUNED = {"max_autotune_gemm_backends": "ATEN"}


class Network(nn.Module):
    """int64 inputs in `inputs` order to a tuple of float32 answers in `outputs` order.

    `encoder` is the transformers model (with its task head), `dense` what follows pooling. Passes may set: `spec`, for packed rows; `first_only`,
    where the last layer runs for the first token of each text alone; `autocast_dtype`; `sdpa_backend`; `graph_sizes`, of which the session captures graphs, `graphs_ahead` or when
    needed; `gives_tokens`, while an exporter writes a pooled model whose tokens other software reads too.
    """

    def __init__(self, encoder: Any, spec: Spec, dense: nn.Module | None = None) -> None:
        super().__init__()
        self.encoder = encoder
        # A recorded spec says what the passes made of the layout; they are yet to come.
        self.spec = spec.model_copy(update={"layout": "padded", "row_length": None, "one_row": False})
        self.pooling = Pooling(spec.pooling, dense, spec.normalize) if spec.pooling else None
        self.first_only = False
        self.autocast_dtype: torch.dtype | None = None
        self.sdpa_backend: Any = None
        self.graph_sizes: tuple[int, ...] = ()
        self.graphs_ahead = False
        self.gives_tokens = False
        # The same numbers that the model would make, but one row a text: ONNX's RotaryEmbedding takes no broadcast row.
        # RoFormer takes none and numbers columns itself.
        self.states_positions = is_rotary(encoder.config) and spec.family != "roformer"
        if spec.family == "deberta":
            deberta.prepare(encoder)
        distance_buckets.prepare(encoder)

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.spec.network_inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of what `forward` gives: the answers and, where `gives_tokens` and a padded model pools all of them, what is pooled last."""
        extra = self.gives_tokens and self.pooling is not None and self.layout is Padded and not self.first_only
        return (*self.spec.outputs, *((self.spec.token_output,) if extra else ()))

    @property
    def layout(self) -> type[Padded | Packed]:
        if self.spec.one_row:
            return OneRow
        return Packed if self.spec.layout == "packed" else Padded

    @property
    def base(self) -> Any:
        """The transformers base model: embeddings and layers, without the task head."""
        return self.encoder.base_model

    def example(self, batch: int, sequence: int) -> tuple[torch.Tensor, ...]:
        """Inputs for one traced or warming run: every row a different length, no token the padding token."""
        embedding = self.encoder.get_input_embeddings()
        device, known = embedding.weight.device, embedding.weight.shape[0]
        ids = torch.arange(batch * sequence, device=device).reshape(batch, sequence)
        ids = ids % max(known - 5, 1) + min(4, known - 1)
        by_name = self.layout.example(self.spec, ids)
        return tuple(by_name[name] for name in self.inputs)

    def run_example(self, batch: int = 2, sequence: int = 4, hooks: Iterable[RemovableHandle] = ()) -> None:
        """Run one forward of `example`, without gradients, and remove `hooks`, which looked at it."""
        try:
            with torch.inference_mode():
                self(*self.example(batch, sequence))
        finally:
            for hook in hooks:
                hook.remove()

    def tune(self) -> None:
        """Run the sizes for which torch.compile is to choose kernels, before any others."""
        device = next(self.parameters()).device.type
        rows, length = TUNED_FOR.get(device, TUNED_FOR["cpu"])
        self.run_example(rows, min(length, self.spec.max_length))

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = self.layout(dict(zip(self.inputs, tensors, strict=True)), self.base)
        if self.autocast_dtype is not None:
            with torch.autocast(tensors[0].device.type, dtype=self.autocast_dtype):
                answer = self.encode(rows)
        else:
            answer = self.encode(rows)
        return self._answers(answer, rows)

    def encode(self, rows: Padded | Packed) -> Any:
        """Return the outputs of the transformers model with its task head: everything that reduced precision rounds."""
        ids = rows.inputs["input_ids"]
        with query_blocks.where_long(self.encoder, self.spec.heads, ids.shape[1]), self.attention_kernels(ids.device.type):
            return self._run(rows)

    def attention_kernels(self, device: str) -> AbstractContextManager[object]:
        """Let scaled_dot_product_attention choose, inside the context, as it does in a forward on `device`."""
        kernels = self._kernels(device)
        return nullcontext() if kernels is None else nn.attention.sdpa_kernel(kernels)

    def _kernels(self, device: str) -> Any:
        """What scaled_dot_product_attention may choose from, None for everything."""
        if self.sdpa_backend is not None or device != "cuda" or self.base.config._attn_implementation != "sdpa":
            return self.sdpa_backend
        return UNPLANNED

    def _run(self, rows: Padded | Packed) -> Any:
        """What the transformers model answers; a tensor [R, K, D] where only the texts' first tokens count, [B, C] where bertopt pools."""
        inputs = rows.inputs
        classifies = self.spec.task == "text-classification"
        if self.states_positions and "position_ids" not in inputs:
            ids = inputs["input_ids"]
            inputs = {**inputs, "position_ids": torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)}
        inputs = neighbours.without_padding(self.base, inputs)
        if classifies and self.layout is Padded and classifier_pooling(self.base.config) in ("mean", "late"):
            return self._mean_classified(inputs)
        if not (self.first_only or (classifies and self.layout is not Padded)):
            return self.encoder(**inputs)
        hidden = self.base(**inputs).last_hidden_state
        first = rows.first(hidden)
        if self.first_only:
            first = encoder_layers.run_detached_layer(
                self.base, hidden, first, rows.first_mask(hidden), rows.first_rows, self._turns(hidden, inputs.get("position_ids"), rows)
            )
        if not classifies:
            return first
        return encoder_layers.classify(self.encoder, first.flatten(0, 1).unsqueeze(1)).view(*first.shape[:2], -1)

    def _turns(self, hidden: torch.Tensor, positions: torch.Tensor | None, rows: Padded | Packed) -> Any:
        """Rotary positions of all tokens and of the texts' first, where a layer is given any: cosines and sines [R, L, D]."""
        rotary = getattr(self.base, "rotary_embeddings", None)
        if rotary is None:
            return None
        every = rotary(hidden, positions)
        return every, tuple(rows.first(each) for each in every)

    def _mean_classified(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """The head of ModernBERT or EuroBERT over the mean of a row's tokens, or the mean of the head's answers to them, as
        transformers computes it, but finite where a row has no token: NaN would reach other rows through an INT8 scale of the whole batch."""
        hidden, mask = self.base(**inputs).last_hidden_state, inputs["attention_mask"]
        count = mask.sum(dim=1, keepdim=True).clamp(min=1)
        if self.base.config.classifier_pooling == "late":
            return (self._head(hidden) * mask.unsqueeze(-1)).sum(dim=1) / count
        return self._head((hidden * mask.unsqueeze(-1)).sum(dim=1) / count)

    def _head(self, pooled: torch.Tensor) -> torch.Tensor:
        encoder = self.encoder
        given = encoder.activation(encoder.dense(pooled)) if self.spec.family == "eurobert" else encoder.drop(encoder.head(pooled))
        return encoder.classifier(given)  # type: ignore[no-any-return]

    def _answers(self, answer: Any, rows: Padded | Packed) -> tuple[torch.Tensor, ...]:
        if isinstance(answer, torch.Tensor) and answer.dim() == 2:
            return (answer.float(),)
        if isinstance(answer, torch.Tensor):
            pooled = rows.by_text(answer) if self.pooling is None else self.pooling(answer, rows, first_only=True)
            return (pooled.float(),)
        if self.pooling is not None:
            hidden = answer[self.spec.token_output]
            pooled = self.pooling(hidden, rows)
            return (pooled, hidden.float()) if len(self.outputs) > 1 else (pooled,)
        if self.spec.task == "feature-extraction":
            return (answer.last_hidden_state.float(),)
        if self.spec.task == "question-answering":
            return answer.start_logits.float(), answer.end_logits.float()
        return (answer.logits.float(),)
