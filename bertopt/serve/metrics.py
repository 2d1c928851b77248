"""What a scrape shows, in Prometheus's conventions: base units, `_total` for counters, one label for the model."""

from __future__ import annotations

from typing import Any

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_TEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)


class Metrics:
    """The registry of one server: nothing is registered globally, so that two may live in one process."""

    def __init__(self) -> None:
        import prometheus_client as prometheus

        self._prometheus = prometheus
        self.registry: Any = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=self.registry)  # memory, CPU time, open files

        def counter(name: str, text: str, *labels: str) -> Any:
            return prometheus.Counter(f"bertopt_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Any:
            return prometheus.Gauge(f"bertopt_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Any:
            return prometheus.Histogram(f"bertopt_{name}", text, labels, registry=self.registry, buckets=buckets)

        self.requests = counter("requests", "Requests answered.", "route", "status")
        self.request_seconds = histogram("request_duration_seconds", "Time from a request's head to its answer.", _SECONDS, "route")
        self.ready = gauge("ready", "1 while requests are accepted.")
        self.model_info = gauge("model_info", "Always 1; the labels say what is served.", "model", "form", "precision", "version")
        self.request_texts = histogram("request_texts", "Texts of a request.", _TEXTS, "model")
        self.truncated = counter("truncated_texts", "Texts longer than the model takes, of which a part was cut off.", "model")
        self.waited = histogram("queue_duration_seconds", "Time from a request's arrival in the queue to its first batch.", _SECONDS, "model")
        self.queue_tokens = gauge("queue_tokens", "Tokens that wait.", "model")
        self.queue_texts = gauge("queue_texts", "Texts that wait.", "model")
        self.queue_capacity = gauge("queue_capacity_tokens", "Tokens that may wait.", "model")
        self.refused = counter("refused_requests", "Requests refused before they were queued.", "model", "reason")
        self.dropped = counter("dropped_requests", "Requests that left the queue unanswered.", "model", "reason")
        self.batch_seconds = histogram("batch_duration_seconds", "Time of one batch on the device.", _SECONDS, "model")
        self.batch_texts = histogram("batch_texts", "Texts of a batch.", _TEXTS, "model")
        self.batch_tokens = histogram("batch_tokens", "Tokens of a batch, padding included.", _TOKENS, "model")
        self.failed_batches = counter("failed_batches", "Batches that the model failed on.", "model")
        self.tokens = counter("tokens", "Tokens run, without padding.", "model")
        self.padding = counter("padding_tokens", "Padding run.", "model")
        self.cache_hits = counter("cache_hits", "Texts answered from the cache.", "model")
        self.cache_misses = counter("cache_misses", "Texts not in the cache.", "model")
        self.cache_bytes = gauge("cache_bytes", "Size of the cache.", "model")

    def scrape(self) -> bytes:
        return bytes(self._prometheus.generate_latest(self.registry))

    def of(self, model: str) -> ModelMetrics:
        return ModelMetrics(self, model)


class ModelMetrics:
    """The metrics of one model."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._all, self._model = metrics, model
        self.waited, self.failed_batches = metrics.waited.labels(model), metrics.failed_batches.labels(model)
        self.request_texts = metrics.request_texts.labels(model)
        self._truncated = metrics.truncated.labels(model)
        self.queue_capacity = metrics.queue_capacity.labels(model)
        self._queue_tokens, self._queue_texts = metrics.queue_tokens.labels(model), metrics.queue_texts.labels(model)
        self._batch = [each.labels(model) for each in (metrics.batch_texts, metrics.batch_tokens, metrics.batch_seconds)]
        self._tokens, self._padding = metrics.tokens.labels(model), metrics.padding.labels(model)
        self._hits, self._misses = metrics.cache_hits.labels(model), metrics.cache_misses.labels(model)
        self._cache_bytes = metrics.cache_bytes.labels(model)

    def refuse(self, reason: str) -> None:
        self._all.refused.labels(self._model, reason).inc()

    def drop(self, reason: str) -> None:
        self._all.dropped.labels(self._model, reason).inc()

    def truncated(self, texts: int) -> None:
        self._truncated.inc(texts)

    def queue(self, tokens: int, texts: int) -> None:
        self._queue_tokens.set(tokens)
        self._queue_texts.set(texts)

    def batch(self, texts: int, tokens: int, padded: int, seconds: float) -> None:
        for metric, value in zip(self._batch, (texts, padded, seconds), strict=True):
            metric.observe(value)
        self._tokens.inc(tokens)
        self._padding.inc(max(0, padded - tokens))

    def cache(self, hits: int, misses: int, size: int) -> None:
        self._hits.inc(hits)
        self._misses.inc(misses)
        self._cache_bytes.set(size)
