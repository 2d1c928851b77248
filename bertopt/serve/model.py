"""One artefact as it is served: verified, warm, and asked by many requests at once."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from bertopt import stages
from bertopt.errors import UsageError
from bertopt.runtime.load import load
from bertopt.runtime.runner import LOCATED
from bertopt.runtime.text_inputs import check
from bertopt.runtime.tokenization import Encoded, Text, Tokens
from bertopt.serve.batcher import Batcher, EncodedText, Job
from bertopt.serve.cache import Cache
from bertopt.serve.errors import RequestError
from bertopt.serve.metrics import Metrics
from bertopt.serve.settings import Settings

if TYPE_CHECKING:
    from bertopt.core import Array

T = TypeVar("T")
#: Texts with more characters in all are tokenised beside the event loop, which a shorter one would only wait for.
INLINE_CHARACTERS = 8192
_WARM_UP = ("warm up", "a text of a few more words than the first one has", "word " * 40, "word " * 2000)

#: Waits until a job is done, or raises what ends the request.
Wait = Callable[[Job, "Batcher"], Awaitable[None]]


@dataclass(frozen=True)
class Outputs:
    """Raw outputs for each text by name: [D] where the model has one vector a text, else [S, …]; and the texts' tokens."""

    by_text: list[dict[str, Array]]
    tokens: int
    origins: Sequence[Tokens]


