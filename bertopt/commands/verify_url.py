"""`bertopt verify DIR --url …`: does a running server answer as the artefact in DIR does here, and soon enough?

What it does not look at: whether the artefact itself is right (`bertopt verify DIR --against CHECKPOINT` does), the server
under load, and texts other than those sent.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel

from bertopt import stages
from bertopt.checks import gates, probes
from bertopt.checks.probes import Text
from bertopt.core import Precision, Spec
from bertopt.errors import Unsupported, UsageError
from bertopt.recipe.texts import read
from bertopt.results import Limits, holds
from bertopt.runtime import replay, task_outputs
from bertopt.runtime.load import load

if TYPE_CHECKING:
    from bertopt.core import Array

    #: Vectors [N, D] of N texts or pairs, of one request.
    Ask = Callable[[Sequence[Text]], Array]

#: Requests at once while answers are compared, so that texts are batched with others; latency is measured with one.
CLIENTS = 8
#: Texts that are sent once more in one request: as many as every such server takes.
IN_ONE_REQUEST = 32
#: Single texts whose latency is taken; the 95th percentile of fewer says little.
LATENCY_REQUESTS = 200
TIMEOUT_S = 30.0


class UrlCheck(BaseModel):
    """What a server answered, against the artefact here. `failures` name the limit that does not hold."""

    url: str
    texts: int
    max_abs: float
    rel_l2: float
    cosine_min: float
    median_text: float
    worst_text: float
    """Differences of a text's outputs, relative to its size or the usual one."""
    label_flips: float | None = None
    p50_ms: float
    p95_ms: float
    failures: list[str]
    exit_code: int
    reason: str


def verify_url(
    directory: Path, url: str, texts: Path | None = None, latency_ms: float | None = None, api_key: str | None = None
) -> UrlCheck:
    """Send every text to `url`, and some of them once more in one request, and compare the answers with those of the artefact in
    `directory`: by the artefact's limits, and by what another machine or batch makes of one model's outputs (`replay.TOLERANCE`).
    A classifier is sent pairs too; a re-ranker is sent pairs alone, where the server has `/rerank`.

    The server may be bertopt's or another with `/embed`, `/v1/embeddings`, `/rerank` or `/predict`. `latency_ms` bounds the 95th
    percentile of single requests. Raises UsageError for a model without one vector a text or a server that refuses,
    Unsupported where nothing answers.
    """
    predictor, manifest = load(directory), stages.read_manifest(directory)
    if predictor.spec.granularity != "text":
        raise UsageError(f"--url compares embeddings and classifications; '{directory}' is made for {predictor.spec.task}")
    spec, client = predictor.spec, _Client(url.rstrip("/"), api_key)
    given = list(read(texts).asked(spec.task)) if texts else _built_in(spec)
    classifies = spec.task == "text-classification"
    pairs: list[Text] = [text for text in given if not isinstance(text, str)]
    # Single texts of a file have no other route than /predict.
    ranks = spec.ranks and bool(pairs) and (texts is None or len(pairs) == len(given)) and client.has_rerank()
    sent = pairs if ranks else given
    ask: Ask = client.ranks if ranks else client.scores(spec.labels) if classifies else client.embedding(spec.normalize)
    several = [sent[i] for i in np.linspace(0, len(sent) - 1, min(IN_ONE_REQUEST, len(sent))).round().astype(int)]
    if ranks:  # one request has one query
        several = [(several[0][0], text[1]) for text in several]
    expected = np.concatenate([predictor.logits([text]) for text in (*sent, *several)])
    got = _answers(ask, sent, several, expected.shape[-1], url)
    if client.openai and np.allclose(np.linalg.norm(got, axis=1), 1, atol=1e-3):  # that route normalises for all models
        expected = expected / np.maximum(np.linalg.norm(expected, axis=1, keepdims=True), 1e-12)
    logits = (expected, got) if ranks else None
    if classifies:
        expected = task_outputs.label_scores(spec, expected)
        got = task_outputs.label_scores(spec, got) if ranks else got
    if spec.ranks and not spec.regression:
        logits = logits or (_logits(expected), _logits(got))
    recorded = (manifest.gates or {}).get("parity") or {}
    limits = Limits.model_validate(recorded["limits"]) if recorded.get("limits") else gates.effective_limits(manifest.precision)
    times = [_timed(ask, sent[i % len(sent)]) for i in range(LATENCY_REQUESTS)]
    return _judged(url, expected, got, classifies, limits, manifest.precision, times, latency_ms, logits)


