"""Predictor: text in, answers out, over any session."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bertopt.core import Session, Spec
from bertopt.errors import UsageError
from bertopt.runtime import answers
from bertopt.runtime.tokens import Text, Tokenizer, Tokens

if TYPE_CHECKING:
    from bertopt.core import Array

#: Texts in one batch at most.
MAX_BATCH = 32


class Predictor:
    """Calls to it answer texts by task.

    Embeddings come as one array [N, H] (without pooling, a list of [S, H] arrays), classifications as
    `[{"label": …, "score": …}]`, tokens, spans and masks as transformers' pipelines give them. A text is a string or
    a pair of strings. Not for several threads at once.
    """

    def __init__(self, session: Session, spec: Spec, directory: Path, max_shape: tuple[int, int] | None = None) -> None:
        self.session = session
        self.spec = spec
        batch, length = max_shape or (MAX_BATCH, spec.max_length)
        self.max_batch = min(batch, MAX_BATCH)
        #: Tokens in one padded batch; longer texts go in smaller batches.
        self.max_batch_tokens = 8192
        self.tokenizer = Tokenizer(directory, spec, min(length, spec.text_length))
        self._mask_id = _mask_id(directory, self.tokenizer) if spec.task == "fill-mask" else -1

    def __call__(self, texts: Sequence[Text]) -> Any:
        """Answers in the order of `texts`. Raises TypeError naming the first item that is no text."""
        self._check(texts)
        tokens = self.tokenizer.encode(texts)
        by_text: list[dict[str, Array]] = [{}] * len(tokens)
        for rows in self._batches(tokens):
            outputs = self.session.run(self.tokenizer.batch([tokens[row] for row in rows]))
            for i, row in enumerate(rows):
                by_text[row] = {name: value[i] for name, value in outputs.items()}
        return self._answer(texts, tokens, by_text)

    def logits(self, texts: Sequence[Text]) -> Array:
        """Raw answers [N, D] of a model with one vector a text."""
        tokens = self.tokenizer.encode(texts)
        name = self.spec.outputs[0]
        result: list[Array] = [np.empty(0)] * len(tokens)
        for rows in self._batches(tokens):
            values = self.session.run(self.tokenizer.batch([tokens[row] for row in rows]))[name]
            for i, row in enumerate(rows):
                result[row] = values[i]
        return np.stack(result)

    def _check(self, texts: Sequence[Text]) -> None:
        if isinstance(texts, str | bytes):
            raise TypeError("expected a list of texts; got one string: put it in a list")
        for index, text in enumerate(texts):
            pair = isinstance(text, tuple) and len(text) == 2 and all(isinstance(part, str) for part in text)
            if not (isinstance(text, str) or pair):
                raise TypeError(f"texts[{index}] must be a string or a pair of strings; got {type(text).__name__}")
            if self.spec.task == "question-answering" and not pair:
                raise UsageError(f"texts[{index}] must be a pair (question, context) for question-answering")

    def _batches(self, tokens: Sequence[Tokens]) -> Iterator[list[int]]:
        """Row numbers, similar lengths together, longest first so that memory peaks at once."""
        rows: list[int] = []
        width = 0
        for row in sorted(range(len(tokens)), key=lambda i: -len(tokens[i])):
            width = width or max(1, len(tokens[row]))
            if rows and (len(rows) == self.max_batch or (len(rows) + 1) * width > self.max_batch_tokens):
                yield rows
                rows, width = [], max(1, len(tokens[row]))
            rows.append(row)
        if rows:
            yield rows

    def _answer(self, texts: Sequence[Text], tokens: list[Tokens], outputs: list[dict[str, Array]]) -> Any:
        spec = self.spec
        name = spec.outputs[0]
        if spec.pooling is not None:
            return np.stack([out[name] for out in outputs]) if outputs else np.zeros((0, spec.hidden), np.float32)
        if spec.task == "feature-extraction":
            return [out[name][: len(t)] for out, t in zip(outputs, tokens, strict=True)]
        if spec.task == "text-classification":
            return answers.classify(spec, np.stack([out[name] for out in outputs])) if outputs else []
        rows = zip(texts, tokens, outputs, strict=True)
        if spec.task == "token-classification":
            return [answers.tag(spec, out[name], text, t) for text, t, out in rows]
        if spec.task == "question-answering":
            return [answers.span(out["start_logits"], out["end_logits"], text, t) for text, t, out in rows]
        decode = self.tokenizer.fast.decode
        return [answers.fill(out[name], t, self._mask_id, decode) for _, t, out in rows]


def _mask_id(directory: Path, tokenizer: Tokenizer) -> int:
    token: Any = None
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = directory / name
        token = token or (json.loads(path.read_text("utf-8")).get("mask_token") if path.is_file() else None)
    content = token["content"] if isinstance(token, dict) else token
    number = tokenizer.fast.token_to_id(content or "[MASK]")
    if number is None:
        raise UsageError("the tokenizer has no mask token, which fill-mask needs")
    return int(number)
