from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from kvferry.bench import witness
from kvferry.bench.witness import Count, Engines, Stories
from kvferry.story import Story

METRICS = {
    "http://p": [("vllm:prompt_tokens_by_source_total", {"source": "local_compute"}, 50.0)],
    "http://d": [
        ("vllm:prompt_tokens_by_source_total", {"source": "external_kv_transfer"}, 49.0),
        ("vllm:prompt_tokens_by_source_total", {"source": "local_compute"}, 1.0),
        ("vllm:nixl_bytes_transferred_sum", {"engine": "0"}, 640.0),
        ("kvferry_engine_late_seconds_total", {}, 0.5),
        ("vllm:cache_config_info", {"block_size": "128"}, 1.0),
    ],
}


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witness, "engine_metrics", lambda url: METRICS.get(url, []))
    monkeypatch.setattr(witness, "SETTLE_S", 0.0)


@pytest.mark.usefixtures("metrics")
def test_counts_since_a_moment() -> None:
    engines = Engines({"http://p": "prefill", "http://d": "decode"})
    assert engines.block_size() == 128
    told = engines.since({"http://d": Count({"external_kv_transfer": 40.0}, 600.0, 0.1)}, 50)
    assert told.by_role == {
        "prefill": {"local_compute": 50.0},
        "decode": {"external_kv_transfer": 9.0, "local_compute": 1.0},
    }
    assert told.nixl_bytes == 40.0
    assert told.late_s == {"decode http://d": pytest.approx(0.4)}
    assert told.cache_hits == 0
    assert told.tokens("decode", "local_cache_hit") == 0.0


@pytest.mark.usefixtures("metrics")
def test_an_engine_that_tells_nothing() -> None:
    told = Engines({"http://gone": "decode"}).since({}, 50)
    assert told.tokens("decode", "local_compute") is None
    assert (told.nixl_bytes, told.late_s, told.cache_hits) == (None, {}, 0)


def test_it_waits_for_bytes_that_are_told_late(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter([100.0, 400.0, 740.0])
    monkeypatch.setattr(witness, "engine_metrics", lambda url: [("vllm:nixl_bytes_transferred_sum", {}, next(told))])
    monkeypatch.setattr(witness.time, "sleep", lambda seconds: None)
    engines = Engines({"http://p": "prefill"})
    assert engines.since(engines.now(), 50, 640).nixl_bytes == 640.0


def test_metrics_of_a_server_that_does_not_answer() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        assert witness.engine_metrics(f"http://127.0.0.1:{taken.getsockname()[1]}") == []


def test_blocks_of_two_sizes_have_no_size(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"http://a": "16", "http://b": "32", "http://p": "64"}
    monkeypatch.setattr(
        witness, "engine_metrics", lambda url: [("vllm:cache_config_info", {"block_size": sizes[url]}, 1.0)]
    )
    assert Engines({"http://a": "decode", "http://p": "prefill"}).block_size() == 16
    assert Engines({"http://a": "decode", "http://b": "decode"}).block_size() is None


def test_hooks_add_up_by_side(tmp_path: Path) -> None:
    for side, ms in (("prefill", 0.25), ("prefill", 0.5), ("decode", 0.125)):
        story = Story(tmp_path, side)
        story.note("t", "hooks", part="worker", ms=ms)
        story.close()
    stories = Stories([tmp_path])
    stories.update()
    assert stories.transfers["t"].hooks_ms == {"prefill": 0.75, "decode": 0.125}
    assert not stories.told, "time of hooks does not say what moved"


def test_stories_are_read_as_they_grow(tmp_path: Path) -> None:
    stories = Stories([tmp_path])
    stories.update()
    assert not stories.told
    router, prefill = Story(tmp_path, "router"), Story(tmp_path, "prefill")
    router.note("t", "received", t=1.0, request_id="r")
    prefill.note("t", "computed", t=2.0)
    stories.update()
    assert stories.requests == {"r": "t"}
    assert not stories.told, "a router's story alone does not say what moved"
    prefill.note("t", "posted", t=2.1, nbytes=600, descriptors=2)
    prefill.note("t", "posted", t=2.2, nbytes=400, descriptors=3)
    path = next(tmp_path.glob("prefill-*"))
    half = json.dumps({"t": 2.5, "transfer_id": "t", "side": "decode", "rank": 0, "event": "landed"})
    path.write_text(path.read_text() + half[:20])
    stories.update()
    transfer = stories.transfers["t"]
    assert (transfer.moved_bytes, transfer.descriptors, transfer.posts, transfer.exposed_ms) == (1000, 5, 2, None)
    path.write_text(path.read_text() + half[20:] + "\n")
    stories.update()
    assert transfer.exposed_ms == pytest.approx(500.0)
    assert transfer.moved_bytes == 1000, "no line counts twice"
    for story in (router, prefill):
        story.close()


def test_the_last_rank_counts(tmp_path: Path) -> None:
    story = Story(tmp_path, "prefill")
    for t in (2.0, 2.3, 2.1):
        story.note("t", "computed", t=t)
    story.note("t", "landed", t=2.6)
    story.note("t", "landed", t=2.5)
    story.close()
    stories = Stories([tmp_path])
    stories.update()
    assert stories.transfers["t"].exposed_ms == pytest.approx(300.0)
