"""What the render tier does for this router, as metrics. See docs/metrics.md."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from kvferry.observe.histogram import FastHistogram

_P = "kvferry_router_render_"
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0)


class RenderMetrics:
    """On the router's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.health = Gauge(_P + "worker_health", "1: ready.", ("worker",), registry=registry)
        self.sessions = Gauge(_P + "sessions", "Open there from this router.", ("worker",), registry=registry)
        self.opens = Counter(_P + "opens", "Sessions asked for.", ("outcome",), registry=registry)
        self.resumes = Counter(_P + "resumes", "Sessions that went on after a failure.", ("how",), registry=registry)
        self.fallbacks = Counter(_P + "fallbacks", "Requests that engines rendered instead.", registry=registry)
        self.opening = FastHistogram(_P + "open_seconds", "A rendering.", (), _SECONDS, registry).labels()
        self.feeding = FastHistogram(_P + "feed_seconds", "Tokens to bytes.", (), _SECONDS, registry).labels()
