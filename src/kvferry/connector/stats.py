"""A step's `TransferStats` in the clothes that vLLM's stats and metrics wear: from the workers, over all ranks, to the
server's log and its /metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvferry.observe.transfers import TransferMetrics
from kvferry.transfer.stats import TransferStats

_registered: list[Any] = []  # by the last engine of this process, in prometheus_client's global registry


class KVFerryStats(KVConnectorStats):  # type: ignore[misc]
    """`data`: the record as dicts and lists, as vLLM sends it to its server's process."""

    record: TransferStats

    @classmethod
    def of(cls, record: TransferStats) -> KVFerryStats:
        stats = cls()
        stats.record = record
        return stats

    @property
    def data(self) -> dict[str, Any]:
        plain: dict[str, Any] = msgspec.to_builtins(self.record)
        return plain

    @data.setter
    def data(self, plain: dict[str, Any]) -> None:
        self.record = msgspec.convert(plain, TransferStats)

    def reset(self) -> None:
        self.record = TransferStats()

    def aggregate(self, other: KVFerryStats) -> KVFerryStats:
        self.record.add(other.record)
        return self

    def is_empty(self) -> bool:
        return self.record.eventless

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log, once per interval."""
        record = self.record
        out: dict[str, int | float] = {
            f"{side} {outcome}": number
            for side, outcomes in record.ended.items()
            for outcome, number in outcomes.items()
        }
        out |= {f"turned away: {reason}": number for reason, number in record.turned_away.items()}
        out |= {f"pulls by {by}": number for by, number in record.pulls.items()}
        if record.failed_posts:
            out["Failed posts"] = record.failed_posts
        if record.nbytes:
            wire_ms, mib = np.array(record.wire_s) * 1e3, np.array(record.nbytes) / 2**20
            out["Posts"] = len(record.nbytes)
            out["Avg xfer time (ms)"] = round(float(wire_ms.mean()), 3)
            out["P90 xfer time (ms)"] = round(float(np.percentile(wire_ms, 90)), 3)
            out["Avg post time (ms)"] = round(float(np.mean(record.post_s)) * 1e3, 3)
            out["Avg MB per post"] = round(float(mib.mean()), 3)
            out["Throughput (MB/s)"] = round(float(mib.sum() / max(wire_ms.sum() / 1e3, 1e-9)), 3)
            out["Avg number of descriptors"] = round(float(np.mean(record.descriptors)), 1)
        if record.blocks:
            out["Blocks per run"] = round(sum(record.blocks) / sum(record.runs), 1)
        return out


class KVFerryPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """vLLM makes one per server process, and makes all metrics anew with each engine that it starts there."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[type, Any],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        while _registered:
            try:
                REGISTRY.unregister(_registered.pop())
            except KeyError:  # vLLM did, or it never was in this registry
                continue
        self._metrics = TransferMetrics(metric_types, labelnames, per_engine_labelvalues)
        _registered.extend(self._metrics.made)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._metrics.observe(msgspec.convert(transfer_stats_data, TransferStats), engine_idx)
