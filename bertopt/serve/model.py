"""One artefact as it is served: verified, warm, and asked by many requests at once."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from bertopt import stages
from bertopt.errors import UsageError
from bertopt.runtime import task_outputs, windows
from bertopt.runtime.answer_options import DEFAULTS, AnswerOptions
from bertopt.runtime.load import load
from bertopt.runtime.runner import LOCATED
from bertopt.runtime.sparse import Weights
from bertopt.runtime.text_inputs import check
from bertopt.runtime.tokenization import Encoded, Tokens
from bertopt.runtime.windows import Windows
from bertopt.serve.batcher import Batcher, EncodedText
from bertopt.serve.cache import Cache
from bertopt.serve.errors import ClientGone, RequestError
from bertopt.serve.metrics import Metrics
from bertopt.serve.settings import Settings
from bertopt.spec import Text

if TYPE_CHECKING:
    from bertopt.core import Array

T = TypeVar("T")
#: Texts with more characters in all are tokenised beside the event loop, which a shorter one would only wait for.
INLINE_CHARACTERS = 8192
#: Texts with more characters in all wait for each other: two million tokens take 0.7 GB while they are cut.
LONG_CHARACTERS = 500_000
_LONG = ThreadPoolExecutor(1, "bertopt-long-texts")
_WARM_UP = ("warm up", "a text of a few more words than the first one has", "word " * 40, "word " * 2000)

#: Tokens a character that a request may count for: one of a thousand empty texts, which are special tokens alone, says nothing.
MOST_TOKENS_A_CHARACTER = 4
#: Tokens of a request about whose tokens more is answered beside the event loop.
INLINE_TOKENS = 512
#: Outputs of the tokens that may wait, at most: of a model with an output a token, these are many times the tokens.
OUTPUT_BYTES = 1 << 30


class Until(Protocol):
    """Waits for a future, as long as the client and the time allow; else raises what ends the request."""

    async def __call__(self, future: asyncio.Future[T], /) -> T: ...


@dataclass(frozen=True)
class Outputs:
    """Raw outputs for each text by name: [D] where the model has one vector a text (of a SPLADE its `Weights`), else [S, …]; and the
    texts' tokens."""

    by_text: list[dict[str, Array]]
    tokens: int
    origins: Sequence[Tokens]
    windows: Windows | None = None
    """Where long texts were split: which windows are whose. `by_text` and `origins` are then by window."""


