"""The router's Prometheus metrics, under the names that users of other routers already chart. See docs/metrics.md."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvferry.observe.served import ServedMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_P = "kvferry_router_"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.4, 0.6, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class RouterMetrics:
    """One registry per router, so that several can live in one process. `pd`: requests that took a pair."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests answered.", "route", "mode", "status")
        self.errors = self._counter("request_errors", "Requests that ended in an error.", "route", "code", "side")
        self.duration = self._histogram("request_duration_seconds", "First byte in to last byte out.", "route")
        self.ttft = self._histogram("request_ttft_seconds", "First byte in to first token out.", "streaming")
        self.running = self._gauge("running_requests", "Requests in flight.")
        self.worker_health = self._gauge("worker_health", "1: ready.", "role", "engine")
        self.open_transfers = self._gauge(
            "engine_open_transfers", "Transfers open on its first rank.", "role", "engine"
        )
        self.backlog = self._gauge("engine_backlog_bytes", "Streamed KV not yet posted there.", "role", "engine")
        self.pd_requests = self._counter("pd_requests", "Transfers dispatched.", "mode")
        self.pd_prefill_requests = self._counter("pd_prefill_requests", "Prefill legs started.", "engine")
        self.pd_decode_requests = self._counter("pd_decode_requests", "Decode legs started.", "engine")
        self.pd_prefill_errors = self._counter("pd_prefill_errors", "Prefill legs that failed.", "engine", "code")
        self.pd_decode_errors = self._counter("pd_decode_errors", "Decode legs that failed.", "engine", "code")
        self.pd_stream_errors = self._counter("pd_stream_errors", "Streams cut after their first byte.", "engine")
        self.pd_duration = self._histogram("pd_request_duration_seconds", "Dispatch to last byte.", "mode")
        self.pd_prefill_duration = self._histogram("pd_prefill_duration_seconds", "The prefill leg.", "mode")
        self.abandons = self._counter("pd_abandons", "Transfers that P was told to let go.", "outcome")
        self.served = ServedMetrics(self.registry)
        self.local_prefills = self._counter("local_prefills", "Requests that D computed without a prefill engine.")
        self.slo_decisions = self._counter("slo_decisions", "Requests by what the TTFT objective had done.", "action")
        self.flow_queue = self._gauge("flow_control_queue_size", "Requests that wait for the TTFT objective.")
        self.disagg_decisions = Counter(
            "kvferry:disagg_decision", "Prompts by who computes them.", ("decision_type",), registry=self.registry
        )
        self.disconnects = self._counter("client_disconnects", "Clients that left before the end.")
        self.retries = self._counter("retries", "Tries made again before the first byte.", "side", "code")
        self.retries_exhausted = self._counter("retries_exhausted", "Failures with no try left for them.", "reason")
        self.cb_state = self._gauge("cb_state", "Circuit: 0 closed, 1 open, 2 half open.", "role", "engine")
        self.ejections = self._counter("ejections", "Left out for doing worse than others.", "role", "engine")
        self.ejected = self._gauge("worker_ejected", "1: left out.", "role", "engine")
        self.draining = self._gauge("worker_draining", "1: takes no new request.", "role", "engine")
        self.discoveries = self._counter("discoveries", "Looks at a source of engines.", "source", "outcome")
        self.tasks = self._gauge("tasks", "Asyncio tasks in this process.")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        counter = Counter(_P + name, text, labels, registry=self.registry)
        # a label is looked up in the client library at ten times the cost of what is done with it
        counter.labels = functools.cache(counter.labels)  # type: ignore[method-assign]
        return counter

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(_P + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        histogram = Histogram(_P + name, text, labels, registry=self.registry, buckets=_SECONDS)
        histogram.labels = functools.cache(histogram.labels)  # type: ignore[method-assign]
        return histogram

    def load(self, known: Mapping[tuple[str, str], tuple[int, int]]) -> None:
        """`known`: (role, engine) -> transfers open there and bytes waiting. Of others nothing is shown."""
        self.open_transfers.clear()
        self.backlog.clear()
        for labels, (transfers, nbytes) in known.items():
            self.open_transfers.labels(*labels).set(transfers)
            self.backlog.labels(*labels).set(nbytes)

    def text(self) -> bytes:
        return generate_latest(self.registry)
