"""`bertopt verify DIR --url …`: does a running server answer as the artefact in DIR does here, and soon enough?

What it does not look at: whether the artefact itself is right (`bertopt verify DIR --against CHECKPOINT` does), the server
under load, and texts other than those sent.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import BaseModel

from bertopt import stages
from bertopt.checks import gates, probes
from bertopt.commands.running_server import RunningServer
from bertopt.core import Precision, Spec
from bertopt.errors import UsageError
from bertopt.recipe.texts import read
from bertopt.results import Limits, holds
from bertopt.runtime import replay, task_outputs
from bertopt.runtime.load import load
from bertopt.runtime.own_texts import own_texts
from bertopt.spec import Text

if TYPE_CHECKING:
    from bertopt.commands.running_server import Ask
    from bertopt.core import Array

#: Requests at once while answers are compared, so that texts are batched with others; latency is measured with one.
CLIENTS = 8
#: Texts that are sent once more in one request: as many as every such server takes.
IN_ONE_REQUEST = 32
#: Single texts whose latency is taken; the 95th percentile of fewer says little.
LATENCY_REQUESTS = 200


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

    The server may be bertopt's or another with `/embed`, `/embed_sparse`, `/v1/embeddings`, `/rerank` or `/predict`. `latency_ms` bounds the 95th
    percentile of single requests. Raises UsageError for a model without one vector a text or a server that refuses,
    Unsupported where nothing answers.
    """
    predictor, manifest = load(directory), stages.read_manifest(directory)
    if predictor.spec.granularity != "text":
        raise UsageError(f"--url compares embeddings and classifications; '{directory}' is made for {predictor.spec.task}")
    spec, server = predictor.spec, RunningServer(url.rstrip("/"), api_key)
    given = list(read(texts).asked(spec.task)) if texts else _built_in(directory, spec)
    pairs: list[Text] = [text for text in given if not isinstance(text, str)]
    # Single texts of a file have no other route than /predict.
    ranks = spec.ranks and bool(pairs) and (texts is None or len(pairs) == len(given)) and server.has_rerank()
    sent = pairs if ranks else given
    several = _in_one_request(sent, ranks)
    ask = _route(server, spec, ranks)
    expected = np.concatenate([predictor.logits([text]) for text in (*sent, *several)])
    got = _answers(ask, sent, several, expected.shape[-1], url)
    if server.openai and np.allclose(np.linalg.norm(got, axis=1), 1, atol=1e-3):  # that route normalises for all models
        expected = expected / np.maximum(np.linalg.norm(expected, axis=1, keepdims=True), 1e-12)
    classifies = spec.task == "text-classification"
    logits = _both_logits(spec, expected, got, ranks)
    if classifies:
        expected, got = task_outputs.label_scores(spec, expected), task_outputs.label_scores(spec, got) if ranks else got
    times = [_timed(ask, sent[i % len(sent)]) for i in range(LATENCY_REQUESTS)]
    limits = manifest.passed_limits() or gates.effective_limits(manifest.precision, sparse=spec.sparse)
    return _judged(url, len(got), _differences(expected, got, classifies, logits), limits, manifest.precision, times, latency_ms)


def _route(server: RunningServer, spec: Spec, ranks: bool) -> Ask:
    if ranks:
        return server.ranks
    if spec.sparse:
        return server.sparse_embedding(spec.output_size)
    return server.scores(spec.labels) if spec.task == "text-classification" else server.embedding(spec.normalize)


def _in_one_request(sent: Sequence[Text], ranks: bool) -> list[Text]:
    several = [sent[i] for i in np.linspace(0, len(sent) - 1, min(IN_ONE_REQUEST, len(sent))).round().astype(int)]
    return [(several[0][0], text[1]) for text in several] if ranks else several  # such a request has one query


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


def _both_logits(spec: Spec, expected: Array, got: Array, ranks: bool) -> tuple[Array, Array] | None:
    """Return the logits of a model with one score a text: of the artefact here, and of the server's answers."""
    if ranks:
        return expected, got
    if not spec.ranks or spec.regression:
        return None
    return _logits(task_outputs.label_scores(spec, expected)), _logits(got)


def _logits(scores: Array) -> Array:
    """Undo the sigmoid, up to where float32's steps of scores near 1 show."""
    kept = np.clip(np.asarray(scores, np.float64), 1e-12, 1 - 1e-4)
    return np.asarray(np.log(kept / (1 - kept)))


def _built_in(directory: Path, spec: Spec) -> list[Text]:
    """Return the built-in texts, or those of the artefact's own words where its tokenizer knows few of theirs, and pairs of them for classifiers."""
    # Some servers refuse empty ones.
    texts = [text for text in own_texts(directory, spec) or probes.built_in_texts() if text]
    return [*texts, *(filter(all, probes.pairs(spec, texts)) if spec.task == "text-classification" else [])]


def _differences(expected: Array, got: Array, classifies: bool, logits: tuple[Array, Array] | None = None) -> dict[str, float]:
    """Return the figures of `UrlCheck` about outputs [N, D]; `logits` [N, 1], expected and got, are those of a model with one score a text."""
    norm = np.linalg.norm
    cosine = (got * expected).sum(1) / np.maximum(norm(got, axis=1) * norm(expected, axis=1), 1e-12)
    values = {
        "max_abs": float(np.abs(got - expected).max()), "rel_l2": float(norm(got - expected) / max(float(norm(expected)), 1e-12)),
        "cosine_min": float(cosine.min()),
    }  # fmt: skip
    flips = {"label_flips": float((got.argmax(1) != expected.argmax(1)).mean())} if classifies else {}
    if logits is not None:
        # Most passages score near 0, where nothing shows: how the logits vary does.
        expected, got = (one - logits[0].mean() for one in logits)
    sizes = norm(expected, axis=1)
    errors = norm(got - expected, axis=1) / np.maximum(np.maximum(sizes, np.sqrt(np.mean(sizes**2))), 1e-12)
    return values | {"median_text": float(np.median(errors)), "worst_text": float(errors.max())} | flips


def _judged(
    url: str, texts: int, values: Mapping[str, float], limits: Limits, precision: Precision, times: Sequence[float], latency_ms: float | None
) -> UrlCheck:
    """Hold the `values` of `_differences`, over `texts` texts, to the limits, and the times of requests [ms] to `latency_ms`."""
    p50, p95 = np.percentile(times, (50, 95)).tolist()
    failures = _missed(values, {
        "max_abs": limits.max_abs, "rel_l2": limits.rel_l2, "cosine_min": limits.cosine_min, "label_flips": limits.label_flips_max,
        "median_text": replay.MEDIAN_TOLERANCE[precision], "worst_text": replay.TOLERANCE[precision],
    })  # fmt: skip
    if latency_ms is not None and not p95 <= latency_ms:
        failures.append(f"p95 {p95:.3g} ms (limit {latency_ms:g} ms)")
    same = f"{url} answers as the artefact does: max_abs {values['max_abs']:.3g} over {texts} texts, p95 {p95:.3g} ms"
    return UrlCheck(
        url=url, texts=texts, p50_ms=p50, p95_ms=p95, failures=failures, **values,
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
