"""Edits of a stream in passing: the same bytes wherever it is cut, only the events that are meant, C62."""

from __future__ import annotations

import functools
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.router.dispatch.fanin import Closing, Part
from kvferry.router.http.sse import Watcher
from kvferry.router.requests import usage
from kvferry.router.requests.edits import Edit, Edits


def event(**facts: Any) -> bytes:
    return b"data: " + json.dumps(facts, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def counts(cached: int | None) -> dict[str, Any]:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11, **details}


SAYS_IT = event(choices=[{"index": 0, "text": 'it says "cached_tokens" 🚢'}])
NAMES_IT = event(
    choices=[{"index": 0, "logprobs": {"tokens": ["cached_tokens"], "top_logprobs": [{"cached_tokens": 0}]}}]
)
LAST = event(choices=[], usage=counts(8))
STREAM = b": ping\n\n" + event(choices=[{"index": 0, "text": "ü"}]) + SAYS_IT + NAMES_IT + LAST + b"data: [DONE]\n\n"
PREFILL = {"usage": counts(5) | {"prompt_tokens_details": {"cached_tokens": 5, "multimodal_tokens": None}}}


async def through(pieces: list[bytes], edits: Edits) -> bytes:
    out = b""
    for piece in pieces:
        out += piece if edits.plain(piece) else await edits.take(piece)
    return out + edits.rest()


def with_counts(hold: bool = True) -> Edits:
    async def prepare() -> Edit | None:
        return functools.partial(usage.correct, prefill=PREFILL, streamed=True)

    return Edits(usage.MARKER, prepare, hold=hold)


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
async def test_c62_prefills_count_wherever_the_stream_is_cut(cuts: list[int]) -> None:
    """C62: and every other byte is D's."""
    at = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[start:end] for start, end in itertools.pairwise(at) if start < end]
    assert await through(pieces, with_counts()) == STREAM.replace(LAST, event(choices=[], usage=counts(5)))


async def test_where_prefill_says_nothing_the_details_go() -> None:
    async def prepare() -> Edit | None:
        return functools.partial(usage.correct, prefill={"usage": counts(None)}, streamed=True)

    edits = Edits(usage.MARKER, prepare, hold=True)
    assert await through([STREAM], edits) == STREAM.replace(LAST, event(choices=[], usage=counts(None)))


async def test_without_a_reply_of_prefill_nothing_changes() -> None:
    async def prepare() -> Edit | None:
        return None

    assert await through([STREAM], Edits(usage.MARKER, prepare, hold=True)) == STREAM


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
async def test_other_line_ends(end: bytes) -> None:
    sent, want = STREAM.replace(b"\n\n", end), event(choices=[], usage=counts(5))
    assert await through([sent], with_counts()) == sent.replace(LAST[:-2], want[:-2])


async def test_a_stream_that_asks_for_no_counts_holds_nothing() -> None:
    edits = with_counts(hold=False)
    for at in range(1, len(SAYS_IT)):
        piece = SAYS_IT[:at]
        assert (piece if edits.plain(piece) else await edits.take(piece)) == piece


async def test_comments_are_not_held() -> None:
    edits = with_counts()
    assert not edits.plain(b": ping\n") and await edits.take(b": ping\n") == b": ping\n"


async def test_an_event_that_never_ends_is_not_lost() -> None:
    assert await through([STREAM, b'data: {"choi'], with_counts()) == (
        STREAM.replace(LAST, event(choices=[], usage=counts(5))) + b'data: {"choi'
    )


def test_responses_have_their_own_names() -> None:
    details = {"cached_tokens": 9, "cache_write_tokens": 1, "input_tokens_per_turn": []}
    body = {"response": {"usage": {"input_tokens": 9, "input_tokens_details": dict(details)}}}
    ours = {
        "usage": {"input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 5, "input_tokens_per_turn": []}}
    }
    assert usage.correct(body, ours, streamed=True)
    assert body["response"]["usage"]["input_tokens_details"] == ours["usage"]["input_tokens_details"]
    assert not usage.correct(body, ours, streamed=True)
    several = {"usage": {"input_tokens_details": details | {"input_tokens_per_turn": [9, 20]}}}
    assert not usage.correct(several, ours), "after its first turn D's cache is its own"


def test_c06_parts_are_numbered_on_and_counted_together() -> None:
    """C06."""
    closing = Closing()
    first, second = Part(0, 2, closing), Part(1, 2, closing)
    one = {"created": 7, "choices": [{"index": 1}]}
    assert first.event(one) is False and one == {"created": 7, "choices": [{"index": 1}]}
    other = {"created": 8, "choices": [{"index": 1}]}
    assert second.event(other) is True and other == {"created": 7, "choices": [{"index": 3}]}
    assert closing.event() == b""
    for part in (first, second):
        assert part.event({"id": "x", "created": 9, "choices": [], "usage": counts(3)}) is None
    said = json.loads(closing.event().removeprefix(b"data: "))
    assert said["usage"] == {
        "prompt_tokens": 18,
        "completion_tokens": 4,
        "total_tokens": 22,
        "prompt_tokens_details": {"cached_tokens": 6},
    }
    assert (said["created"], said["choices"]) == (7, [])
    assert first.event({"error": {"message": "x"}}) is False


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_the_opening_of_responses_is_no_token(size: int) -> None:
    """An engine says `response.created` before it has its KV; what follows has a token in it."""
    opening = b"event: response.created\ndata: {}\n\nevent: response.in_progress\ndata: {}\n\n"
    token = b'event: response.output_item.added\ndata: {"a":1}\n\n'
    watcher = Watcher()
    for at in range(0, len(opening), size):
        assert not watcher.feed(opening[at : at + size])
    assert watcher.first_data is None
    assert any([watcher.feed(token[at : at + size]) for at in range(0, len(token), size)])
    assert watcher.first_data == b'{"a":1}'
