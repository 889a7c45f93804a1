"""Several prompts, and several choices of one: transfers, one answer (C05, C06)."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web
from scripted import (
    CHAT,
    MODEL,
    Call,
    after,
    begin_stream,
    decode_ok,
    event,
    hang,
    prefill_ok,
    serving,
)

MESSAGES = [{"role": "user", "content": "hello"}]


async def test_c05_n_is_for_decode_and_told_to_prefill_as_fan_out() -> None:
    async with serving() as pair:
        status, _, raw = await pair.post(CHAT, {"model": MODEL, "messages": MESSAGES, "n": 4, "seed": 7})
        assert status == 200 and len(json.loads(raw)["choices"]) == 4
        assert pair.p.calls[0].body["n"] == 1 and pair.p.calls[0].params["fan_out"] == 4
        assert pair.d.calls[0].body["n"] == 4 and pair.d.calls[0].body["seed"] == 7


@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_c06_several_prompts_are_several_transfers(mode: str) -> None:
    async with serving(mode=mode) as pair:
        status, headers, raw = await pair.complete(prompt=["alpha", "beta"], n=2)
        assert status == 200
        reply = json.loads(raw)
        assert [choice["text"] for choice in reply["choices"]] == ['["alpha"]', '["alpha"]', '["beta"]', '["beta"]']
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
        assert reply["usage"] == {
            "prompt_tokens": 6,
            "completion_tokens": 8,
            "total_tokens": 14,
            "prompt_tokens_details": None,
        }
        ids = {call.params["transfer_id"] for call in pair.p.calls}
        assert len(ids) == 2 and ids == {call.params["transfer_id"] for call in pair.d.calls}
        assert set(headers["x-kvferry-transfer-id"].split(",")) == ids
        for p, d in zip(pair.p.calls, pair.d.calls, strict=True):
            same = next(c for c in pair.d.calls if c.params["transfer_id"] == p.params["transfer_id"])
            assert same.body["prompt"] == p.body["prompt"]
            assert d.headers["X-Request-Id"] == pair.p.calls[0].headers["X-Request-Id"]


async def test_c06_one_failed_prompt_fails_the_request() -> None:
    async def script(call: Call) -> web.StreamResponse:
        if call.body["prompt"] == ["beta"]:
            return web.json_response({"error": {"message": "too long", "code": 400}}, status=400)
        return await prefill_ok(call)

    held = asyncio.Event()
    async with serving() as pair:
        pair.p.script, pair.d.script = script, after(held, decode_ok)
        status, _, raw = await pair.complete(prompt=["alpha", "beta"])
        assert (status, json.loads(raw)) == (400, {"error": {"message": "too long", "code": 400}})
        for call in pair.d.calls:
            async with asyncio.timeout(1):
                await call.cancelled.wait()
            await pair.p.side.abandon_of(call.params["transfer_id"])


async def test_c06_several_prompts_in_one_stream() -> None:
    """C06, streamed: one transfer per prompt, choices numbered on, one event with the sums, one end."""
    async with serving() as pair:
        sent = {"prompt": [[1, 2], [3], [4]], "stream": True, "stream_options": {"include_usage": True}}
        status, headers, raw = await pair.complete(**sent)
        assert status == 200 and headers["Content-Type"].startswith("text/event-stream")
        lines = raw.decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""] and lines.count("data: [DONE]") == 1
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
        texts: dict[int, str] = {}
        for event in events[:-1]:
            (choice,) = event["choices"]
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        assert texts == {0: "[[1, 2]]!", 1: "[[3]]!", 2: "[[4]]!"}
        assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 6
        ids = {call.params["transfer_id"] for call in pair.p.calls}
        assert len(ids) == 3 == len(pair.d.calls) and set(headers["x-kvferry-transfer-id"].split(",")) == ids
        status, _, _ = await pair.complete(prompt=[[1, 2]], stream=True)
        assert status == 200 and pair.d.calls[3].body["prompt"] == [[1, 2]]


async def test_c06_a_stream_of_several_prompts_begins_when_none_can_be_refused() -> None:
    """C06, C20: one prompt has its first token, the other is refused: the client gets the status, not half a stream."""
    said = {"error": {"message": "too long", "code": 400}}
    spoke = asyncio.Event()

    async def prefill(call: Call) -> web.StreamResponse:
        if call.body["prompt"] == ["beta"]:
            await spoke.wait()
            return web.json_response(said, status=400)
        return await prefill_ok(call)

    async def decode(call: Call) -> web.StreamResponse:
        if call.body["prompt"] == ["beta"]:
            return await hang(call)
        response = await begin_stream(call)
        await response.write(event("a"))
        spoke.set()
        return await hang(call)

    async with serving() as pair:
        pair.p.script, pair.d.script = prefill, decode
        status, _, raw = await pair.complete(prompt=["alpha", "beta"], stream=True)
        assert (status, json.loads(raw)) == (400, said)
        for call in pair.d.calls:
            async with asyncio.timeout(1):
                await call.cancelled.wait()


async def test_c06_a_prompt_that_breaks_ends_the_stream_of_all() -> None:
    """C06, C22: one error event, no `[DONE]`, and the other prompt's legs are cancelled."""
    never = asyncio.Event()

    async def decode(call: Call) -> web.StreamResponse:
        response = await begin_stream(call)
        await response.write(event(str(call.body["prompt"])))
        if call.body["prompt"] == ["beta"]:
            assert call.request.transport is not None
            call.request.transport.abort()
        await never.wait()
        return response

    async with serving() as pair:
        pair.d.script = decode
        status, _, raw = await pair.complete(prompt=["alpha", "beta"], stream=True)
        last = raw.decode().split("\n\n")[-2]
        assert status == 200 and b"[DONE]" not in raw
        assert json.loads(last.removeprefix("data: "))["error"]["side"] == "decode"
        alpha = next(call for call in pair.d.calls if call.body["prompt"] == ["alpha"])
        async with asyncio.timeout(1):
            await alpha.cancelled.wait()
