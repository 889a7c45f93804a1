"""The record in vLLM's hands: over workers, through the engine's messages, into its log and its metrics."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm", reason="vllm is not installed: run `make setup`")

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlPromMetrics
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvferry.connector.connector import KVFerryConnector
from kvferry.connector.stats import KVFerryStats, _registered
from kvferry.transfer.stats import Levels, TransferStats

VALUES: dict[int, list[object]] = {0: ["m", "0"]}
TYPES = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
CONFIG: Any = SimpleNamespace(kv_transfer_config=None)


def said(nbytes: int, rank: int = 0) -> KVFerryStats:
    one = {"plan_s": [0.001], "post_s": [0.002], "wire_s": [0.004], "nbytes": [nbytes], "descriptors": [3]}
    more: dict[str, Any] = {"ended": {"prefill": {"ok": 1}}, "levels": {str(rank): Levels(posts=1)}}
    return KVFerryStats.of(TransferStats(**one, **more))


def output(stats: KVFerryStats | None) -> ModelRunnerOutput:
    done = ModelRunnerOutput(req_ids=[], req_id_to_index={})
    done.kv_connector_output = KVConnectorOutput(kv_connector_stats=stats)
    return done


def test_workers_are_joined_by_vllm() -> None:
    outputs = [output(None), output(pickle.loads(pickle.dumps(said(10, 1)))), output(said(20, 2))]
    joined = KVOutputAggregator(3).aggregate(outputs)
    assert joined is not None and joined.kv_connector_output is not None
    stats = joined.kv_connector_output.kv_connector_stats
    assert isinstance(stats, KVFerryStats)
    assert stats.record.nbytes == [10, 20] and stats.record.ended == {"prefill": {"ok": 2}}
    assert stats.record.levels.keys() == {"1", "2"}


def test_through_the_message_to_the_server() -> None:
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(said(10).to_dict()))
    built = KVFerryConnector.build_kv_connector_stats(data)
    assert built.record == said(10).record and built.to_dict() == built.data == said(10).data
    assert KVFerryConnector.build_kv_connector_stats().is_empty()


def test_what_the_log_says() -> None:
    stats = said(3 << 20)
    stats.aggregate(said(1 << 20)).aggregate(KVFerryStats.of(TransferStats(failed_posts=2, blocks=[9], runs=[3])))
    told = stats.reduce()
    assert (told["prefill ok"], told["Posts"], told["Avg MB per post"], told["Failed posts"]) == (2, 2, 2.0, 2)
    assert (told["Avg xfer time (ms)"], told["Throughput (MB/s)"], told["Blocks per run"]) == (4.0, 500.0, 3.0)
    only_levels = KVFerryStats.of(TransferStats(levels={"0": Levels(posts=1)}))
    assert only_levels.is_empty() and not stats.is_empty(), "levels alone are no line in the log"
    stats.reset()
    assert stats.is_empty() and stats.reduce() == {}


def test_metrics_of_a_server_that_starts_one_engine_after_the_other() -> None:
    labels = {"model_name": "m", "engine": "0"}
    for nbytes in (7, 5):
        metrics = KVFerryConnector.build_prom_metrics(CONFIG, TYPES, ["model_name", "engine"], VALUES)
        metrics.observe(said(nbytes).to_dict(), 0)
        assert REGISTRY.get_sample_value("vllm:nixl_bytes_transferred_sum", labels) == nbytes
        assert REGISTRY.get_sample_value("kvferry:posts_in_flight", labels) == 1
    while _registered:
        REGISTRY.unregister(_registered.pop())


class _Noted:
    """Stands for vLLM's metric classes; keeps what was made."""

    made: dict[str, tuple[str, list[float]]]

    def __init__(self, kind: str, name: str, buckets: Any = (), **_: Any) -> None:
        self.made[name] = (kind, list(buckets))

    def labels(self, *_: object) -> _Noted:
        return self


def noting(kind: str) -> Any:
    return lambda **how: _Noted(kind, **how)


def test_shared_names_have_the_kind_and_the_buckets_that_vllm_gives_them() -> None:
    types = {Counter: noting("counter"), Gauge: noting("gauge"), Histogram: noting("histogram")}
    _Noted.made = {}
    NixlPromMetrics(CONFIG, types, ["model_name", "engine"], VALUES)
    theirs, _Noted.made = _Noted.made, {}
    KVFerryConnector.build_prom_metrics(CONFIG, types, ["model_name", "engine"], VALUES)
    ours = {name: what for name, what in _Noted.made.items() if name.startswith("vllm:")}
    assert len(ours) == 6 and ours == {name: theirs[name] for name in ours}


def test_no_worker_no_stats() -> None:
    connector = KVFerryConnector.__new__(KVFerryConnector)
    connector._worker = None
    assert connector.get_kv_connector_stats() is None
