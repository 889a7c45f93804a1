"""Transport-real engines export what their transfers did: the numbers of the story, to the byte."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from sim_tier import Ask, ask_all, asks, right, simulated

from kvferry.bench.witness import engine_metrics
from kvferry.launch.deployment import Deployment
from kvferry.story import read_lines

NO_CACHE = ("--no-enable-prefix-caching",)
POSTS = {
    "push": "prefill-0",
    "stream": "prefill-0",
    "pull": "decode-0",
    "pull, written": "prefill-0",
    "pull-inline": "decode-0",
}
CONFIG = {"stream": {"stream_chunk_bytes": 1}, "pull": {"pull_by": "read"}, "pull, written": {"pull_by": "write"}}


def of(deployment: Deployment, name: str) -> dict[str, float]:
    """Sample -> value; of samples with labels of their own, name{label,...}."""
    found = {}
    for sample, labels, value in engine_metrics(deployment.engine(name).url):
        own = [labels[key] for key in ("side", "outcome", "by") if key in labels]
        found[sample + (f"{{{','.join(own)}}}" if own else "")] = value
    return found


def settled(deployment: Deployment, name: str, expected: Mapping[str, float]) -> dict[str, float]:
    """They follow the engine's last step by moments: at most 5 s."""
    until = time.monotonic() + 5.0
    while (found := {key: value for key, value in of(deployment, name).items() if key in expected}) != expected:
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    return found


def told(folder: Path, event: str) -> list[dict[str, float]]:
    return [line for line in read_lines(folder / "state" / "story") if line["event"] == event]


@pytest.mark.parametrize("mode", POSTS)
def test_counters_move_by_what_the_story_tells(mode: str, tmp_path: Path) -> None:
    asked = asks(60, seed=2)
    config = {"extra_config": CONFIG[mode]} if mode in CONFIG else {}
    with simulated(tmp_path, mode.split(",")[0], vllm_args=NO_CACHE, warm_up=False, **config) as deployment:
        got = asyncio.run(ask_all(deployment.router_url, deployment.model_name(), asked, at_once=8))
        assert [one.tokens for one in got] == [right(ask) for ask in asked]
        posts, allocated = told(tmp_path, "posted"), told(tmp_path, "allocated")
        moved = {
            "vllm:nixl_bytes_transferred_sum": sum(post["nbytes"] for post in posts),
            "vllm:nixl_bytes_transferred_count": len(posts),
            "vllm:nixl_num_descriptors_sum": sum(post["descriptors"] for post in posts),
            "vllm:nixl_xfer_time_seconds_count": len(posts),
            "vllm:nixl_post_time_seconds_count": len(posts),
            "kvferry:plan_time_seconds_count": len(posts),
        }
        assert moved["vllm:nixl_bytes_transferred_sum"] > 0
        nothing = {name: 0.0 for name in moved}
        of_p = {
            "kvferry:transfers_total{prefill,ok}": 60.0,
            "kvferry:open_sources": 0.0,
            "kvferry:posts_in_flight": 0.0,
            "kvferry:stream_backlog_bytes": 0.0,
        }
        of_d = {
            "kvferry:transfers_total{decode,ok}": 60.0,
            "kvferry:open_landings": 0.0,
            "kvferry:blocks_per_landing_count": sum(line["blocks"] > 0 for line in allocated),
            "kvferry:blocks_per_landing_sum": sum(line["blocks"] for line in allocated),
            "kvferry:block_runs_sum": sum(line["runs"] for line in allocated),
        }
        if mode.startswith("pull"):
            by = "read" if POSTS[mode] == "decode-0" else "write"
            of_p[f"kvferry:pulls_total{{{by}}}"] = float(len(posts))
        of_p |= moved if POSTS[mode] == "prefill-0" else nothing
        of_d |= moved if POSTS[mode] == "decode-0" else nothing
        assert settled(deployment, "prefill-0", of_p) == of_p
        assert settled(deployment, "decode-0", of_d) == of_d
        seconds = of(deployment, POSTS[mode])
    for metric, fact in (("vllm:nixl_post_time_seconds_sum", "post_ms"), ("kvferry:plan_time_seconds_sum", "plan_ms")):
        assert seconds[metric] == pytest.approx(sum(post[fact] for post in posts) / 1e3, abs=1e-6 * len(posts))


def test_ranks_are_one_engine(tmp_path: Path) -> None:
    asked = asks(10, seed=5)
    tp = {"prefill_args": ("--tp=2",), "decode_args": ("--tp=4",)}
    with simulated(tmp_path, "push", vllm_args=NO_CACHE, warm_up=False, **tp) as deployment:
        got = asyncio.run(ask_all(deployment.router_url, deployment.model_name(), asked, at_once=4))
        assert [one.tokens for one in got] == [right(ask) for ask in asked]
        posts, allocated = told(tmp_path, "posted"), told(tmp_path, "allocated")
        ranks = Counter(line["rank"] for line in posts)
        assert ranks.keys() == {0, 1}
        of_p = {
            "vllm:nixl_bytes_transferred_sum": sum(post["nbytes"] for post in posts),
            "kvferry:transfers_total{prefill,ok}": 20.0,
        }
        of_d = {
            "kvferry:transfers_total{decode,ok}": 40.0,
            "kvferry:blocks_per_landing_sum": sum(line["blocks"] for line in allocated if line["rank"] == 0),
        }
        assert settled(deployment, "prefill-0", of_p) == of_p
        assert settled(deployment, "decode-0", of_d) == of_d


@pytest.mark.parametrize(("fragmentation", "least", "most"), [(0.0, 1, 1), (1.0, 55, 63)])
def test_a_worn_pool_shows_in_the_runs(fragmentation: float, least: int, most: int, tmp_path: Path) -> None:
    """One prompt of 63 blocks: in a fresh pool one run; in one that is worn out nearly as many runs as blocks."""
    args = (f"--fragmentation={fragmentation}", "--block-size=16", *NO_CACHE)
    ask = Ask(range(256, 256 + 63 * 16), 2)
    with simulated(tmp_path, "push", vllm_args=args, warm_up=False) as deployment:
        [got] = asyncio.run(ask_all(deployment.router_url, deployment.model_name(), [ask]))
        assert got.tokens == right(ask)
        expected = {"kvferry:blocks_per_landing_sum": 63.0, "kvferry:block_runs_count": 1.0}
        assert settled(deployment, "decode-0", expected) == expected
        assert least <= of(deployment, "decode-0")["kvferry:block_runs_sum"] <= most


def test_without_a_connector_there_is_nothing_to_tell(tmp_path: Path) -> None:
    with simulated(tmp_path, "colocated", warm_up=False) as deployment:
        [engine] = deployment.engines
        names = [name for name, _, _ in engine_metrics(engine.url)]
    assert names and not [name for name in names if name.startswith(("kvferry:", "vllm:nixl"))]
