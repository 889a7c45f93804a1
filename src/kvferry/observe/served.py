"""What clients of the router felt, under vLLM's own names and buckets: charts that exist work on.

`engine="router"` tells these series from those of the engines, where that label is a number. Of requests answered well
only; the others are in `kvferry_router_request_errors_total`. See docs/metrics.md.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from kvferry.observe.histogram import FastHistogram, Series

MOST_MODELS = 100
"""Names beyond these share the label `other`: engines that list no models may take any name."""
ENGINE = "router"
_LABELS = ("model_name", "engine")
_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_E2E_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_HANDOVER_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
_NBYTES = tuple(float(2 ** (10 + power)) for power in range(1, 25, 2))


class ServedMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._models: set[str] = set()
        self.ttft = FastHistogram(
            "vllm:time_to_first_token_seconds", "First byte in to first token out.", _LABELS, _TTFT_S, registry
        )
        self.itl = FastHistogram(
            "vllm:inter_token_latency_seconds", "Between chunks of one stream.", _LABELS, _ITL_S, registry
        )
        self.tpot = FastHistogram(
            "vllm:request_time_per_output_token_seconds", "Mean of one stream.", _LABELS, _ITL_S, registry
        )
        self.e2e = FastHistogram(
            "vllm:e2e_request_latency_seconds", "First byte in to last byte out.", _LABELS, _E2E_S, registry
        )
        self.outcomes = Counter(
            "kvferry_router_pd_outcomes",
            "Pairs of legs that ended.",
            ("mode", "outcome", "reason"),
            registry=registry,
        )
        first = Counter(
            "kvferry_router_first_tokens", "Answers of pairs by who made their first token.", ("by",), registry=registry
        )
        self.first_tokens = {by: first.labels(by) for by in ("prefill", "decode")}
        self.handover = FastHistogram(
            "kvferry_router_pd_handover_seconds",
            "Prefill's reply to decode's first token.",
            ("mode",),
            _HANDOVER_S,
            registry,
        )
        self.moved = Histogram(
            "kvferry_router_pd_transfer_bytes",
            "KV of one transfer, as the engines' stories tell it.",
            ("mode",),
            buckets=_NBYTES,
            registry=registry,
        )
        self.transfer = Histogram(
            "kvferry_router_pd_transfer_seconds",
            "First post to landed, as the engines' stories tell it.",
            ("mode",),
            buckets=_HANDOVER_S,
            registry=registry,
        )

    def model(self, name: str | None) -> str:
        """`name` as a label."""
        name = name or "default"
        if name not in self._models:
            if len(self._models) >= MOST_MODELS:
                return "other"
            self._models.add(name)
        return name

    def gaps(self, name: str | None) -> Series:
        """Where the gaps of a stream of this model go."""
        return self.itl.labels(self.model(name), ENGINE)
