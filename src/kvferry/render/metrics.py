"""Metrics of one render worker."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class RenderMetrics:
    def __init__(self, open_sessions: Callable[[], float], waiting: Callable[[], float]) -> None:
        self.registry = registry = CollectorRegistry()
        sessions = Gauge("kvferry_render_sessions_open", "Sessions that are not done.", registry=registry)
        sessions.set_function(open_sessions)
        queue = Gauge("kvferry_render_queue", "Requests that wait to be rendered.", registry=registry)
        queue.set_function(waiting)
        self.opened = Counter("kvferry_render_sessions_opened", "Sessions opened.", ("route",), registry=registry)
        self.resumed = Counter(
            "kvferry_render_sessions_resumed", "Sessions opened to go on with what another began.", registry=registry
        )
        self.expired = Counter(
            "kvferry_render_sessions_expired", "Sessions that nobody asked for any more.", registry=registry
        )
        self.refused = Counter(
            "kvferry_render_refused", "Exchanges refused by the worker.", ("reason",), registry=registry
        )
        self.seconds = Histogram(
            "kvferry_render_seconds",
            "Request in to token ids out, its turn awaited.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.tokens = Counter("kvferry_render_tokens", "Output tokens fed.", registry=registry)
        cpu = Counter(
            "kvferry_render_cpu_seconds", "CPU time of sessions on the event loop.", ("part",), registry=registry
        )
        self.cpu_open, self.cpu_feed = cpu.labels("open"), cpu.labels("feed")

    def watch(self, requests: Callable[[], float]) -> None:
        """`requests`: how many choices of all sessions wait for tokens."""
        gauge = Gauge("kvferry_render_choices", "Choices that wait for tokens.", registry=self.registry)
        gauge.set_function(requests)

    def text(self) -> bytes:
        return generate_latest(self.registry)
