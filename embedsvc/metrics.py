"""Every metric: name, unit, labels, buckets.

One `Metrics` per service with a registry of its own, so that two in one process share nothing.
Labels come from the configuration or from fixed classes, never from requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from embedsvc import __version__

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Upper edges in tokens of the fixed length classes; the last class is open.
LENGTH_CLASSES = (32, 128, 512, 2048)
LENGTH_CLASS_NAMES = ("le_32", "le_128", "le_512", "le_2048", "gt_2048")
# Upper edges in tokens of the fixed classes of a batch's padded width, finer; the last is open.
WIDTH_CLASSES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
WIDTH_CLASS_NAMES = (*(f"le_{edge}" for edge in WIDTH_CLASSES), "gt_2048")
# Upper edges in tokens of the length histogram, fixed: batches are as wide as a multiple of 8, and
# above 512 an eighth of an octave is fine enough.
TEXT_TOKENS_EDGES = (
    *range(8, 512, 8),
    *(512 << octave | step * (64 << octave) for octave in range(6) for step in range(8)),
    32_768,
)
# Gauges of several workers become one by the least or the most of them; all others are summed.
LEAST_OF_ALL = frozenset({"embedsvc_ready", "embedsvc_model_up", "embedsvc_batch_memory_share"})
MOST_OF_ALL = frozenset({
    "embedsvc_build_info",
    "embedsvc_cost_correction",
    "embedsvc_cost_seconds",
    "embedsvc_edge_switch_gain_ratio",
    "embedsvc_event_loop_lag_seconds",
    "embedsvc_queue_oldest_seconds",
})  # fmt: skip
VERSION_LABELS = ("model", "version")
LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600,
)  # fmt: skip
ERROR_BUCKETS = (0.02, 0.04, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1, 2, 5)
ROWS_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def length_class(tokens: int) -> str:
    """Return the metric label of a text of `tokens` tokens."""
    return LENGTH_CLASS_NAMES[bisect_left(LENGTH_CLASSES, tokens)]


class Metrics:
    """The metrics of one service."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        build = Gauge(
            "embedsvc_build_info", "Always 1; the version is a label.", ["version"],
            registry=self.registry,
        )  # fmt: skip
        build.labels(__version__).set(1)
        self._requests = Counter(
            "embedsvc_requests", "HTTP answers by route, status and reason, probes left out.",
            ["route", "status", "reason"],
            registry=self.registry,
        )  # fmt: skip
        self._request_seconds = Histogram(
            "embedsvc_request_seconds", "Time from the request's headers to its last byte.",
            ["route"], buckets=LATENCY_BUCKETS, registry=self.registry,
        )  # fmt: skip
        self._request_counters: dict[tuple[str, int, str], Counter] = {}
        self._route_seconds: dict[str, Histogram] = {}
        self._loop_lag = Gauge(
            "embedsvc_event_loop_lag_seconds", "Delay of the event loop's last timer.",
            registry=self.registry,
        )  # fmt: skip
        self._ready = Gauge(
            "embedsvc_ready", "1 while every model is loaded and alive.", registry=self.registry
        )
        self._workers = Gauge(
            "embedsvc_workers", "HTTP processes that are ready.", registry=self.registry
        )
        self.worker_deaths = Counter(
            "embedsvc_worker_deaths", "Workers that died, or ended unasked, while they loaded too.",
            registry=self.registry,
        )  # fmt: skip
        self._by_version = _VersionFamilies(self.registry)

    def request(self, route: str, status: int, reason: str, seconds: float | None) -> None:
        """Count one HTTP answer, and its time where it has one."""
        key = (route, status, reason)
        counter = self._request_counters.get(key)
        if counter is None:
            # `labels` costs 3 µs a request.
            counter = self._requests.labels(route, str(status), reason)
            self._request_counters[key] = counter
            self._route_seconds[route] = self._request_seconds.labels(route)
        counter.inc()
        if seconds is not None:
            self._route_seconds[route].observe(seconds)

    def loop_lag(self, seconds: float) -> None:
        """Record the event loop's lag."""
        self._loop_lag.set(seconds)

    def ready_from(self, ready: Callable[[], bool]) -> None:
        """Read readiness from a function at every scrape."""
        for gauge in (self._ready, self._workers):
            gauge.set_function(lambda: float(ready()))

    def version(self, model: str, version: str) -> VersionMetrics:
        """Return the metrics of one version of one model."""
        return VersionMetrics(self._by_version, model, version)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _VersionFamilies:
    """Metric families labelled by model and version."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._add_gauges()
        self._add_counters()
        self._add_histograms()
        self.text_tokens = TextTokens()
        registry.register(self.text_tokens)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        names = (*VERSION_LABELS, *labels)
        return Gauge(f"embedsvc_{name}", text, names, registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        names = (*VERSION_LABELS, *labels)
        return Counter(f"embedsvc_{name}", text, names, registry=self._registry)

    def _histogram(
        self, name: str, text: str, *labels: str, buckets: Sequence[float] = LATENCY_BUCKETS
    ) -> Histogram:
        names = (*VERSION_LABELS, *labels)
        return Histogram(f"embedsvc_{name}", text, names, registry=self._registry, buckets=buckets)

    def _add_gauges(self) -> None:
        self.queue_sequences = self._gauge("queue_sequences", "Texts admitted and not yet settled.")
        self.queue_tokens = self._gauge("queue_tokens", "Tokens admitted and not yet settled.")
        self.queue_predicted = self._gauge(
            "queue_seconds", "Predicted seconds of work admitted and not yet settled."
        )
        self.queue_oldest = self._gauge(
            "queue_oldest_seconds", "Age of the oldest request at the head of the queue."
        )
        self.slots_busy = self._gauge("slots_busy", "Device slots that run a batch.")
        self.up = self._gauge("model_up", "1 while the model is loaded, 0 while it is restarted.")
        self.memory_share = self._gauge(
            "batch_memory_share",
            "Least share of a full batch that the device's memory allows now; 1 is all.",
        )
        self.cache_bytes = self._gauge("cache_bytes", "Memory of the vector cache.")
        self.cost = self._gauge(
            "cost_seconds",
            "Fitted cost: seconds of a batch (c0), a row (c1), a padded token (c2), a padded token "
            "squared (c3), of any batch at least (floor), and more after a rest (cold).",
            "term",
        )
        self.cost_correction = self._gauge(
            "cost_correction",
            "Measured over predicted time of recent batches, by padded width.",
            "width", "quantile",
        )  # fmt: skip
        self.edge_switch_gain = self._gauge(
            "edge_switch_gain_ratio",
            "Share of the predicted cost that the last switch to other bucket edges saves on texts "
            "they were not fitted to; 0 before the first.",
        )

    def _add_counters(self) -> None:
        self.busy_seconds = self._counter(
            "slot_busy_seconds", "Seconds of device slots in batches."
        )
        self.tokens = self._counter(
            "tokens", "Tokens through the model: real, and computed with padding.", "kind"
        )
        self.key_tokens = self._counter(
            "key_tokens", "Tokens through the model by the name of the API key, without padding.",
            "key",
        )  # fmt: skip
        self.batches = self._counter("batches", "Batches by outcome.", "outcome")
        self.edge_switches = self._counter("edge_switches", "Switches to other bucket edges.")
        self.restarts = self._counter(
            "model_restarts", "Loads of an isolated model after its process ended.", "reason"
        )
        self.texts = self._counter("texts", "Texts by how they ended.", "outcome")
        self.cache = self._counter(
            "cache_texts", "Texts looked up in the vector cache, by result.", "result"
        )

    def _add_histograms(self) -> None:
        self.rows = self._histogram("batch_rows", "Rows of a batch.", buckets=ROWS_BUCKETS)
        self.tokenize = self._histogram("tokenize_seconds", "Time to tokenize a request.")
        self.queue = self._histogram(
            "queue_wait_seconds", "Time from the queue to the device, by length.", "length"
        )
        self.inference = self._histogram("inference_seconds", "Time of a batch on the device.")
        self.cost_error = self._histogram(
            "cost_error_ratio",
            "Distance of a batch's measured time from its corrected prediction, as a share of it.",
            "width",
            buckets=ERROR_BUCKETS,
        )


class TextTokens(Collector):
    """The length histogram of every version, made at each scrape from counts kept elsewhere."""

    name = "embedsvc_text_tokens"
    text = "Tokens of a text after truncation, of all texts computed since the start."

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], Callable[[], Sequence[int]]] = {}

    def describe(self) -> list[HistogramMetricFamily]:
        """Return the family without samples."""
        return [HistogramMetricFamily(self.name, self.text, labels=VERSION_LABELS)]

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Return the family with the samples of this moment."""
        (family,) = self.describe()
        for labels, read in self.counts.items():
            counts = read()
            up_to = list(accumulate(counts))
            buckets = [
                (str(float(edge)), up_to[min(edge, len(up_to) - 1)]) for edge in TEXT_TOKENS_EDGES
            ]
            tokens = sum(length * count for length, count in enumerate(counts))
            family.add_metric(labels, [*buckets, ("+Inf", up_to[-1])], tokens)
        yield family