def _answers(ask: Ask, sent: Sequence[Text], several: Sequence[Text], size: int, url: str) -> Array:
    """Return vectors [N, size] for each of `sent` in a separate request, and for `several` in one. Raises UsageError for others."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        got = np.concatenate(list(pool.map(lambda text: ask([text]), sent)))
    if got.shape[-1] != size:
        raise UsageError(f"{url} returns {got.shape[-1]} numbers for each text; the artefact {size}: it serves another model")
    try:
        return np.concatenate([got, ask(several)])
    except UsageError as error:
        raise UsageError(f"single texts were answered, but not {len(several)} in one request: {error}") from error


def _logits(scores: Array) -> Array:
    """Undo the sigmoid, up to where float32's steps of scores near 1 show."""
    kept = np.clip(np.asarray(scores, np.float64), 1e-12, 1 - 1e-4)
    return np.asarray(np.log(kept / (1 - kept)))


def _built_in(spec: Spec) -> list[Text]:
    # Some servers refuse empty ones.
    texts = [text for text in probes.built_in_texts() if text]
    return [*texts, *(filter(all, probes.pairs(spec, texts)) if spec.task == "text-classification" else [])]


def _judged(
    url: str, expected: Array, got: Array, classifies: bool, limits: Limits, precision: Precision, times: Sequence[float],
    latency_ms: float | None, logits: tuple[Array, Array] | None = None,
) -> UrlCheck:  # fmt: skip
    """Judge outputs [N, D]; of a model with one score a text also its expected and got `logits` [N, 1]."""
    norm = np.linalg.norm
    cosine = (got * expected).sum(1) / np.maximum(norm(got, axis=1) * norm(expected, axis=1), 1e-12)
    flips = float((got.argmax(1) != expected.argmax(1)).mean()) if classifies else None
    values = {
        "max_abs": float(np.abs(got - expected).max()), "rel_l2": float(norm(got - expected) / max(float(norm(expected)), 1e-12)),
        "cosine_min": float(cosine.min()),
    }  # fmt: skip
    if logits is not None:
        # Most passages score near 0, where nothing shows: how the logits vary does.
        expected, got = (one - logits[0].mean() for one in logits)
    sizes = norm(expected, axis=1)
    errors = norm(got - expected, axis=1) / np.maximum(np.maximum(sizes, np.sqrt(np.mean(sizes**2))), 1e-12)
    values |= {"median_text": float(np.median(errors)), "worst_text": float(errors.max())}
    p50, p95 = np.percentile(times, (50, 95)).tolist()
    failures = _missed(
        {**values, **({} if flips is None else {"label_flips": flips})},
        {
            "max_abs": limits.max_abs, "rel_l2": limits.rel_l2, "cosine_min": limits.cosine_min, "label_flips": limits.label_flips_max,
            "median_text": replay.MEDIAN_TOLERANCE[precision], "worst_text": replay.TOLERANCE[precision],
        },
    )  # fmt: skip
    if latency_ms is not None and not p95 <= latency_ms:
        failures.append(f"p95 {p95:.3g} ms (limit {latency_ms:g} ms)")
    same = f"{url} answers as the artefact does: max_abs {values['max_abs']:.3g} over {len(got)} texts, p95 {p95:.3g} ms"
    return UrlCheck(
        url=url, texts=len(got), label_flips=flips, p50_ms=p50, p95_ms=p95, failures=failures, **values,
        exit_code=gates.FAILED if failures else 0, reason=f"{url} failed: {'; '.join(failures)}" if failures else same,
    )  # fmt: skip


def _missed(values: Mapping[str, float], limits: Mapping[str, float | None]) -> list[str]:
    """Return a text for each value that misses its limit; NaN misses any."""
    held = [(name, value, limit) for name, value in values.items() if (limit := limits[name]) is not None]
    return [f"{name} {value:.6g} (limit {limit:g})" for name, value, limit in held if not holds(name, value, limit)]


def _timed(ask: Ask, text: Text) -> float:
    """Return the milliseconds of one request."""
    start = time.perf_counter()
    ask([text])
    return (time.perf_counter() - start) * 1e3


