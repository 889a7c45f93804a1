"""An engine's metrics of its transfers: their names, and what a `TransferStats` does to them.

Under the names of vLLM's NIXL connector (`vllm:nixl_...`) where the meaning is the same, else our own (`kvferry:...`).
docs/metrics.md explains them; `DEFINITIONS` is what it is checked against.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import Counter, Gauge, Histogram

from kvferry.transfer.stats import Levels, TransferStats

Kind = Literal["histogram", "counter", "gauge"]
Make = Mapping[type, Callable[..., Any]]
"""prometheus_client's `Counter`, `Gauge` and `Histogram` -> what makes one (vLLM on Ray has its own)."""

_POST_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_NBYTES = tuple(float(2 ** (10 + power)) for power in range(1, 25, 2))
_DESCRIPTORS = (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10_000, 20_000, 50_000)
_PLAN_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)
_BLOCKS = tuple(float(2**power) for power in range(14))


@dataclass(frozen=True)
class Definition:
    """`labels`: beside those that every metric of the engine has. A counter's samples end in `_total`."""

    name: str
    kind: Kind
    text: str
    buckets: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()


def _histogram(name: str, text: str, buckets: tuple[float, ...]) -> Definition:
    return Definition(name, "histogram", text, buckets)


_BY_FIELD = {
    "wire_s": _histogram("vllm:nixl_xfer_time_seconds", "From the begin of a post to its completion.", _POST_S[1:]),
    "post_s": _histogram("vllm:nixl_post_time_seconds", "How long the post call took.", _POST_S),
    "nbytes": _histogram("vllm:nixl_bytes_transferred", "Bytes of one post.", _NBYTES),
    "descriptors": _histogram("vllm:nixl_num_descriptors", "Regions of one post.", _DESCRIPTORS),
    "plan_s": _histogram("kvferry:plan_time_seconds", "From block ids to regions, for one post.", _PLAN_S),
    "verify_s": _histogram("kvferry:verify_time_seconds", "Digests of the KV of one registration.", _PLAN_S),
    "blocks": _histogram("kvferry:blocks_per_landing", "Blocks that one request takes from elsewhere.", _BLOCKS),
    "runs": _histogram("kvferry:block_runs", "Stretches of neighbours that those blocks make.", _BLOCKS),
}
_FAILED = Definition("vllm:nixl_num_failed_transfers", "counter", "Posts that ended badly, or with their peer.")
_EXPIRED = Definition("vllm:nixl_num_kv_expired_reqs", "counter", "Transfers that no decode engine came for in time.")
_ENDED = Definition("kvferry:transfers", "counter", "Transfers that ended, by rank.", labels=("side", "outcome"))
_TURNED_AWAY = Definition(
    "kvferry:side_channel_refusals",
    "counter",
    "Connections and messages that the side channel did not take, by rank.",
    labels=("reason",),
)
_PULLS = Definition(
    "kvferry:pulls",
    "counter",
    "Transfers of mode pull from this prefill engine, by rank and by who moved the bytes.",
    labels=("by",),
)
_LEVELS = {
    "sources": Definition("kvferry:open_sources", "gauge", "Transfers that this prefill engine has open."),
    "landings": Definition("kvferry:open_landings", "gauge", "Transfers that this decode engine has open."),
    "posts": Definition("kvferry:posts_in_flight", "gauge", "WRITEs and READs that were posted and aren't complete."),
    "backlog_bytes": Definition(
        "kvferry:stream_backlog_bytes", "gauge", "Streamed KV that is computed and registered for, but not posted."
    ),
    "quarantined_blocks": Definition(
        "kvferry:quarantined_blocks", "gauge", "Blocks of failed requests that a peer may still write to or read."
    ),
}
_EXPIRED_OUTCOME = "lease_lapsed"

DEFINITIONS = (*_BY_FIELD.values(), _FAILED, _EXPIRED, _ENDED, _TURNED_AWAY, _PULLS, *_LEVELS.values())

_JOINED: dict[str, Callable[[list[int]], int]] = {"posts": sum, "backlog_bytes": sum}
"""How the ranks' levels make the engine's. The others are of requests, which every rank has: the most of any."""


class TransferMetrics:
    """The metrics of one process's engines. `labels`: of every metric; `values`: engine -> their values, in order."""

    def __init__(self, make: Make, labels: Sequence[str], values: Mapping[int, Sequence[object]]) -> None:
        self.made: list[Any] = []
        self._make, self._labels, self._values = make, list(labels), values
        self._of_engine = {definition.name: self._register(definition) for definition in DEFINITIONS}
        self._levels: dict[int, dict[str, Levels]] = {engine: {} for engine in values}

    def _register(self, definition: Definition) -> dict[int, Any]:
        """Engine -> its metric; still without its own labels, where it has some."""
        kind = {"histogram": Histogram, "counter": Counter, "gauge": Gauge}[definition.kind]
        how: dict[str, Any] = {"documentation": definition.text, "labelnames": [*self._labels, *definition.labels]}
        if definition.buckets:
            how["buckets"] = list(definition.buckets)
        if definition.kind == "gauge":
            how["multiprocess_mode"] = "mostrecent"
        try:
            metric = self._make[kind](name=definition.name, **how)
        except ValueError:  # vLLM's NIXL connector has the name, in the same MultiConnector
            if not definition.name.startswith("vllm:"):
                raise
            metric = self._make[kind](name=definition.name.replace("vllm:", "kvferry:"), **how)
        self.made.append(metric)
        if definition.labels:
            return dict.fromkeys(self._values, metric)
        return {engine: metric.labels(*values) for engine, values in self._values.items()}

    def observe(self, record: TransferStats, engine: int = 0) -> None:
        for field, definition in _BY_FIELD.items():
            histogram = self._of_engine[definition.name][engine]
            for value in getattr(record, field):
                histogram.observe(value)
        self._of_engine[_FAILED.name][engine].inc(record.failed_posts)
        self._of_engine[_EXPIRED.name][engine].inc(record.ended.get("prefill", {}).get(_EXPIRED_OUTCOME, 0))
        ended = self._of_engine[_ENDED.name][engine]
        for side, outcomes in record.ended.items():
            for outcome, number in outcomes.items():
                ended.labels(*self._values[engine], side, outcome).inc(number)
        for reason, number in record.turned_away.items():
            self._of_engine[_TURNED_AWAY.name][engine].labels(*self._values[engine], reason).inc(number)
        for by, number in record.pulls.items():
            self._of_engine[_PULLS.name][engine].labels(*self._values[engine], by).inc(number)
        if record.levels:
            ranks = self._levels[engine]
            ranks.update(record.levels)
            for field, definition in _LEVELS.items():
                joined = _JOINED.get(field, max)([getattr(levels, field) for levels in ranks.values()])
                self._of_engine[definition.name][engine].set(joined)
