"""The inputs on which static quantisation measures its ranges: the user's texts, and between them inputs unlike any text.

Ranges from texts alone clip rare values. Without a first token that draws attention (left padding), or with a single word between the special
tokens, attention averages over few tokens, and some channels grow beyond their range on texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from bertopt.core import Context, Spec
from bertopt.errors import Unsupported
from bertopt.modeling import packing

if TYPE_CHECKING:
    from bertopt.core import Array

    Inputs = dict[str, Array]

#: Number of texts after which one odd batch [ODD_ROWS, S] comes.
TEXTS_PER_ODD, ODD_ROWS = 2, 8
ODD_LENGTHS = (4, 8, 16, 32, 64, 128)


def samples(spec: Spec, ctx: Context, count: int) -> list[Inputs]:
    """`count` of the context's texts or pairs (or all, where there are fewer), each a batch of one; an odd batch after every other.

    Arrays as the network takes them (`spec.network_inputs`), int64. The same arguments give the same samples. Raises
    Unsupported where there are no texts, or no tokenizer to read them with.
    """
    if not ctx.texts or ctx.encode is None:
        raise Unsupported("static INT8 is calibrated on texts; got none: name some in inputs.texts")
    rng = np.random.default_rng(ctx.seed)
    chosen = [ctx.texts[i] for i in sorted(rng.permutation(len(ctx.texts))[:count])]
    asked: list[Any] = list(chosen)
    if spec.task == "question-answering" and isinstance(chosen[0], str):
        # Whatever comes next serves as the context.
        asked = list(zip(chosen, chosen[1:] + chosen[:1], strict=True))
    frame = ctx.encode([("", "") if spec.task == "question-answering" else ""])["input_ids"][0]
    made = []
    for number, text in enumerate(asked):
        made.append(as_network(spec, ctx.encode([text])))
        if number % TEXTS_PER_ODD == TEXTS_PER_ODD - 1:
            made.append(as_network(spec, odd(spec, frame, number // TEXTS_PER_ODD, rng)))
    return made


def odd(spec: Spec, frame: Array, number: int, rng: np.random.Generator) -> Inputs:
    """Random tokens [8, S] of all lengths up to S, padded [B, S]: between the special tokens of `frame`, the ids of an
    empty text; with padding on the left; with holes. `number` says which of these, and S."""
    kind, length = number % 3, min(ODD_LENGTHS[number // 3 % len(ODD_LENGTHS)], spec.text_length)
    shape = (ODD_ROWS, length)
    ids = spec.random_ids(shape, rng)
    lengths = np.maximum(1, length - np.arange(ODD_ROWS) * length // ODD_ROWS)[:, None]
    columns = np.arange(length)
    if kind == 0:
        lengths = np.maximum(lengths, min(3, length))
        mask = columns < lengths
        ids[:, 0] = frame[0]
        np.put_along_axis(ids, lengths - 1, frame[-1], axis=1)
    elif kind == 1:
        mask = columns >= length - lengths
    else:
        mask = rng.random(shape) > 0.3
        mask[:, 0] = True
    ids[~mask] = spec.pad_id
    types = np.zeros(shape, np.int64)
    if spec.token_types > 1:
        types[::2, length // 2 :] = 1
    return spec.padded_inputs(ids, mask.astype(np.int64), types)


def as_network(spec: Spec, padded: Mapping[str, Array]) -> Inputs:
    """A padded batch [B, S] as the network takes it: as it is, or its valid tokens packed into rows [R, L]."""
    if spec.layout == "padded":
        return {name: padded[name] for name in spec.inputs}
    _, texts = packing.unpadded(spec, padded)
    rows = packing.best_fit(texts.lengths, spec.row_length or int(texts.lengths.max()))
    (batch,) = packing.batches(spec, texts, rows, [(0, len(rows.used))])
    return batch.inputs


def valid_tokens(spec: Spec, inputs: Mapping[str, Array]) -> Array:
    """Which tokens [B, S] of the network's inputs are no padding."""
    return np.asarray(inputs["segment_ids" if spec.layout == "packed" else "attention_mask"] > 0)


def valid_vectors(spec: Spec, inputs: Mapping[str, Array], answer: Array) -> Array:
    """The vectors [N, D] of one answer that belong to a text or a token, not to padding, float64."""
    tokens = valid_tokens(spec, inputs)
    if spec.granularity == "span":
        return np.asarray(answer * tokens, np.float64)
    if spec.granularity == "token":
        return np.asarray(answer[tokens], np.float64)
    if spec.layout == "packed":
        texts = inputs["segment_ids"].max(axis=1, keepdims=True)
        return np.asarray(answer[np.arange(answer.shape[1]) < texts], np.float64)
    return np.asarray(answer[tokens.any(axis=1)], np.float64)
