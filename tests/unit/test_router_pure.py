"""Specs (C65), policies, the stream watcher: pure."""

from __future__ import annotations

import asyncio
import logging

import pytest

from kvferry.errors import ConfigError
from kvferry.router.choice.ask import Ask
from kvferry.router.choice.policy import Snapshot, choose, eligible, known_models
from kvferry.router.config import RouterConfig
from kvferry.router.engines.pool import Pool, _defaulted
from kvferry.router.http.sse import Watcher
from kvferry.router.http.upstream import Upstream
from kvferry.router.spec import EngineSpec, parse_spec

# -- specs


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("http://h:8100", EngineSpec(url="http://h:8100", side_host="h", side_port=5600)),
        ("h:8100", EngineSpec(url="http://h:8100", side_host="h", side_port=5600)),
        ("https://h:1/base/", EngineSpec(url="https://h:1/base", side_host="h", side_port=5600)),
        (
            "http://h:8100, side_channel=k:7, engine_id=E, tp=2",
            EngineSpec(url="http://h:8100", side_host="k", side_port=7, engine_id="E", tp=2),
        ),
        (
            "h:8100,dp=2,topology=rack-7,kv_events=[::1]:5557",
            EngineSpec(
                url="http://h:8100",
                side_host="h",
                side_port=5600,
                dp=2,
                topology="rack-7",
                events_host="::1",
                events_port=5557,
            ),
        ),
        ("http://[::1]:8100", EngineSpec(url="http://[::1]:8100", side_host="::1", side_port=5600)),
        ("[::1]:8100", EngineSpec(url="http://[::1]:8100", side_host="::1", side_port=5600)),
        (
            "http://[::1]:8100,side_channel=[fe80::1]:9",
            EngineSpec(url="http://[::1]:8100", side_host="fe80::1", side_port=9),
        ),
    ],
)
def test_c65_spec(text: str, spec: EngineSpec) -> None:
    assert parse_spec(text) == spec


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("::1:8100", "http://[::1]:8100"),
        ("http://::1:8100", "http://[::1]:8100"),
        ("http://h:1,side_channel=::1:5600", "[::1]:5600"),
        ("http://h:1,side_channel=h", "HOST:PORT"),
        ("http://h:1,side_channel=h:99999", "65535"),
        ("http://h:1,side_chanel=h:1", "did you mean 'side_channel'"),
        ("http://h:1,tp=two", "tp"),
        ("http://h:1,tp=0", "tp"),
        ("http://h:1,dp=0", "dp"),
        ("http://h:1,kv_events=tcp://*:5557", "kv_events"),
        ("http://h:1,topologie=r1", "did you mean 'topology'"),
        ("http://h:1,tp=1,tp=2", "twice"),
        ("http://h:1,engine_id=", "needs a value"),
        ("ftp://h:1", "http://"),
        ("http://", "URL"),
        ("", "URL"),
        ("http://h:port", "h:port"),
        ("http://u:p@h:1", "--api-key"),
    ],
)
def test_c65_a_wrong_spec_is_told_the_right_spelling(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_spec(text)
    assert said in str(caught.value)


# -- policies


def engine(name: str, ready: bool = True, models: frozenset[str] | None = None) -> Snapshot:
    return Snapshot(url=name, ready=ready, models=models)


def test_round_robin_counts_over_those_that_can() -> None:
    engines = [engine("a"), engine("b", ready=False), engine("c")]
    chosen = [choose("round_robin", engines, Ask(), turn) for turn in range(4)]
    assert [one.url for one in chosen if one] == ["a", "c", "a", "c"]


def test_no_engine() -> None:
    assert choose("round_robin", [], Ask(), 3) is None
    assert choose("round_robin", [engine("a", ready=False)], Ask(), 0) is None


def test_only_those_that_serve_the_model() -> None:
    engines = [engine("a", models=frozenset({"x"})), engine("b", models=frozenset({"y"})), engine("c")]
    assert [one.url for one in eligible(engines, Ask(model="y"))] == ["b", "c"]
    assert [one.url for one in eligible(engines, Ask())] == ["a", "b", "c"]


def test_known_models() -> None:
    x, y = (True, frozenset({"x"})), (True, frozenset({"y"}))
    assert known_models([x, y]) == {"x", "y"}
    assert known_models([x, (False, frozenset({"z"}))]) == {"x"}
    assert known_models([x, (True, None)]) is None
    assert known_models([]) == frozenset()


# -- the stream watcher

STREAM = b': ping\n\ndata: {"choices": [{"text": "a"}]}\n\ndata: {"choices": []}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("size", [1, 2, 3, 7, 11, len(STREAM)])
@pytest.mark.parametrize("raw", [STREAM, STREAM.replace(b"\n", b"\r\n")])
def test_the_first_data_in_any_cut(size: int, raw: bytes) -> None:
    watcher, found = Watcher(), []
    for at in range(0, len(raw), size):
        if watcher.feed(raw[at : at + size]):
            found.append(watcher.first_data)
    assert found == [b'{"choices": [{"text": "a"}]}']
    assert watcher.done and watcher.between_events and not watcher.first_is_error


def test_comments_are_no_data() -> None:
    watcher = Watcher()
    assert not watcher.feed(b": ping\n\n: data: x\n\n") and watcher.first_data is None


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b'{"error": {"message": "m", "code": 500}}', True),
        (b'{"choices": [], "error": null}', False),
        (b'{"choices": [{"text": "error"}]}', False),
        (b"[DONE]", False),
        (b'{"error', False),
    ],
)
def test_an_error_as_first_event(line: bytes, error: bool) -> None:
    watcher = Watcher()
    watcher.feed(b"data: " + line + b"\n\n")
    assert watcher.first_is_error is error


def test_the_middle_of_an_event() -> None:
    watcher = Watcher()
    watcher.feed(b'data: 1\n\ndata: {"a')
    assert not watcher.between_events and not watcher.done


# -- what the pool says of engines


def test_a_defaulted_side_channel_is_named() -> None:
    assert _defaulted(parse_spec("http://[::1]:8100")) == (
        "asked its side channel at [::1]:5600, the default: side_channel=HOST:PORT sets it"
    )
    assert _defaulted(parse_spec("http://h:8100,side_channel=h:5601")) == ""


def test_a_lost_engine_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def lose() -> None:
        pool = Pool(RouterConfig(decode=(parse_spec("http://h:1"),), connector="none"), None, Upstream(1.0))
        pool.suspect(pool.all()[0], "connection refused")

    with caplog.at_level(logging.INFO, "kvferry.router"):
        asyncio.run(lose())
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "decode engine http://h:1 not reachable; asked again every 0.25 s: connection refused")
    ]
