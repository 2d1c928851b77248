"""`bertopt verify DIR --url …`: does a running server answer as the artefact in DIR does here, and soon enough?

What it does not look at: whether the artefact itself is right (`bertopt verify DIR --against CHECKPOINT` does), the server
under load, and texts other than those sent.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
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
from bertopt.results import Limits
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
    A classifier is sent pairs too.

    The server may be bertopt's or another with `/embed`, `/predict` or `/v1/embeddings`. `latency_ms` bounds the 95th
    percentile of single requests. Raises UsageError for a model without one vector a text or a server that refuses,
    Unsupported where nothing answers.
    """
    predictor, manifest = load(directory), stages.read_manifest(directory)
    if predictor.spec.granularity != "text":
        raise UsageError(f"--url compares embeddings and classifications; '{directory}' is made for {predictor.spec.task}")
    sent = list(read(texts).asked(predictor.spec.task)) if texts else _built_in(predictor.spec)
    client = _Client(url.rstrip("/"), api_key)
    classifies = predictor.spec.task == "text-classification"
    ask = client.scores(predictor.spec.labels) if classifies else client.embedding()
    expected = np.concatenate([predictor.logits([text]) for text in sent])
    if classifies:
        expected = task_outputs.label_scores(predictor.spec, expected)
    with ThreadPoolExecutor(CLIENTS) as pool:
        got = np.concatenate(list(pool.map(lambda text: ask([text]), sent)))
    if got.shape != expected.shape:
        raise UsageError(f"{url} answers {got.shape[-1]} numbers for each text; the artefact gives {expected.shape[-1]}: it serves another model")
    several = np.linspace(0, len(sent) - 1, min(IN_ONE_REQUEST, len(sent))).round().astype(int)
    try:
        together = ask([sent[i] for i in several])
    except UsageError as error:
        raise UsageError(f"texts one by one were answered, {len(several)} in one request were not: {error}") from error
    got, expected = np.concatenate([got, together]), np.concatenate([expected, expected[several]])
    recorded = (manifest.gates or {}).get("parity") or {}
    limits = Limits.model_validate(recorded["limits"]) if recorded.get("limits") else gates.effective_limits(manifest.precision)
    times = [_timed(ask, sent[i % len(sent)]) for i in range(LATENCY_REQUESTS)]
    one_score = classifies and len(predictor.spec.labels) == 1 and not predictor.spec.regression
    return _judged(url, expected, got, classifies, limits, manifest.precision, times, latency_ms, one_score)


def _logits(scores: Array) -> Array:
    """Undo the sigmoid, up to where float32's steps of scores near 1 show."""
    kept = np.clip(np.asarray(scores, np.float64), 1e-12, 1 - 1e-4)
    return np.asarray(np.log(kept / (1 - kept)))


def _built_in(spec: Spec) -> list[Text]:
    texts = [text for text in probes.built_in_texts() if text]
    return [*texts, *(probes.pairs(spec, texts) if spec.task == "text-classification" else [])]


def _judged(
    url: str, expected: Array, got: Array, classifies: bool, limits: Limits, precision: Precision, times: Sequence[float],
    latency_ms: float | None, one_score: bool = False,
) -> UrlCheck:  # fmt: skip
    difference, norm = np.abs(got - expected), np.linalg.norm
    cosine = (got * expected).sum(1) / np.maximum(norm(got, axis=1) * norm(expected, axis=1), 1e-12)
    flips = float((got.argmax(1) != expected.argmax(1)).mean()) if classifies else None
    values = {
        "max_abs": float(difference.max()), "rel_l2": float(norm(got - expected) / max(float(norm(expected)), 1e-12)),
        "cosine_min": float(cosine.min()),
    }  # fmt: skip
    if one_score:
        # Most passages score near 0, where nothing shows: how the logits vary does.
        expected = _logits(expected)
        got, expected = _logits(got) - expected.mean(), expected - expected.mean()
    sizes = norm(expected, axis=1)
    errors = norm(got - expected, axis=1) / np.maximum(np.maximum(sizes, np.sqrt(np.mean(sizes**2))), 1e-12)
    texts = {"median_text": float(np.median(errors)), "worst_text": float(errors.max())}
    p50, p95 = np.percentile(times, (50, 95)).tolist()
    failures = []
    for name, value in values.items():
        limit = getattr(limits, name)
        # NaN fails.
        if limit is not None and not (value >= limit if name == "cosine_min" else value <= limit):
            failures.append(f"{name} {value:.6g} (limit {limit:g})")
    for (name, value), limit in zip(texts.items(), (replay.MEDIAN_TOLERANCE[precision], replay.TOLERANCE[precision]), strict=True):
        if not value <= limit:
            failures.append(f"{name} {value:.6g} (limit {limit:g})")
    if flips is not None and limits.label_flips_max is not None and flips > limits.label_flips_max:
        failures.append(f"label_flips {flips:.6g} (limit {limits.label_flips_max:g})")
    if latency_ms is not None and not p95 <= latency_ms:
        failures.append(f"p95 {p95:.3g} ms (limit {latency_ms:g} ms)")
    same = f"{url} answers as the artefact does: max_abs {values['max_abs']:.3g} over {len(got)} texts, p95 {p95:.3g} ms"
    return UrlCheck(
        url=url, texts=len(got), label_flips=flips, p50_ms=p50, p95_ms=p95, failures=failures, **values, **texts,
        exit_code=3 if failures else 0, reason=f"{url} failed: {'; '.join(failures)}" if failures else same,
    )  # fmt: skip


def _timed(ask: Ask, text: Text) -> float:
    start = time.perf_counter()
    ask([text])
    return (time.perf_counter() - start) * 1e3


class _Client:
    def __init__(self, url: str, api_key: str | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--url must begin with http:// or https://; got '{url}'")
        self.url = url
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})

    def embedding(self) -> Ask:
        """Return the function that asks for embeddings, by the route that the server has."""
        try:
            self._post("/embed", {"inputs": "a"})
        except _Missing:

            def ask(texts: Sequence[Text]) -> Array:
                rows = self._post("/v1/embeddings", {"input": list(texts), "model": "default"})["data"]
                return np.array([row["embedding"] for row in sorted(rows, key=lambda row: row["index"])])

            return ask
        return lambda texts: np.array(self._post("/embed", {"inputs": list(texts), "truncate": True}))

    def scores(self, labels: Sequence[str]) -> Ask:
        """Return the function that asks for texts' scores, in the order of `labels`."""

        def ask(texts: Sequence[Text]) -> Array:
            inputs = [[text] if isinstance(text, str) else list(text) for text in texts]
            rows = [{row["label"]: row["score"] for row in one} for one in self._post("/predict", {"inputs": inputs, "truncate": True})]
            for row in rows:
                if row.keys() != set(labels):
                    raise UsageError(f"{self.url} answers the labels {', '.join(sorted(row))}; the artefact has {', '.join(labels)}")
            return np.array([[row[label] for label in labels] for row in rows])

        return ask

    def _post(self, path: str, body: Any) -> Any:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), self._headers)  # noqa: S310  (checked above)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            if error.code in (404, 405):
                raise _Missing(f"{self.url} has no {path}; give the server's root") from error
            said = error.read(500).decode(errors="replace")
            raise UsageError(f"{self.url}{path} answered {error.code}: {said}") from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise Unsupported(f"{self.url} does not answer ({getattr(reason, 'strerror', None) or reason}); is the server ready?") from error


class _Missing(UsageError):
    """The server has no such route."""
