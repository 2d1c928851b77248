"""Bulk inference on Ray: a class for `Dataset.map_batches`, whose actors open the artefact once; and a Ray Serve application.

    import ray
    from bertopt.ray import predict

    rows = ray.data.read_parquet("texts/")
    predict(rows, "out/artifact", actors=8).write_parquet("embeddings/")

    from ray import serve
    from bertopt.ray import application

    serve.run(application("out/artifact", replicas=4))

Ray runs a block again where an actor dies, so each row of the input has one row in the output; the order is Ray's.
What is not seen here: an artefact whose directory the actors' machines do not share, which fails when an actor opens it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np

from bertopt import stages
from bertopt.errors import BertoptError, UsageError, missing_library
from bertopt.runtime import task_outputs
from bertopt.runtime.answer_options import DEFAULTS, AnswerOptions
from bertopt.runtime.entities import Aggregation
from bertopt.runtime.load import load
from bertopt.runtime.text_inputs import usual_pair
from bertopt.spec import Text

if TYPE_CHECKING:
    from bertopt.core import Array
    from bertopt.runtime.predictor import Answer, Predictor
    from bertopt.serve.settings import Settings

#: Rows of a batch: enough to sort by length, and little to run again where an actor dies.
BATCH_ROWS = 2048


class BatchPredictor:
    """Adds the column `embedding` [N, H], or `answer` as JSON texts, to batches {column: array [N]}.

    Without `pair` a classifier or a model that answers questions takes the column `text_pair` where there is one beside `text`.
    """

    def __init__(
        self, directory: str | Path, column: str = "text", pair: str | None = None, threads: int | None = None, prompt_name: str | None = None,
        key: str | Path | None = None, aggregation_strategy: Aggregation = "none", stride: int | None = None,
    ) -> None:  # fmt: skip
        self._options = AnswerOptions(aggregation_strategy=aggregation_strategy, prompt_name=prompt_name, stride=stride)
        self._predictor = load(directory, threads=threads, key=key)
        self._options.check(self._predictor.spec)
        self._column, self._pair = column, pair

    def __call__(self, batch: dict[str, Array]) -> dict[str, Any]:
        """Raises UsageError for a column that is not there, or that an answer would replace, TypeError for what is no text."""
        spec = self._predictor.spec
        pooled = spec.task == "feature-extraction" and spec.granularity == "text" and not spec.sparse
        answer = "embedding" if pooled else "answer"
        if answer in batch:
            raise UsageError(f"the rows have a column '{answer}' already, which the answers would replace; rename it")
        usual = usual_pair(spec.task, self._column)
        pair = usual if self._pair is None and usual in batch else self._pair
        names = [self._column] if pair is None else [self._column, pair]
        missing = [name for name in names if name not in batch]
        if missing:
            raise UsageError(f"the rows have no column '{missing[0]}'; they have {', '.join(batch)}")
        columns = [batch[name].tolist() for name in names]
        texts: list[Text] = columns[0] if len(columns) == 1 else [*zip(*columns, strict=True)]
        values = self._predictor(texts, **asdict(self._options))
        if pooled:
            return {**batch, answer: values}
        answers = [json.dumps(task_outputs.plain(one)) for one in values]
        return {**batch, answer: np.array(answers, object)}


def predict(
    dataset: Any, directory: str | Path, column: str = "text", pair: str | None = None, actors: int = 1, threads: int = 1,
    gpus: float = 0, batch_rows: int = BATCH_ROWS, prompt_name: str | None = None, key: str | Path | None = None,
    aggregation_strategy: Aggregation = "none", stride: int | None = None,
) -> Any:  # fmt: skip
    """Return the `ray.data.Dataset` with answers; each of `actors` takes `threads` CPUs and `gpus` GPUs. `prompt_name`,
    `aggregation_strategy` and `stride` are those of the predictor. With `key`, a file that holds a public key, the artefact must be signed with it."""
    try:
        from ray.data import ActorPoolStrategy
    except ModuleNotFoundError as error:
        raise missing_library("predict needs Ray Data", "'bertopt[ray]'", "call bertopt.load's predictor") from error

    options = {
        "directory": str(Path(directory).resolve()), "column": column, "pair": pair, "threads": threads, "prompt_name": prompt_name,
        "key": _absolute(key), "aggregation_strategy": aggregation_strategy, "stride": stride,
    }  # fmt: skip
    return dataset.map_batches(
        BatchPredictor, fn_constructor_kwargs=options, batch_size=batch_rows, batch_format="numpy",
        compute=ActorPoolStrategy(size=actors), num_cpus=threads, num_gpus=gpus,
    )  # fmt: skip


class Texts(Protocol):
    """A part of a longer input."""

    @property
    def texts(self) -> list[Text]: ...


P = TypeVar("P", bound=Texts)


def answers(
    parts: Iterable[P], directory: str | Path, content: str, actors: int, threads: int = 1, key: str | Path | None = None,
    options: AnswerOptions = DEFAULTS,
) -> Iterator[tuple[P, Answer]]:  # fmt: skip
    """Yield each part, in order, with what `bertopt.load` answers to its texts as `options` say: on `actors` of `threads` CPUs each, of an artefact
    whose files have the hash `content`, and that is signed with the public key in the file `key`, where one is given.

    An actor that dies is started again and answers its part again. At most two parts an actor are held. Runs on the cluster that
    `RAY_ADDRESS` names, else on this machine. Raises Unsupported where Ray is not installed, UsageError where an actor, such as one that was
    started again, opened another artefact, and what `bertopt.load` and its predictor raise there.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise missing_library("actors need Ray", "'bertopt[ray]'", "leave them out") from error

    def checked(answer: Any) -> Answer:
        answered = ray.get(answer)
        if isinstance(answered, BertoptError):
            raise answered
        opened, found = answered
        if opened != content:
            raise UsageError(f"'{directory}' was replaced by another artefact during the call; start again with another directory")
        return cast("Answer", found)

    ours = not ray.is_initialized()
    if ours:
        ray.init(include_dashboard=False, log_to_driver=False)
    try:
        remote = ray.remote(num_cpus=threads, max_restarts=-1, max_task_retries=-1)(_Opened)
        opened = [remote.remote(str(Path(directory).resolve()), threads, _absolute(key), options) for _ in range(actors)]
        waiting = deque[tuple[P, Any]]()
        for number, part in enumerate(parts):
            waiting.append((part, opened[number % actors].answer.remote(part.texts)))
            if len(waiting) == 2 * actors:
                oldest, answer = waiting.popleft()
                yield oldest, checked(answer)
        for oldest, answer in waiting:
            yield oldest, checked(answer)
    finally:
        if ours:
            ray.shutdown()


