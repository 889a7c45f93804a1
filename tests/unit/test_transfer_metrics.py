"""The metrics of transfers: names and values as a scraper sees them, and docs/metrics.md against the code."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvferry.observe.metrics import RouterMetrics
from kvferry.observe.transfers import DEFINITIONS, Make, TransferMetrics
from kvferry.router.render.metrics import RenderMetrics
from kvferry.transfer.stats import Levels, TransferStats

LABELS = ["model_name", "engine"]
PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def made(registry: CollectorRegistry, engines: int = 1) -> TransferMetrics:
    make: Make = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    return TransferMetrics(make, LABELS, {engine: ["m", str(engine)] for engine in range(engines)})


def value(registry: CollectorRegistry, name: str, engine: int = 0, **labels: str) -> float | None:
    return registry.get_sample_value(name, {"model_name": "m", "engine": str(engine), **labels})


def test_values_reach_their_metrics() -> None:
    registry = CollectorRegistry()
    metrics = made(registry)
    metrics.observe(
        TransferStats(
            plan_s=[0.001, 0.003],
            post_s=[0.01, 0.02],
            wire_s=[0.1, 0.2],
            nbytes=[1000, 500],
            descriptors=[30, 6],
            failed_posts=2,
            ended={"prefill": {"ok": 4, "lease_lapsed": 1}, "decode": {"peer_gone": 3}},
            blocks=[8, 8],
            runs=[1, 7],
        )
    )
    metrics.observe(TransferStats(nbytes=[500], ended={"prefill": {"ok": 1}}))
    expected = {
        "kvferry:plan_time_seconds_sum": 0.004,
        "vllm:nixl_post_time_seconds_sum": 0.03,
        "vllm:nixl_xfer_time_seconds_sum": pytest.approx(0.3),
        "vllm:nixl_bytes_transferred_sum": 2000,
        "vllm:nixl_bytes_transferred_count": 3,
        "vllm:nixl_num_descriptors_sum": 36,
        "vllm:nixl_num_failed_transfers_total": 2,
        "vllm:nixl_num_kv_expired_reqs_total": 1,
        "kvferry:blocks_per_landing_sum": 16,
        "kvferry:block_runs_sum": 8,
    }
    assert {name: value(registry, name) for name in expected} == expected
    ends = [("prefill", "ok", 5), ("prefill", "lease_lapsed", 1), ("decode", "peer_gone", 3)]
    for side, outcome, number in ends:
        assert value(registry, "kvferry:transfers_total", side=side, outcome=outcome) == number
    assert value(registry, "kvferry:block_runs_bucket", le="1.0") == 1


def test_levels_of_ranks_make_the_engines() -> None:
    """Requests and their blocks are on every rank; posts and bytes are each rank's own."""
    registry = CollectorRegistry()
    metrics = made(registry, engines=2)
    first = Levels(sources=3, landings=2, posts=1, backlog_bytes=100, quarantined_blocks=7)
    second = Levels(sources=4, landings=2, posts=2, backlog_bytes=50, quarantined_blocks=6)
    metrics.observe(TransferStats(levels={"0": first}), 1)
    metrics.observe(TransferStats(levels={"1": second}), 1)
    names = ("open_sources", "open_landings", "posts_in_flight", "stream_backlog_bytes", "quarantined_blocks")
    assert [value(registry, f"kvferry:{name}", 1) for name in names] == [4, 2, 3, 150, 7]
    assert [value(registry, f"kvferry:{name}", 0) for name in names] == [0, 0, 0, 0, 0]
    metrics.observe(TransferStats(levels={"1": Levels()}), 1)
    assert [value(registry, f"kvferry:{name}", 1) for name in names] == [3, 2, 1, 100, 7]


def test_beside_vllms_connector_the_shared_names_are_its() -> None:
    registry = CollectorRegistry()
    Histogram("vllm:nixl_bytes_transferred", "of another connector", LABELS, registry=registry)
    metrics = made(registry)
    metrics.observe(TransferStats(nbytes=[5]))
    assert value(registry, "vllm:nixl_bytes_transferred_sum") is None
    assert value(registry, "kvferry:nixl_bytes_transferred_sum") == 5
    assert value(registry, "vllm:nixl_num_descriptors_sum") == 0
    with pytest.raises(ValueError, match="Duplicated"):
        made(registry)


def documented() -> dict[str, tuple[str, str]]:
    """Name -> (type, labels), from the page's tables."""
    rows = re.findall(r"^\| `([\w:]+)` \| (\w+) \| ([^|]*) \|", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == len({name for name, _, _ in rows}), "a metric has two rows"
    return {name: (kind, ",".join(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


def test_the_page_lists_the_metrics_that_there_are() -> None:
    of_engines = {
        one.name + ("_total" if one.kind == "counter" else ""): (one.kind, ",".join(one.labels)) for one in DEFINITIONS
    }
    of_router, registry = {}, RouterMetrics().registry
    RenderMetrics(registry)  # with `--render`
    for collector in registry._collector_to_names:
        (family,) = collector.describe()
        total = "_total" if family.type == "counter" else ""
        of_router[family.name + total] = (family.type, ",".join(collector._labelnames))  # type: ignore[attr-defined]
    assert documented() == of_engines | of_router
