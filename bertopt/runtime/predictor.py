"""Predictor: text in, answers out, over any session."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

import numpy as np

from bertopt.core import Session, ShapeLimits, Spec, Task
from bertopt.errors import UsageError
from bertopt.modeling.packing import Batch
from bertopt.modeling.sentence_transformers import leaves_prompts_out, read_prompts
from bertopt.modeling.tokenizer import special_token
from bertopt.runtime import task_outputs, windows
from bertopt.runtime.answer_options import DEFAULTS, AnswerOptions, check_most
from bertopt.runtime.batch_limits import BatchLimits
from bertopt.runtime.cost_model import Costs
from bertopt.runtime.entities import OUTSIDE, Aggregation, entities
from bertopt.runtime.runner import Runner
from bertopt.runtime.sparse import Weights
from bertopt.runtime.task_outputs import TopK
from bertopt.runtime.text_inputs import (
    PAIRED,
    as_list,
    check,
    only_strings,
    prompted,
    refuse_lone_pair,
    refuse_others,
    with_query,
)
from bertopt.runtime.tokenization import Tokenizer, Tokens
from bertopt.runtime.zero_shot import TEMPLATE, ZeroShot
from bertopt.sessions.packed import PackedSession
from bertopt.spec import Text

if TYPE_CHECKING:
    from bertopt.core import Array

#: Most texts that a stream holds at once.
WINDOW = 4096


@dataclass(frozen=True)
class Answer:
    """Answers in the order of the texts, the numbers of truncated texts, and how many tokens were run."""

    values: Any
    truncated: list[int]
    tokens: int


class Predictor:
    """Call it with texts to get answers by task.

    Embeddings are one array [N, H] (without pooling, a list of arrays [S, H]; of a SPLADE, `{"indices": …, "values": …}` for each text, its
    weights that are not 0 and their ids, ascending); a classification is `{"label": …, "score": …}`, or with
    `top_k` and for multi-label models a list of these, best first; token classification gives a label for each token, including `O`, or
    with `aggregation_strategy` the entities of transformers' pipeline; fill-mask gives a list of tokens for each mask, even if a text has
    only one; answers to questions are those of transformers 4's pipeline without `align_to_words`. A text is a string or a pair of strings.
    Several threads may call it; they take turns, unless the session runs several calls at once.

    A batch has at most `max_batch_tokens` tokens, padding included (by default what suits the device); a longer text is a batch by itself.
    Batches are planned by `costs`. These are fixed for eager, compiled, ONNX and native models on the CPU, so that every load makes the same
    batches: a text's outputs may depend on its batch, by 1e-7 in float32 and more in dynamic INT8. For others they are measured at the first
    call with several texts, in the time of two or three thousand tokens.

    It works only in the process that loaded it: calls in a fork raise UsageError, and pickling raises TypeError.
    """

    def __init__(
        self, session: Session, spec: Spec, directory: Path, shapes: ShapeLimits | None = None,
        max_batch_tokens: int | None = None, costs: Costs | None = None, origin: str | None = None,
    ) -> None:  # fmt: skip
        if max_batch_tokens is not None and max_batch_tokens < 1:
            raise UsageError(f"max_batch_tokens must be at least 1; got {max_batch_tokens}")
        self.session, self.spec, self._origin = session, spec, origin or f"'{directory}'"
        #: Prompts to put before texts, by name, from the model's sentence-transformers files: "query: ", …
        self.prompts = read_prompts(directory) if spec.task == "feature-extraction" else {}
        self._prompts_left_out = spec.task == "feature-extraction" and leaves_prompts_out(directory)
        limits = BatchLimits.of(session, spec, shapes, max_batch_tokens)
        self.tokenizer = Tokenizer(directory, spec, min(limits.length, spec.text_length))
        # For packed models the session below, which takes packed rows.
        feed = session.rows if isinstance(session, PackedSession) else session
        #: Runs texts; public for servers, which batch the texts of several callers.
        self.runner = Runner(feed, spec, self.tokenizer, limits, costs)
        self._mask_id = mask_id(directory, self.tokenizer) if spec.task == "fill-mask" else -1
        self.unknown_id = _special_id(directory, self.tokenizer, "unk_token")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a predictor cannot be pickled: give other processes the artefact's path, and call bertopt.load once in each")

    def __repr__(self) -> str:
        return f"<Predictor {self.task}, {self._origin}>"

    @property
    def task(self) -> Task:
        """The model's task: `feature-extraction`, `text-classification`, …"""
        return self.spec.task

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of its labels in the order of their ids, as in the columns of `logits`; () for embeddings."""
        return self.spec.labels

    def __call__(
        self, texts: Iterable[Text], truncate: bool = True, *, top_k: TopK = "default",
        aggregation_strategy: Aggregation = "none", prompt_name: str | None = None, stride: int | None = None,
    ) -> Any:  # fmt: skip
        """Return the answers in the order of `texts`; see `answer`."""
        return self.answer(texts, truncate, top_k=top_k, aggregation_strategy=aggregation_strategy, prompt_name=prompt_name, stride=stride).values

    def answer(
        self, texts: Iterable[Text], truncate: bool = True, *, top_k: TopK = "default",
        aggregation_strategy: Aggregation = "none", prompt_name: str | None = None, stride: int | None = None,
    ) -> Answer:  # fmt: skip
        """Return answers, and which texts were truncated. `texts` is any iterable of texts: a list, a column of a table, a generator.

        `top_k` (classification, fill-mask) and `aggregation_strategy` (token classification: simple, first, average or max) are as in
        transformers' pipelines; see `task_outputs.TopK` for the defaults. `prompt_name` is the name of one of `prompts`, which is put before
        every text. With `stride` (for entities and question answering) a text or context that is too long is not truncated but run in
        windows that overlap by that many tokens; see `windows`.

        Raises UsageError for an option that the task does not have, or a prompt that the model does not have. Raises TypeError that names
        the first item that is not a text, UsageError for the first that is not valid Unicode or, without `truncate`, too long; all before
        anything is run.
        """
        how = AnswerOptions(top_k, aggregation_strategy, prompt_name, stride)
        how.check(self.spec)
        listed = self._checked(as_list(texts), 0)
        return self._answer(self.prompted(listed, prompt_name), truncate, 0, how)

    def stream(
        self, texts: Iterable[Text], window: int = WINDOW, truncate: bool = True,
        progress: Callable[[int], None] | None = None, *, top_k: TopK = "default",
        aggregation_strategy: Aggregation = "none", prompt_name: str | None = None, stride: int | None = None,
    ) -> Iterator[Any]:  # fmt: skip
        """Yield the answers one by one, in order, for any number of texts, of which at most `window` are held at once.

        `progress` is called after every window with the number of texts answered so far. Options and errors are those of `answer`; an
        invalid text is refused, with its number in the whole stream, when its window is reached.
        """
        how = AnswerOptions(top_k, aggregation_strategy, prompt_name, stride)
        how.check(self.spec)
        self.prompted((), prompt_name)
        if isinstance(window, bool) or not isinstance(window, SupportsIndex) or operator.index(window) < 1:
            raise UsageError(f"window must be at least 1, a whole number; got {window!r}")
        refuse_others(texts)
        return self._stream(iter(texts), window, truncate, progress, how)

    def rank(self, query: str, passages: Iterable[str], top_n: int | None = None) -> list[dict[str, Any]]:
        """Return `{"index": …, "score": …}` for each passage, or for the best `top_n`, best first; `index` counts `passages` from 0.

        Scores are those of a call with the pairs `(query, passage)`. Raises UsageError where the model is not a re-ranker (a classifier with
        one label) or `top_n` is invalid, TypeError for anything that is not a string.
        """
        if not self.spec.ranks:
            labels = f" with {len(self.labels)} labels" if self.task == "text-classification" else ""
            raise UsageError(f"rank needs a re-ranker, a classifier with one label; the model's task is {self.task}{labels}: call the predictor")
        check_most("top_n", top_n)
        pairs = with_query(query, passages)
        logits = np.asarray([one[self.spec.outputs[0]] for one in self.raw(pairs)] if pairs else self._nothing())
        return [{"index": i, "score": score} for i, score in task_outputs.rank(logits, task_outputs.label_scores(self.spec, logits))[:top_n]]

    def zero_shot(
        self, texts: Iterable[str], candidate_labels: Iterable[str], hypothesis_template: str = TEMPLATE, multi_label: bool = False
    ) -> list[list[dict[str, Any]]]:
        """Return, for each text, `{"label": …, "score": …}` for each of `candidate_labels`, best first, as transformers' zero-shot pipeline
        scores them: how far the text entails the template with the label in place of its `{}`.

        Scores of a text sum to 1; with `multi_label` each is by itself. Raises UsageError where the model has no label that begins with
        "entail", and for labels or a template that cannot be used; TypeError for anything that is not a string.
        """
        asked = ZeroShot.of(self.spec, candidate_labels, hypothesis_template, multi_label)
        asked.check_length(self.tokenizer)
        listed = only_strings(self._checked(as_list(texts), 0))
        step = max(1, WINDOW // len(asked.labels))
        parts = (listed[at : at + step] for at in range(0, len(listed), step))
        return [answer for part in parts for answer in asked.answers(self.logits(asked.pairs(part)))]

    def logits(self, texts: Iterable[Text]) -> Array:
        """Return the raw outputs [N, D] of a model with one vector for each text."""
        listed = self._checked(as_list(texts), 0)
        return self.runner.run(listed, True, 0).outputs.array if listed else self._nothing()

    def prompted(self, texts: Sequence[Text], name: str | None) -> Sequence[Text]:
        """Return `texts` with the prompt `name` before each, or unchanged if it is None. Raises UsageError for an unknown name."""
        return texts if name is None else prompted(texts, self.prompts, name, self._prompts_left_out)

    def raw(self, texts: Sequence[Text], batch_by_batch: bool = False) -> list[dict[str, Array]]:
        """Return the raw outputs of each text by name; one text is run as in a single call. `batch_by_batch`: see `Runner.run`."""
        listed = self._checked(texts, 0)
        whole = self.spec.granularity == "text"
        if whole and len(listed) == 1:
            return [{self.spec.outputs[0]: self.runner.one(listed[0], True, 0)[0][0]}]
        outputs = self.runner.run(listed, True, 0, batch_by_batch).outputs
        return [{self.spec.outputs[0]: row} for row in outputs.array] if whole else outputs.by_text

    def watched(self, watch: Callable[[Batch, Mapping[str, Array]], None] | None) -> None:
        """Call `watch` with every batch and its raw outputs from now on, in the calling thread; None ends that."""
        self.runner.watch = watch

    def _stream(
        self, texts: Iterator[Text], window: int, truncate: bool, progress: Callable[[int], None] | None, how: AnswerOptions
    ) -> Iterator[Any]:
        done = 0
        while held := list(islice(texts, window)):
            self._checked(held, done)
            # The session is not locked while answers are consumed: the consumer may call the predictor.
            yield from self._answer(self.prompted(held, how.prompt_name), truncate, done, how).values
            done += len(held)
            if progress is not None:
                progress(done)

    def _checked(self, texts: Sequence[Text], first: int) -> Sequence[Text]:
        if self.spec.task in PAIRED:
            refuse_lone_pair(texts)
        check(texts, self.spec.task == "question-answering", first)
        return texts

    def _answer(self, texts: Sequence[Text], truncate: bool, first: int, how: AnswerOptions) -> Answer:
        whole = self.spec.granularity == "text"
        if not len(texts):
            return Answer(self._vectors(self._nothing(), how) if whole else [], [], 0)
        if whole and len(texts) == 1 and self.runner.watch is None:
            vector, truncated, tokens = self.runner.one(texts[0], truncate, first)
            return Answer(self._vectors(vector, how), truncated, tokens)
        if how.stride is not None:
            return self._in_windows(texts, truncate, first, how, how.stride)
        raw = self.runner.run(texts, truncate, first)
        if self.spec.sparse:
            return Answer([one.answer() for one in raw.outputs.weights], raw.truncated, raw.tokens)
        if whole:
            return Answer(self._vectors(raw.outputs.array, how), raw.truncated, raw.tokens)
        origins = [text for piece in raw.pieces for text in piece.origins or ()]
        return Answer(self.located(texts, origins, raw.outputs.by_text, how), raw.truncated, raw.tokens)

    def _in_windows(self, texts: Sequence[Text], truncate: bool, first: int, how: AnswerOptions, stride: int) -> Answer:
        split = windows.split(self.tokenizer, texts, self.task, stride, truncate, first)
        raw = self.runner.run_encoded(iter([split.encoded]), len(split.encoded.lengths))
        answers = self.located(split.of_each(texts), split.encoded.origins or (), raw.outputs.by_text, how)
        return Answer(split.merged(answers), raw.truncated, raw.tokens)

    def _nothing(self) -> Array:
        return np.zeros((0, self.spec.output_size), np.float32)

    def _vectors(self, values: Array, how: AnswerOptions) -> Any:
        if self.spec.sparse:
            return [Weights.of(row).answer() for row in values]
        if self.spec.task != "text-classification":
            return values
        return task_outputs.classify(self.spec, values, how.top_k) if len(values) else []

    def located(
        self, texts: Sequence[Text], tokens: Sequence[Tokens], outputs: Sequence[dict[str, Array]], how: AnswerOptions = DEFAULTS,
        ignored: Collection[str] | None = None, sequences: bool = False,
    ) -> list[Any]:  # fmt: skip
        """Return the answers of tasks with outputs for tokens, from the raw outputs [S, …] of each text by name; `tokens` may be empty for
        feature-extraction.

        Tokens and entities of `ignored` labels are left out; by default entities of the label `O`. For `sequences` see `task_outputs.fill`.
        """
        task, name = self.spec.task, self.spec.outputs[0]
        if task == "feature-extraction":
            return [out[name] for out in outputs]
        rows = zip(texts, tokens, outputs, strict=True)
        fast, strategy = self.tokenizer.fast, how.aggregation_strategy
        if strategy != "none":
            left_out = (OUTSIDE,) if ignored is None else ignored
            return [
                entities(self.spec, task_outputs.softmax(out[name][: len(t)]), text, t, strategy, fast, self.unknown_id, left_out)
                for text, t, out in rows
            ]
        if task == "token-classification":
            tags = (task_outputs.tag(self.spec, out[name], text, t) for text, t, out in rows)
            return [[tag for tag in of_text if tag["entity"] not in (ignored or ())] for of_text in tags]
        if task == "question-answering":
            return [task_outputs.span(out["start_logits"], out["end_logits"], text, t) for text, t, out in rows]
        return [task_outputs.fill(out[name], t, self._mask_id, fast.decode, how.top_k, sequences) for _, t, out in rows]


def mask_id(directory: Path, tokenizer: Tokenizer) -> int:
    """Return the id of the mask token. Raises UsageError where there is none."""
    number = _special_id(directory, tokenizer, "mask_token")
    if number is None:
        raise UsageError("the tokenizer has no mask token, which fill-mask needs")
    return number


def _special_id(directory: Path, tokenizer: Tokenizer, key: str) -> int | None:
    number = tokenizer.fast.token_to_id(special_token(directory, key))
    return None if number is None else int(number)
