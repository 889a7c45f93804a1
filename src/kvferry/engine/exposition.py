"""What /metrics says, under vLLM's names: the loop's snapshot, what only the server sees (latencies, ends), and what
the ranks' transfers did.

Owner: the event loop. Observing costs a fraction of a microsecond; the text is made when it is asked for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client import Histogram as PromHistogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvferry.engine.loop import Stats
from kvferry.engine.request import FinishReason
from kvferry.observe.transfers import Make, TransferMetrics

FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


class Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, documentation: str, labels: dict[str, str]) -> HistogramMetricFamily:
        family = HistogramMetricFamily(name, documentation, labels=list(labels))
        total, buckets = 0, []
        for bound, number in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += number
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), float(total)))
        family.add_metric(list(labels.values()), buckets, self._sum)
        return family


class Metrics(Collector):
    """`transfers`: None without a connector. `cache`: how the KV pool is built, by vLLM's names."""

    def __init__(
        self,
        model_name: str,
        stats: Callable[[], Stats],
        transfers: bool = False,
        cache: Mapping[str, object] | None = None,
    ) -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        self._stats = stats
        self._cache = dict(cache or {})
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.first_token = Histogram(FIRST_TOKEN_S)
        self.between_tokens = Histogram(BETWEEN_TOKENS_S)
        self.request = Histogram(REQUEST_S)
        self.finished: dict[str, int] = dict.fromkeys(get_args(FinishReason), 0)
        self.transfers: TransferMetrics | None = None
        if transfers:
            make: Make = {kind: partial(kind, registry=self._registry) for kind in (Counter, Gauge, PromHistogram)}
            self.transfers = TransferMetrics(make, list(self._labels), {0: list(self._labels.values())})

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> Iterator[Metric]:
        """Nothing: so that registering doesn't ask the loop for its numbers."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        counts = stats.counts
        by_source = {source: getattr(counts, source) for source in SOURCES}
        if self._cache:
            names = [*self._labels, *self._cache]
            info = GaugeMetricFamily("vllm:cache_config_info", "How the KV pool is built.", labels=names)
            info.add_metric([*self._labels.values(), *map(str, self._cache.values())], 1)
            yield info
        yield self._gauge("num_requests_running", "Requests in model execution batches.", stats.running)
        yield self._gauge("num_requests_waiting", "Requests waiting to be processed.", stats.waiting)
        yield self._gauge("kv_cache_usage_perc", "KV-cache usage, 1 is all of it.", stats.kv_usage)
        yield self._counter("prefix_cache_queries", "Tokens looked for in the prefix cache.", counts.prefix_queries)
        yield self._counter("prefix_cache_hits", "Tokens found in the prefix cache.", counts.prefix_hits)
        yield self._counter("num_preemptions", "Requests that lost their blocks to others.", counts.preemptions)
        yield self._counter("prompt_tokens", "Prompt tokens processed.", sum(by_source.values()))
        yield self._split("prompt_tokens_by_source", "Prompt tokens, by where their KV is from.", "source", by_source)
        yield self._counter("generation_tokens", "Output tokens.", counts.generation)
        yield self._split("request_success", "Requests that ended.", "finished_reason", self.finished)
        for name, what, histogram in (
            ("time_to_first_token_seconds", "From arrival to the first token.", self.first_token),
            ("inter_token_latency_seconds", "Between two tokens of one request.", self.between_tokens),
            ("e2e_request_latency_seconds", "From arrival to the last token.", self.request),
        ):
            yield histogram.family(f"vllm:{name}", what, self._labels)
        late = CounterMetricFamily(
            "kvferry_engine_late_seconds", "Time that steps took beyond their model.", labels=list(self._labels)
        )
        late.add_metric(list(self._labels.values()), stats.late_s)
        yield late

    def _gauge(self, name: str, documentation: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", documentation, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, documentation: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", documentation, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _split(self, name: str, documentation: str, label: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", documentation, labels=[*self._labels, label])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), key], value)
        return family