class VersionMetrics:
    """Bound metrics of one version; observed from the event loop and the device threads."""

    def __init__(self, families: _VersionFamilies, model: str, version: str) -> None:
        def counts(family: Counter, *kinds: str) -> dict[str, Counter]:
            return {kind: family.labels(model, version, kind) for kind in kinds}

        self._families, self._labels = families, (model, version)
        self.tokens = counts(families.tokens, "real", "computed")
        self.batches = counts(families.batches, "ok", "failed")
        self.restarts = counts(families.restarts, "died", "hung", "device")
        self.texts = counts(families.texts, "ok", "failed", "expired", "abandoned", "rejected")
        self.cache = counts(families.cache, "hit", "miss")
        self.busy_seconds = families.busy_seconds.labels(model, version)
        self.rows = families.rows.labels(model, version)
        self.edge_switches = families.edge_switches.labels(model, version)
        self.edge_switch_gain = families.edge_switch_gain.labels(model, version)
        self.tokenize = families.tokenize.labels(model, version)
        self.inference = families.inference.labels(model, version)
        self.queue = {
            name: families.queue.labels(model, version, name) for name in LENGTH_CLASS_NAMES
        }

    def key_tokens(self, key: str, tokens: int) -> None:
        """Count tokens of a key; one is shown once it has some."""
        self._families.key_tokens.labels(*self._labels, key).inc(tokens)

    def cost_error(self, width_class: int, share: float) -> None:
        """Count a batch by how far off its prediction was; a class is shown once it has one."""
        name = WIDTH_CLASS_NAMES[width_class]
        self._families.cost_error.labels(*self._labels, name).observe(share)

    def cost_is(self, seconds: Mapping[str, float]) -> None:
        """Show the terms of the fitted cost model."""
        for term, value in seconds.items():
            self._families.cost.labels(*self._labels, term).set(value)

    def gauges_from(
        self,
        *,
        sequences: Callable[[], float],
        tokens: Callable[[], float],
        seconds: Callable[[], float],
        oldest: Callable[[], float],
        slots_busy: Callable[[], float],
        memory_share: Callable[[], float],
        up: Callable[[], float],
        p50: Sequence[float],
        p95: Sequence[float],
    ) -> None:
        """Read the queue's state from functions at every scrape.

        `p50` and `p95` are read too, by width class: their owner writes to them in place.
        """
        f = self._families
        f.queue_sequences.labels(*self._labels).set_function(sequences)
        f.queue_tokens.labels(*self._labels).set_function(tokens)
        f.queue_predicted.labels(*self._labels).set_function(seconds)
        f.queue_oldest.labels(*self._labels).set_function(oldest)
        f.slots_busy.labels(*self._labels).set_function(slots_busy)
        f.memory_share.labels(*self._labels).set_function(memory_share)
        f.up.labels(*self._labels).set_function(up)
        for quantile, by_class in (("0.5", p50), ("0.95", p95)):
            for k, name in enumerate(WIDTH_CLASS_NAMES):
                gauge = f.cost_correction.labels(*self._labels, name, quantile)
                gauge.set_function(partial(by_class.__getitem__, k))

    def cache_bytes_from(self, n_bytes: Callable[[], float]) -> None:
        """Read the bytes of the vector cache at every scrape."""
        self._families.cache_bytes.labels(*self._labels).set_function(n_bytes)

    def text_tokens_from(self, counts: Callable[[], Sequence[int]]) -> None:
        """Read the texts of each number of tokens, from 0 to the maximum, at every scrape."""
        self._families.text_tokens.counts[self._labels] = counts