class ServedModel:
    """An artefact under a name. Raises what `bertopt.load` raises where it cannot be served here."""

    def __init__(self, name: str, directory: Path, settings: Settings, metrics: Metrics) -> None:
        start = time.perf_counter()
        self.name, self.settings = name, settings
        self.manifest = stages.read_manifest(directory)
        self.predictor = load(directory, threads=settings.threads, streams=settings.streams, key=settings.key, check=True)
        self.spec = self.predictor.spec
        self.load_s = time.perf_counter() - start
        self.warm_up_s: float | None = None
        if settings.warm_up:
            start = time.perf_counter()
            self._warm_up()
            self.warm_up_s = time.perf_counter() - start
        self.metrics = metrics.of(name)
        self.metrics.queue_capacity.set(settings.queue_tokens)
        metrics.model_info.labels(name, self.manifest.form, self.manifest.precision, self.manifest.bertopt_version).set(1)
        self.batcher = Batcher(self.predictor.runner, settings.queue_tokens, self.metrics)
        self._cache = Cache(settings.cache_bytes) if settings.cache_bytes else None
        # Of the requests before, to refuse one that a full queue has no room for before it is tokenised.
        self._tokens_a_character = 0.25

    @property
    def embeds(self) -> bool:
        """Whether it gives one embedding a text."""
        return self.spec.task == "feature-extraction" and self.spec.granularity == "text"

    @property
    def ranks(self) -> bool:
        """Whether it gives a (query, text) pair one score."""
        return self.spec.task == "text-classification" and len(self.spec.labels) == 1

    async def outputs(self, texts: Sequence[Text], truncate: bool | None, wait: Wait, field: str = "inputs") -> Outputs:
        """Run texts beside those of other requests. Raises RequestError (422, 429, 504) naming the `field`, and RuntimeError for
        outputs that are not finite, which no gate lets pass."""
        if not texts:
            raise RequestError(422, f"{field}: expected at least one text; got none", field)
        if len(texts) > self.settings.request_texts:
            most = self.settings.request_texts
            raise RequestError(422, f"{field}: expected at most {most} texts; got {len(texts)}: send several requests", field)
        self.metrics.request_texts.observe(len(texts))
        characters = [len(text) if isinstance(text, str) else len(text[0]) + len(text[1]) for text in texts]
        if self._cache is None:
            self.batcher.expect(sum(min(count * self._tokens_a_character, self.spec.text_length) for count in characters))
        encoded = await self._encode(texts, sum(characters), self.settings.truncate if truncate is None else truncate, field)
        flat = encoded.flat
        self._tokens_a_character += 0.01 * (len(flat.ids) / max(1, sum(characters)) - self._tokens_a_character)
        items = []
        for start, end in itertools.pairwise(flat.starts.tolist()):
            types = None if flat.types is None else flat.types[start:end]
            items.append(EncodedText(flat.ids[start:end], types if types is not None and types.any() else None))
        by_text = await self._run(items, wait)
        if not all(np.isfinite(array).all() for outputs in by_text for array in outputs.values()):
            raise RuntimeError(f"'{self.name}' gave outputs that are not finite")
        return Outputs(by_text, len(flat.ids), encoded.origins or ())

    def answers(self, texts: Sequence[Text], outputs: Outputs) -> list[Any]:
        """Return what the predictor gives for each text, as JSON takes it."""
        if self.spec.granularity == "text":
            return list(self.vectors(outputs).tolist())
        found = self.predictor.located(texts, outputs.origins, outputs.by_text)
        return [one.tolist() if isinstance(one, np.ndarray) else one for one in found]

    def vectors(self, outputs: Outputs) -> Array:
        """Return the raw outputs [N, D] of a model with one vector a text."""
        return np.stack([one[self.spec.outputs[0]] for one in outputs.by_text])

    async def tokens(self, texts: Sequence[str], special: bool) -> list[list[dict[str, Any]]]:
        """Return a row for each token of each text, uncut. Raises RequestError for what is no text."""

        def rows() -> list[list[dict[str, Any]]]:
            check(texts, False)
            encoded = self.predictor.tokenizer.whole.encode_batch(list(texts), add_special_tokens=special)
            return [self._token_rows(text, one) for text, one in zip(texts, encoded, strict=True)]

        return await self._off_the_loop(rows, sum(map(len, texts)), "inputs")

    def _token_rows(self, text: str, encoded: Any) -> list[dict[str, Any]]:
        name = self.predictor.tokenizer.fast.id_to_token
        return [
            {"id": number, "text": name(number), "special": True, "start": None, "stop": None} if special
            else {"id": number, "text": text[start:stop], "special": False, "start": start, "stop": stop}
            for number, special, (start, stop) in zip(encoded.ids, encoded.special_tokens_mask, encoded.offsets, strict=True)
        ]  # fmt: skip

    def close(self) -> None:
        self.batcher.close()

    async def _encode(self, texts: Sequence[Text], characters: int, truncate: bool, field: str) -> Encoded:
        def encode() -> Encoded:
            check(texts, self.spec.task == "question-answering")
            return self.predictor.tokenizer.flat(texts, truncate, 0, self.spec.task in LOCATED)

        return await self._off_the_loop(encode, characters, field)

    @staticmethod
    async def _off_the_loop(tokenize: Callable[[], T], characters: int, field: str) -> T:
        """Return what `tokenize` does, in a thread where the texts are long. Raises RequestError (422) for what is no text."""
        try:
            return tokenize() if characters <= INLINE_CHARACTERS else await asyncio.to_thread(tokenize)
        except (UsageError, TypeError) as error:
            raise RequestError(422, str(error).replace("texts[", f"{field}[", 1).replace("truncate=False", "truncate: false"), field) from error

    async def _run(self, texts: list[EncodedText], wait: Wait) -> list[dict[str, Array]]:
        known: list[dict[str, Array] | None] = [None] * len(texts)
        if self._cache is not None:
            known = [self._cache.get(text) for text in texts]
        missing = [text for text, found in zip(texts, known, strict=True) if found is None]
        if missing:
            job = self.batcher.submit(missing)
            await wait(job, self.batcher)
            fresh = iter(job.outputs)
            known = [next(fresh) if found is None else found for found in known]
        if self._cache is not None:
            for text, outputs in zip(missing, job.outputs if missing else (), strict=True):
                self._cache.put(text, outputs)
            self.metrics.cache(len(texts) - len(missing), len(missing), self._cache.used)
        return [found for found in known if found is not None]

    def _warm_up(self) -> None:
        """Run short, long and many texts, so that costs are measured and shapes prepared before the first request."""
        texts: list[Text] = [(text, text) if self.spec.task == "question-answering" else text for text in _WARM_UP]
        if self.spec.task == "fill-mask":
            texts = list(_WARM_UP)
        for text in texts:
            self.predictor([text])
        self.predictor(texts * 8)