class _Client:
    def __init__(self, url: str, api_key: str | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--url must begin with http:// or https://; got '{url}'")
        self.url = url
        #: Whether embeddings are asked for at OpenAI's route, for want of another.
        self.openai = False
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})

    def embedding(self, normalize: bool) -> Ask:
        """Return the function that asks for embeddings, by the route that the server has."""
        options = {"truncate": True, "normalize": normalize}
        try:
            self._post("/embed", {"inputs": "a", **options})
        except _Missing:
            self.openai = True

            def ask(texts: Sequence[Text]) -> Array:
                def vectors(answer: Any) -> list[list[float]]:
                    return [row["embedding"] for row in sorted(answer["data"], key=lambda row: row["index"])]

                return self._numbers("/v1/embeddings", {"input": list(texts), "model": "default"}, texts, vectors)

            return ask
        return lambda texts: self._numbers("/embed", {"inputs": list(texts), **options}, texts, list)

    def has_rerank(self) -> bool:
        try:
            self.ranks([("a", "b")])
        except _Missing:
            return False
        return True

    def ranks(self, pairs: Sequence[Text]) -> Array:
        """Return the logits [N, 1] of pairs with one query."""
        body = {"query": pairs[0][0], "texts": [pair[1] for pair in pairs], "raw_scores": True, "truncate": True}

        def scores(answer: Any) -> list[list[float]]:
            by_index = {row["index"]: row["score"] for row in answer}
            return [[by_index[i]] for i in range(len(pairs))]

        return self._numbers("/rerank", body, pairs, scores)

    def scores(self, labels: Sequence[str]) -> Ask:
        """Return the function that asks for texts' scores, in the order of `labels`."""

        def scores(answer: Any) -> list[list[float]]:
            rows = [{row["label"]: row["score"] for row in ([one] if isinstance(one, dict) else one)} for one in answer]
            for row in rows:
                if row.keys() != set(labels):
                    raise self._other_labels(row.keys(), labels)
            return [[row[label] for label in labels] for row in rows]

        def ask(texts: Sequence[Text]) -> Array:
            inputs = [[text] if isinstance(text, str) else list(text) for text in texts]
            return self._numbers("/predict", {"inputs": inputs, "truncate": True}, texts, scores)

        return ask

    def _other_labels(self, got: Set[str], labels: Sequence[str]) -> UsageError:
        shown = ", ".join(sorted(got))
        if got and got < set(labels):
            how = "all are compared: have it answer all, as text-embeddings-inference does and transformers' pipelines with top_k=None"
            return UsageError(f"{self.url} answers {len(got)} of {len(labels)} labels ({shown}); {how}")
        return UsageError(f"{self.url} answers the labels {shown}; the artefact has {', '.join(labels)}")

    def _numbers(self, path: str, body: Any, texts: Sequence[Text], found_in: Callable[[Any], list[list[float]]]) -> Array:
        """Return the numbers `found_in` the answer, some for each of `texts` [N, D]. Raises UsageError where it is not there."""
        answer = self._post(path, body)
        try:
            found = np.array(found_in(answer), np.float64)
        except (TypeError, KeyError, ValueError, AttributeError):
            found = np.empty(0)
        if found.ndim != 2 or len(found) != len(texts):
            wanted = f"expected an item with numbers for each of {len(texts)} text(s)"
            raise UsageError(f"{self.url}{path} does not answer as text-embeddings-inference does: {wanted}; got {json.dumps(answer)[:100]}")
        return found

    def _post(self, path: str, body: Any) -> Any:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), self._headers)  # noqa: S310  (checked above)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            if error.code in (404, 405):
                raise _Missing(f"{self.url} has no {path}; {self._instead(path)}") from error
            said = error.read(500).decode(errors="replace")
            said += "; give the server's key with --api-key or BERTOPT_API_KEY" if error.code in (401, 403) else ""
            raise UsageError(f"{self.url}{path} answered {error.code}: {said}") from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise Unsupported(f"{self.url} does not answer ({getattr(reason, 'strerror', None) or reason}); is the server ready?") from error


    def _instead(self, path: str) -> str:
        """Return what to do where the server has no route `path`."""
        root = "give the server's root"
        if path == "/predict":
            try:
                self.ranks([("a", "b")])
            except (UsageError, Unsupported):
                return root
            return "it has /rerank, which answers pairs alone: give --texts a file of pairs, or leave it out"
        return root


class _Missing(UsageError):
    """The server has no such route."""
