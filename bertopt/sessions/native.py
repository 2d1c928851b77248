"""The native encoder: it takes packed rows, runs each text without padding, and then the task head in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from bertopt.core import Device, Native, RuntimeFacts, Session
from bertopt.errors import Unsupported, UsageError
from bertopt.modeling.float_head import FILE, FloatHead
from bertopt.sessions.inputs import check
from bertopt.system import limits, native_import

if TYPE_CHECKING:
    from bertopt.core import Array

#: What the encoder pools itself; it sums over a text's tokens in order.
_POOLED = {"cls": "first", "mean": "mean", "max": "max", "mean_sqrt_len": "mean", "splade": "splade", "splade_log1p": "splade_log1p"}
#: Products with weights in a layer: query, key and value together, attention's output, two of the feed-forward network.
_LAYER_PRODUCTS = 4


class NativeSession(Session):
    """Runs a packed file on `threads` threads (as many as the cores and the CPU quota allow where None). `run` may be called by several threads at once; `load`,
    `step` and `fetch` belong to one caller.

    A text's outputs are the same to the last bit whatever else is in the batch. It takes packed rows; segments are texts, and
    tokens of segment 0 are dropped.
    """

    def __init__(self, model: Native, device: Device, threads: int | None = None) -> None:
        module = native_import.native()
        if device != "cpu":
            raise Unsupported("the native encoder runs on the CPU; load with device='cpu' (in a recipe device: cpu)")
        native_import.check_layout(module, model.path)
        with native_import.native_errors(module):
            self._encoder = module.Encoder(model.path, threads=threads or limits.cores())
        self.spec, self.concurrent, self.fixed_costs = model.spec, True, True
        self._version, self._linear = module.__version__, module.float_linear
        head = model.path.with_name(FILE)
        self._head = FloatHead.read(head) if head.is_file() else None
        self._loaded: _Ragged | None = None
        self._answers: tuple[Array, ...] = ()

    def load(self, inputs: Mapping[str, Array]) -> None:
        check(inputs, self.spec.network_inputs)
        self._loaded = _Ragged(inputs)

    def step(self) -> None:
        assert self._loaded is not None, "load comes first"
        self._answers = self._run(self._loaded)

    def fetch(self) -> dict[str, Array]:
        assert self._loaded is not None, "load comes first"
        return self._placed(self._loaded, self._answers)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        check(inputs, self.spec.network_inputs)
        ragged = _Ragged(inputs)
        return self._placed(ragged, self._run(ragged))

    def facts(self) -> RuntimeFacts:
        info: dict[str, Any] = self._encoder.info
        int8 = int(info["int8_products"])
        return RuntimeFacts(
            runtime=f"bertopt-native {self._version}", device="cpu", isa=info["isa"], threads=int(info["threads"]), streams=1,
            # Of the layers and the head: a projection of the embeddings, where there is one, is bf16 and not counted.
            products={"int8": int8, "bf16": _LAYER_PRODUCTS * int(info["layers"]) + int(info["head_products"]) - int8},
        )  # fmt: skip

    def _run(self, ragged: _Ragged) -> tuple[Array, ...]:
        """The answers, one array for each of `spec.outputs`: [N, D] for texts, [T, D] or [T] for their tokens."""
        spec = self.spec
        by_text = spec.granularity == "text"
        head = "first" if self._head is None else self._head.pooling
        output = (_POOLED[spec.pooling] if spec.pooling else head) if by_text and head != "late" else "tokens"
        if spec.task == "fill-mask":
            output = "logits"
        # Of a pooled vector its length does not matter where it is made 1 at once.
        normalizes = spec.normalize and by_text and not spec.dense
        try:
            values = self._encoder.run(
                ragged.ids, ragged.starts, ragged.types, output, normalizes, ragged.positions
            )
        except ValueError as error:
            raise UsageError(f"the model cannot run these inputs: {error}") from error
        if spec.pooling == "mean_sqrt_len" and not normalizes:
            values *= np.sqrt(np.diff(ragged.starts), dtype=np.float32)[:, None]
        if self._head is not None:
            values = self._head(values, self._linear)
        if head == "late":
            sums = np.add.reduceat(values.astype(np.float64), ragged.starts[:-1], axis=0)
            values = (sums / np.diff(ragged.starts)[:, None]).astype(np.float32)
        if spec.granularity == "span":
            return values[:, 0], values[:, 1]
        return (values,)

    def _placed(self, ragged: _Ragged, answers: tuple[Array, ...]) -> dict[str, Array]:
        place = ragged.slots if self.spec.granularity == "text" else ragged.valid
        # Outputs over a vocabulary are large: they are not copied where one row has no gap.
        one_row = place is None or (len(place) == 1 and bool(place.all()))
        placed = {}
        for name, value in zip(self.spec.outputs, answers, strict=True):
            if place is None or one_row:
                placed[name] = value[None]
                continue
            out = np.zeros((*place.shape, *value.shape[1:]), np.float32)
            out[place] = value
            placed[name] = out
        return placed


class _Ragged:
    """The texts of packed rows [R, L], one after another without padding, and where their answers go."""

    def __init__(self, inputs: Mapping[str, Array]) -> None:
        segments = inputs["segment_ids"]
        ids, positions, types = inputs["input_ids"], inputs["position_ids"], inputs.get("token_type_ids")
        #: Where tokens are, and at which places of `first_tokens` texts: None where that is everywhere.
        self.valid: Array | None = None
        self.slots: Array | None = None
        if _one_text(inputs):
            self.starts = np.array((0, ids.shape[1]))
            self.ids, self.positions, self.types = ids[0], positions[0], None if types is None else types[0]
            return
        self.valid = segments != 0
        rows, columns = np.nonzero(self.valid)
        own = segments[rows, columns]
        begins = np.ones(len(own), bool)
        begins[1:] = (own[1:] != own[:-1]) | (rows[1:] != rows[:-1])
        self.starts = np.append(np.flatnonzero(begins), len(own)).astype(np.int64)
        self.ids, self.positions = ids[self.valid], positions[self.valid]
        self.types = None if types is None else types[self.valid]
        if "first_tokens" in inputs:
            # Segments are numbered from 1 in the order of their columns.
            self.slots = np.zeros(inputs["first_tokens"].shape, bool)
            self.slots[rows[begins], own[begins] - 1] = True


def _one_text(inputs: Mapping[str, Array]) -> bool:
    """Whether there is one row, full of one text, for which finding texts would take a tenth of the call."""
    segments, firsts = inputs["segment_ids"], inputs.get("first_tokens")
    return len(segments) == 1 and segments.shape[1] > 0 and bool((segments == 1).all()) and (firsts is None or firsts.shape == (1, 1))