class ServedModel:
    """An artefact under a name. Raises what `bertopt.load` raises where it cannot be served here."""

    def __init__(self, name: str, directory: Path, settings: Settings, metrics: Metrics) -> None:
        start = time.perf_counter()
        self.name, self.settings = name, settings
        self.manifest = stages.read_manifest(directory)
        self.predictor = load(directory, threads=settings.threads, streams=settings.streams, key=settings.key, check=True)
        self.spec, self.side = self.predictor.spec, self.predictor.tokenizer.side
        self.load_s = time.perf_counter() - start
        self.warm_up_s: float | None = None
        if settings.warm_up:
            start = time.perf_counter()
            self._warm_up()
            self.warm_up_s = time.perf_counter() - start
        self.metrics = metrics.of(name)
        queue_tokens = self._queue_tokens()
        self.metrics.queue_capacity.set(queue_tokens)
        metrics.model_info.labels(name, self.manifest.form, self.manifest.precision, self.manifest.bertopt_version).set(1)
        self.batcher = Batcher(self.predictor.runner, queue_tokens, self.metrics)
        self._cache = Cache(settings.cache_bytes) if settings.cache_bytes else None
        # Of the requests before, to refuse one that a full queue has no room for before it is tokenised.
        self._tokens_a_character = 0.25

    @property
    def embeds(self) -> bool:
        """Whether it gives one dense embedding a text."""
        return self.spec.task == "feature-extraction" and self.spec.granularity == "text" and not self.spec.sparse

    async def outputs(
        self, texts: Sequence[Text], truncate: bool | None, until: Until, field: str = "inputs", stride: int | None = None
    ) -> Outputs:
        """Run texts beside those of other requests; with a `stride` long ones in windows. Raises RequestError (422, 429, 504) naming the
        `field`, and RuntimeError for outputs that are not finite, which no gate lets pass."""
        if not texts:
            raise RequestError(422, f"{field}: expected at least one text; got none", field)
        if len(texts) > self.settings.request_texts:
            most = self.settings.request_texts
            raise RequestError(422, f"{field}: expected at most {most} texts; got {len(texts)}: send several requests", field)
        self.metrics.request_texts.observe(len(texts))
        characters = [len(text) if isinstance(text, str) else len(text[0]) + len(text[1]) for text in texts]
        if self._cache is None:
            self.batcher.expect(sum(min(count * self._tokens_a_character, self.spec.text_length) for count in characters))
        cut = self.settings.truncate if truncate is None else truncate
        encoded, split = await self._encode(texts, sum(characters), cut, field, until, stride)
        self.metrics.truncated(len(encoded.cut))
        flat = encoded.flat
        seen = min(len(flat.ids) / max(1, sum(characters)), MOST_TOKENS_A_CHARACTER)
        self._tokens_a_character += 0.01 * (seen - self._tokens_a_character)
        items = []
        for start, end in itertools.pairwise(flat.starts.tolist()):
            types = None if flat.types is None else flat.types[start:end]
            items.append(EncodedText(flat.ids[start:end], types if types is not None and types.any() else None))
        by_text = await self._run(items, until)
        return Outputs(by_text, len(flat.ids), encoded.origins or (), split)

    async def answers(
        self, texts: Sequence[Text], outputs: Outputs, until: Until, how: AnswerOptions = DEFAULTS, ignored: Collection[str] | None = None,
        sequences: bool = False,
    ) -> list[Any]:  # fmt: skip
        """Return what the predictor gives for each text, as JSON takes it; see its `located`."""
        if self.spec.granularity == "text":
            return list(self.vectors(outputs).tolist())

        def located() -> list[Any]:
            split = outputs.windows
            of_each = texts if split is None else split.of_each(texts)
            found = self.predictor.located(of_each, outputs.origins, outputs.by_text, how, ignored, sequences)
            return [task_outputs.plain(one) for one in (found if split is None else split.merged(found))]

        return located() if outputs.tokens <= INLINE_TOKENS else await _beside(located, until)

    def vectors(self, outputs: Outputs) -> Array:
        """Return the raw outputs [N, D] of a model with one vector a text."""
        if self.spec.sparse:
            return np.stack([one.whole(self.spec.output_size) for one in self.weights(outputs)])
        return np.stack([one[self.spec.outputs[0]] for one in outputs.by_text])

    def weights(self, outputs: Outputs) -> list[Weights]:
        """Return the embeddings of a SPLADE."""
        return [Weights(**one) for one in outputs.by_text]

    async def tokens(self, texts: Sequence[str], special: bool, until: Until) -> list[list[dict[str, Any]]]:
        """Return a row for each token of each text, uncut. Raises RequestError for what is no text, and for more tokens than may wait."""

        def rows() -> list[list[dict[str, Any]]]:
            check(texts, False)
            encoded = self.predictor.tokenizer.whole.encode_batch(list(texts), add_special_tokens=special)
            if (count := sum(map(len, encoded))) > self.settings.queue_tokens:
                raise UsageError(f"inputs: the texts have {count} tokens; expected at most {self.settings.queue_tokens}: send fewer at once")
            return [self._token_rows(text, one) for text, one in zip(texts, encoded, strict=True)]

        return await self._tokenized(rows, sum(map(len, texts)), "inputs", until)

    def _token_rows(self, text: str, encoded: Any) -> list[dict[str, Any]]:
        name = self.predictor.tokenizer.fast.id_to_token
        return [
            {"id": number, "text": name(number), "special": True, "start": None, "stop": None} if special
            else {"id": number, "text": text[start:stop], "special": False, "start": start, "stop": stop}
            for number, special, (start, stop) in zip(encoded.ids, encoded.special_tokens_mask, encoded.offsets, strict=True)
        ]  # fmt: skip

    def close(self) -> None:
        self.batcher.close()

    async def _encode(
        self, texts: Sequence[Text], characters: int, truncate: bool, field: str, until: Until, stride: int | None
    ) -> tuple[Encoded, Windows | None]:
        tokenizer, task = self.predictor.tokenizer, self.spec.task

        def encode() -> tuple[Encoded, Windows | None]:
            check(texts, task == "question-answering")
            if stride is None:
                return tokenizer.flat(texts, truncate, 0, task in LOCATED), None
            split = windows.split(tokenizer, texts, task, stride, truncate, most=self.batcher.queue_tokens)
            return split.encoded, split

        return await self._tokenized(encode, characters, field, until)

    @staticmethod
    async def _tokenized(tokenize: Callable[[], T], characters: int, field: str, until: Until) -> T:
        """Return what `tokenize` does, in a thread where the texts are long. Raises RequestError (422) for what is no text."""
        try:
            if characters <= INLINE_CHARACTERS:
                return tokenize()
            return await _beside(tokenize, until, _LONG if characters > LONG_CHARACTERS else None)
        except (UsageError, TypeError) as error:
            raise RequestError(422, str(error).replace("texts[", f"{field}[", 1).replace("truncate=False", "truncate: false"), field) from error

    async def _run(self, texts: list[EncodedText], until: Until) -> list[dict[str, Array]]:
        known: list[dict[str, Array] | None] = [None] * len(texts)
        if self._cache is not None:
            known = [self._cache.get(text) for text in texts]
        missing = [text for text, found in zip(texts, known, strict=True) if found is None]
        fresh: list[dict[str, Array]] = []
        if missing:
            fresh = await self._queued(missing, until)
            if not all(np.isfinite(array).all() for outputs in fresh for array in outputs.values()):
                raise RuntimeError(f"'{self.name}' gave outputs that are not finite")
            new = iter(fresh)
            known = [next(new) if found is None else found for found in known]
        if self._cache is not None:
            for text, outputs in zip(missing, fresh, strict=True):
                self._cache.put(text, outputs)
            self.metrics.cache(len(texts) - len(missing), len(missing), self._cache.used)
        return [found for found in known if found is not None]

    async def _queued(self, texts: list[EncodedText], until: Until) -> list[dict[str, Array]]:
        """Return outputs of the batcher. Where the request ends before, what of it has not begun is not run."""
        job = self.batcher.submit(texts)
        try:
            await until(job.future)
        except BaseException as error:
            if not job.future.done():
                reasons = {ClientGone: "disconnected", RequestError: "timeout"}
                self.batcher.drop(job, reasons.get(type(error), "cancelled"))
            raise
        return job.outputs

    def _warm_up(self) -> None:
        """Run short, long and many texts, so that costs are measured and shapes prepared before the first request."""
        texts: list[Text] = [(text, text) if self.spec.task == "question-answering" else text for text in _WARM_UP]
        for text in texts:
            self.predictor([text])
        self.predictor(texts * 8)

    def _queue_tokens(self) -> int:
        """Return the tokens that may wait: as many as the settings say, or whose outputs take at most `OUTPUT_BYTES`; one longest text
        always."""
        if self.spec.granularity != "token":
            return self.settings.queue_tokens
        most = max(OUTPUT_BYTES // (4 * self.spec.output_size), self.predictor.tokenizer.limit)
        return min(self.settings.queue_tokens, most)


async def _beside(work: Callable[[], T], until: Until, threads: ThreadPoolExecutor | None = None) -> T:
    """Return what `work` does in a thread; where nobody waits for it any more and it has not begun, it does not begin."""
    done: asyncio.Future[T]
    if threads is None:
        done = asyncio.ensure_future(asyncio.to_thread(work))
    else:
        done = asyncio.get_running_loop().run_in_executor(threads, work)
    try:
        return await until(done)
    finally:
        done.cancel()
