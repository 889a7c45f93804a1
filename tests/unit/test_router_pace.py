"""A stream's pace and its tokens, the fast histogram, `traceparent`, what the story files tell: pure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from kvferry.observe.histogram import FastHistogram
from kvferry.router.requests.pace import Pace, tokens_told
from kvferry.router.seen import told as told_module
from kvferry.router.seen.record import Event, Leg
from kvferry.router.seen.told import Told
from kvferry.router.seen.traceparent import TraceParent, parse
from kvferry.router.seen.tracing import periods

BUCKETS = (0.01, 0.1, 1.0)
VALUES = (0.0, 0.01, 0.0100001, 0.5, 1.0, 7.0)


def test_the_fast_histogram_shows_what_the_librarys_does() -> None:
    shown = []
    for fast in (True, False):
        registry = CollectorRegistry()
        if fast:
            series = FastHistogram("vllm:x_seconds", "An x.", ("a", "b"), BUCKETS, registry).labels("1", 'q"')
        else:
            series = Histogram("vllm:x_seconds", "An x.", ("a", "b"), buckets=BUCKETS, registry=registry).labels(
                "1", 'q"'
            )
        for value in VALUES:
            series.observe(value)
        text = generate_latest(registry).decode().splitlines()
        shown.append([line for line in text if "_created" not in line])
    assert shown[0] == shown[1] and len(shown[0]) == 8


def paced(times: list[float], chunks: list[bytes]) -> tuple[Pace, list[float]]:
    registry, clock = CollectorRegistry(), iter(times)
    series = FastHistogram("x", "x", (), BUCKETS, registry).labels()
    gaps: list[float] = []

    class Recording:
        observe = staticmethod(gaps.append)

    del series
    pace = Pace(lambda: Recording(), clock=lambda: next(clock))  # type: ignore[arg-type,return-value]
    pace.begin(chunks[0])
    for chunk in chunks[1:]:
        pace.mark(chunk)
    return pace, gaps


def test_chunks_of_one_read_come_at_one_time() -> None:
    pace, gaps = paced([10.0], [b"data: a\n\n"])
    pace._clock = iter([12.0]).__next__
    pace.mark(b"data: b\n\n", b"data: c\n\n", b"data: [DONE]\n\n")
    assert gaps == [2.0, 0.0] and pace.chunks == 3


def test_gaps_between_chunks() -> None:
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":5,"total_tokens":8,"completion_tokens":3}}\n\n'
    pace, gaps = paced([10.0, 10.5, 12.0, 12.0], [b"data: a\n\n", b"data: b\n\n", usage, b"data: [DONE]\n\n"])
    assert gaps == [0.5, 1.5] and pace.tokens() == (5, 3), "the end mark is no token, and reads no clock"
    assert pace.per_token(3) == 1.0 and pace.per_token(None) == 1.0 and pace.per_token(1) is None


def test_a_stream_of_one_chunk_has_no_pace() -> None:
    pace, gaps = paced([1.0], [b"data: a\n\ndata: [DONE]\n\n"])
    assert gaps == [] and pace.per_token(5) is None and pace.tokens() == (None, None)


@pytest.mark.parametrize(
    ("tail", "tokens"),
    [
        (b'{"usage": {"prompt_tokens": 5, "completion_tokens": 3}}', (5, 3)),
        (b'{"usage":{"input_tokens":5,"output_tokens":3}}', (5, 3)),
        (
            b'{"usage":{"prompt_tokens":1,"completion_tokens":1}}..{"usage":{"prompt_tokens":1,"completion_tokens":2}}',
            (1, 2),
        ),
        (json.dumps({"text": '"usage":{"prompt_tokens":9,"completion_tokens":9}'}).encode(), (None, None)),
        (b'{"usage":null}', (None, None)),
        (b'{"usage":{"prompt_tokens":5', (5, None)),
        (b'{"usage":{"prompt_tokens":5}' + b" " * 9000, (None, None)),
        (b"", (None, None)),
    ],
)
def test_tokens_told(tail: bytes, tokens: tuple[int | None, int | None]) -> None:
    assert tokens_told(tail) == tokens


# -- traceparent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_traceparent_is_read_and_written() -> None:
    text = f"00-{TRACE}-{SPAN}-01"
    parent = parse(text)
    assert parent == TraceParent(int(TRACE, 16), int(SPAN, 16), True) and str(parent) == text
    assert str(parse(f"00-{TRACE}-{SPAN}-00")) == f"00-{TRACE}-{SPAN}-00"
    assert str(parse(f"cc-{TRACE}-{SPAN}-03-what-comes")) == text, "a later version is read as far as it is known"


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "00",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-1",
    ],
)
def test_traceparent_that_is_none(text: str | None) -> None:
    assert parse(text) is None


def test_periods_with_and_without_the_engines_word() -> None:
    names = ("received", "dispatched", "prefill_done", "first_token", "last_token")
    leg = Leg(transfer_id="t", prefill="p", decode="d", events=[Event(n, "router", t) for t, n in enumerate(names)])
    assert periods(leg, []) == [
        ("prefill", 1.0, 2.0, "router"),
        ("transfer", 2.0, 3.0, "router"),
        ("decode", 3.0, 4.0, "router"),
    ]
    engines = [Event("registered", "decode", 1.5), Event("matched", "prefill", 2.1), Event("landed", "decode", 2.6)]
    assert periods(leg, engines)[1:3] == [("register", 1.0, 1.5, "decode"), ("transfer", 2.1, 2.6, "decode")]
    assert periods(Leg(transfer_id="t", events=[]), []) == []


# -- what the story files tell


def line(transfer_id: str, event: str, t: float, **facts: object) -> str:
    return (
        json.dumps({"t": t, "transfer_id": transfer_id, "side": "prefill", "rank": 0, "event": event, **facts}) + "\n"
    )


def test_story_files_are_read_as_they_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told_module, "MOST_TRANSFERS", 2)
    (tmp_path / "prefill-1.jsonl").write_text(line("old", "posted", 1, nbytes=5))
    told = Told(tmp_path)
    (tmp_path / "router-1.jsonl").write_text(line("a", "received", 1))
    whole = line("a", "posted", 2, nbytes=7) + line("a", "posted", 3, nbytes=8)
    cut = line("a", "landed", 4.5)
    with (tmp_path / "prefill-1.jsonl").open("a") as file:
        file.write(whole + cut[:20])
    told.read()
    assert told.events("old") == [], "what was there before the router is not read"
    assert told.events("a") == [Event("posted", "prefill", 2.0), Event("posted", "prefill", 3.0)]
    assert list(told.ended()) == []
    with (tmp_path / "prefill-1.jsonl").open("a") as file:
        file.write(cut[20:])
    (tmp_path / "decode-2.jsonl").write_text(line("a", "landed", 4.75))
    told.read()
    assert list(told.ended()) == [(15, 2.75)] and told.moved("a") == 15
    told.read()
    assert list(told.ended()) == []
    with (tmp_path / "decode-2.jsonl").open("a") as file:
        file.write('{"t": 1, "torn\n[]\n' + line("b", "landed", 5) + line("c", "landed", 5))
    told.read()
    assert told.events("a") == [] and told.events("c") != [], "only so many transfers are kept"


def test_a_story_file_that_is_swept_away_or_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "prefill-1.jsonl"
    path.write_text(line("a", "posted", 1, nbytes=5) * 3)
    told = Told(tmp_path)
    path.write_text(line("b", "posted", 2, nbytes=6))
    told.read()
    assert told.moved("b") == 6 and told.events("a") == []
    path.unlink()
    told.read()
    assert told.moved("b") == 6