class _Opened:
    """An actor that opens the artefact for its first texts."""

    def __init__(self, directory: str, threads: int, key: str | None, options: AnswerOptions) -> None:
        self._directory, self._threads, self._key, self._options = directory, threads, key, options
        self._predictor: Predictor | None = None
        self._content = ""

    def answer(self, texts: list[Text]) -> tuple[str, Answer] | BertoptError:
        """Return the hash of the artefact's files with its answers, or the error: raised here, its message would be Ray's traceback."""
        try:
            if self._predictor is None:
                self._predictor = load(self._directory, threads=self._threads, key=self._key)
                # Read after the files: of an artefact that was replaced in between this is the new one's hash, which is refused.
                self._content = stages.read_manifest(Path(self._directory)).content_sha256
            return self._content, self._predictor.answer(texts, **asdict(self._options))
        except BertoptError as error:
            return error


def _absolute(path: str | Path | None) -> str | None:
    """An actor works in a directory that Ray gives it."""
    return None if path is None else str(Path(path).resolve())


def application(
    directory: str | Path, name: str | None = None, replicas: int = 1, threads: int = 1, gpus: float = 0, settings: Settings | None = None
) -> Any:
    """Return a Ray Serve application with the routes of `bertopt serve`, for `ray.serve.run`.

    Each of `replicas` opens the artefact, takes `threads` CPUs and `gpus` GPUs, and batches what Ray sends it by cost. The model is
    called `name`, or as its directory is. Ray owns the sockets and the end: of `settings`, `host`, `port`,
    `drain_s` and `threads` do not count.
    Raises UsageError for a directory that cannot name a model; a replica fails with what `bertopt.load` raises.
    """
    try:
        from ray import serve
    except ModuleNotFoundError as error:
        raise missing_library("application needs Ray Serve", "'bertopt[ray]'", "use `bertopt serve`") from error

    from bertopt.serve.settings import Settings, named

    ((own, path),) = named([str(Path(directory).resolve())]).items()
    models, chosen = {name or own: path}, replace(settings or Settings(), threads=threads)

    def build() -> Any:
        from bertopt.serve.app import create

        return create(models, chosen)

    options = {"num_cpus": threads, "num_gpus": gpus}
    concurrent = chosen.concurrent_requests
    deployment = serve.deployment(
        name="bertopt", num_replicas=replicas, ray_actor_options=options, max_ongoing_requests=concurrent, health_check_timeout_s=60
    )
    return deployment(serve.ingress(build)()).bind()
