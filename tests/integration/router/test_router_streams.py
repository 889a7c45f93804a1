"""What the client's connection sees: rows C14 to C19, and the second half of C22."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import itertools
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web
from scripted import (
    COMPLETIONS,
    DONE,
    MODEL,
    SOON,
    Call,
    Engine,
    after,
    begin_stream,
    decode_ok,
    error_of,
    event,
    prefill_ok,
    prefilled,
    serving,
    stream,
    usage,
)

STREAMED = {"model": MODEL, "prompt": "hi", "stream": True}


def pieces(*parts: bytes) -> Callable[[Call], Awaitable[web.StreamResponse]]:
    async def script(call: Call) -> web.StreamResponse:
        return await stream(call, list(parts))

    return script


def fed(queue: asyncio.Queue[bytes]) -> Callable[[Call], Awaitable[web.StreamResponse]]:
    """D writes what the test puts; b"" ends it."""

    async def script(call: Call) -> web.StreamResponse:
        response = await begin_stream(call)
        while piece := await queue.get():
            await response.write(piece)
        await response.write_eof()
        return response

    return script


async def test_c14_the_shape_of_both_replies() -> None:
    async with serving() as pair:
        reader, writer = await pair.raw(STREAMED)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert head.startswith(b"http/1.1 200")
        assert b"content-type: text/event-stream" in head and b"transfer-encoding: chunked" in head
        assert b"content-length" not in head
        body = await reader.readuntil(b"0\r\n\r\n")
        assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        payload = json.dumps(STREAMED | {"stream": False}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(payload) + payload)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()  # the same connection is still good
        assert b"content-type: application/json" in head and b"transfer-encoding" not in head
        length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        assert json.loads(await reader.readexactly(length))["choices"]
        writer.close()


async def test_c14_upstream_stays_open_until_its_last_byte_is_relayed() -> None:
    queue: asyncio.Queue[bytes] = asyncio.Queue()
    async with serving() as pair:
        pair.d.script = fed(queue)
        reader, writer = await pair.raw(STREAMED)
        queue.put_nowait(event("a"))
        await reader.readuntil(b"\n\n\r\n")
        call = await pair.d.call()
        assert not call.cancelled.is_set()
        queue.put_nowait(DONE)
        queue.put_nowait(b"")
        await reader.readuntil(b"0\r\n\r\n")
        await call.ended.wait()
        assert not call.cancelled.is_set() and pair.p.side.abandoned == {}
        writer.close()


async def test_c15_nothing_waits() -> None:
    queue: asyncio.Queue[bytes] = asyncio.Queue()
    async with serving() as pair:
        pair.d.script = fed(queue)
        reader, writer = await pair.raw(STREAMED)
        await (await pair.p.call()).ended.wait()
        sent = [b": ping\n\n", b": ping\n\n", *[event(str(n)) for n in range(5)], b"data: {", b'"half": 1}\n\n', DONE]
        for number, piece in enumerate(sent):
            begun = time.monotonic()
            queue.put_nowait(piece)
            if number == 0:
                await reader.readuntil(b"\r\n\r\n")
            got = await reader.readuntil(piece + b"\r\n")
            assert got.endswith(piece + b"\r\n")
            assert time.monotonic() - begun < 0.1
        queue.put_nowait(b"")
        await reader.readuntil(b"0\r\n\r\n")
        writer.close()


async def test_c15_comments_before_prefills_answer_are_held_and_do_not_hide_its_error() -> None:
    queue: asyncio.Queue[bytes] = asyncio.Queue()
    gate = asyncio.Event()

    async def fails(call: Call) -> web.StreamResponse:
        return web.json_response({"error": {"message": "boom", "code": 500}}, status=500)

    async with serving() as pair:
        pair.d.script, pair.p.script = fed(queue), after(gate, fails)
        queue.put_nowait(b": ping\n\n")
        task = asyncio.create_task(pair.complete(stream=True))
        await pair.d.call()
        gate.set()
        status, headers, raw = await task
        assert status == 500 and json.loads(raw)["error"]["message"] == "boom"
        assert headers["Content-Type"].startswith("application/json")


async def test_c15_a_comment_that_came_before_prefills_answer_goes_out_with_it() -> None:
    queue: asyncio.Queue[bytes] = asyncio.Queue()
    gate = asyncio.Event()
    async with serving() as pair:
        pair.d.script, pair.p.script = fed(queue), after(gate, prefill_ok)
        queue.put_nowait(b": ping\n\n")
        reader, writer = await pair.raw(STREAMED)
        await pair.d.call()
        gate.set()
        async with asyncio.timeout(SOON):
            await reader.readuntil(b": ping\n\n")
            queue.put_nowait(event("a"))
            await reader.readuntil(event("a"))
            queue.put_nowait(DONE)
            queue.put_nowait(b"")
            await reader.readuntil(b"0\r\n\r\n")
        writer.close()


async def test_a_token_does_not_wait_for_a_lagging_prefill_front_end() -> None:
    gate = asyncio.Event()
    async with serving() as pair:
        pair.p.script = after(gate, prefill_ok)
        status, _, raw = await pair.complete(stream=True)
        assert status == 200 and raw.endswith(DONE)
        assert not gate.is_set()
        gate.set()


async def test_c16_bytes_arrive_as_they_were_sent() -> None:
    text = bytearray(b'data: {"choices":[{"text":"' + b"a" * (200_000 - 40) + b'"}]}\n\n')
    cuts = []
    for offset in (1024, 4096, 8192, 65536):
        text[offset - 1 : offset + 2] = "€".encode()
        cuts += [offset, offset + 1]
    line = bytes(text)
    edges = [0, *cuts, len(line)]
    parts = [line[a:b] for a, b in itertools.pairwise(edges)]
    assert b"".join(parts) == line and "€" in line.decode()
    async with serving() as pair:
        pair.d.script = pieces(*parts, DONE)
        status, _, raw = await pair.complete(stream=True)
        assert status == 200
        assert hashlib.sha256(raw).hexdigest() == hashlib.sha256(line + DONE).hexdigest()


async def test_c17_events_are_not_merged_or_reordered() -> None:
    call = b'data: {"choices":[{"delta":{"tool_calls":[{"function":{"arguments":"' + b"x" * 3900 + b'"}}]}}]}\n\n'
    sent = [b": comment\n\n", event("a") + event("b"), b"\n", b"event: x\r\ndata: 1\r\n\r\n", call, b": c\n", DONE]
    async with serving() as pair:
        pair.d.script = pieces(*sent)
        _, _, raw = await pair.complete(stream=True)
        assert raw == b"".join(sent)


async def test_c18_an_engine_that_closes_idle_connections() -> None:
    decode = Engine("decode")
    await decode.start(keepalive_timeout=0.2)
    async with serving(decode=[decode]) as pair:
        assert (await pair.complete())[0] == 200
        transport = pair.d.calls[0].request.transport
        assert transport is not None
        async with asyncio.timeout(SOON):
            while not transport.is_closing():
                await pair.running.pool.change()  # probes go on; no other clock is needed
        assert (await pair.complete())[0] == 200
        assert len(pair.d.calls) == 2


@contextlib.asynccontextmanager
async def racing_engine(partial: bytes) -> AsyncIterator[tuple[int, list[str]]]:
    """Serves one request per connection; answers a second one there with `partial` and an end."""
    seen: list[str] = []
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        posts = 0
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                if head.startswith("GET"):
                    writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n{"data": []}')
                    continue
                length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
                await reader.readexactly(length)
                posts += 1
                seen.append("first" if posts == 1 else "again")
                if posts > 1:
                    writer.write(partial)
                    await writer.drain()
                    writer.close()
                    return
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], seen
    finally:
        server.close()
        for writer in writers:
            writer.close()
        await server.wait_closed()


@pytest.mark.parametrize(
    ("partial", "status", "seen"),
    [
        (b"", 200, ["first", "again", "first"]),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", 502, ["first", "again"]),
    ],
)
async def test_c18_one_silent_second_try_only_before_any_byte(partial: bytes, status: int, seen: list[str]) -> None:
    async with racing_engine(partial) as (port, posts):
        engine = Engine("decode")
        engine.port = port  # taken for started; its own front end never runs
        engine.models = []
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(engine.side.stop)
            await engine.side.start()
            engine.stop = engine.side.stop  # type: ignore[method-assign]
            async with serving(decode=[engine], mode="colocated", prefill=[], probe_interval_s=60) as pair:
                pool = pair.running.pool.engines["decode"][0]
                pool.models = None
                assert (await pair.complete(model=None))[0] == 200
                got, _, _ = await pair.complete(model=None)
                assert got == status
                # the probe's connection may be the one that was used first: count the posts
                assert posts == seen


async def test_c19_many_streams_at_once() -> None:
    gate = asyncio.Event()
    count = 200
    async with serving() as pair:
        pair.d.script = after(gate, decode_ok)
        pair.session._connector._limit = 0  # type: ignore[union-attr]
        tasks = [asyncio.create_task(pair.complete(stream=True, prompt=f"p{n}")) for n in range(count)]
        await pair.d.call(count - 1)
        gate.set()
        for number, (status, _, raw) in enumerate(await asyncio.gather(*tasks)):
            assert status == 200 and raw.endswith(DONE) and json.dumps(f"p{number}")[1:-1].encode() in raw


async def test_c19_above_the_limit_429() -> None:
    gate = asyncio.Event()
    async with serving(max_requests=1) as pair:
        pair.d.script = after(gate, decode_ok)
        first = asyncio.create_task(pair.complete())
        await pair.d.call()
        status, headers, raw = await pair.complete()
        assert status == 429 and error_of(raw)["code"] == "too_many_requests" and headers["Retry-After"] == "1"
        gate.set()
        assert (await first)[0] == 200


@pytest.mark.parametrize("tail", [b"", b'data: {"choi'])
async def test_c22_a_stream_that_breaks_ends_in_one_error_event(tail: bytes) -> None:
    sent = [event("a"), event("b"), event("c")]

    async def breaks(call: Call) -> web.StreamResponse:
        response = await begin_stream(call)
        for piece in [*sent, tail] if tail else sent:
            await response.write(piece)
        assert call.request.transport is not None
        await asyncio.wait_for(call.request.protocol._drain_helper(), SOON)
        call.request.transport.close()
        await asyncio.Event().wait()
        return response

    async with serving() as pair:
        pair.d.script = breaks
        status, _, raw = await pair.complete(stream=True)
        assert status == 200
        whole = b"".join(sent) + tail
        assert raw.startswith(whole)
        rest = raw[len(whole) :].strip()
        facts = error_of(rest.removeprefix(b"data: "))
        assert facts["side"] == "decode" and facts["peer"] == pair.d.url and facts["code"] == "engine_error"
        assert b"[DONE]" not in raw and b"finish_reason" not in raw and raw.endswith(b"\n\n")
        assert len(pair.d.calls) == 1
        async with pair.session.get(pair.url + "/metrics") as response:
            text = await response.text()
        assert f'kvferry_router_pd_stream_errors_total{{engine="{pair.d.url}"}} 1.0' in text


async def test_c22_a_stream_without_framing_that_ends_early() -> None:
    async def http10(call: Call) -> web.StreamResponse:
        call.request.transport.write(  # type: ignore[union-attr]
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + event("a")
        )
        call.request.transport.close()  # type: ignore[union-attr]
        await asyncio.Event().wait()
        return web.Response()

    async with serving() as pair:
        pair.d.script = http10
        status, _, raw = await pair.complete(stream=True)
        assert status == 200 and raw.startswith(event("a"))
        assert error_of(raw[len(event("a")) :].removeprefix(b"data: "))["side"] == "decode"


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


async def test_no_descriptor_is_left_behind() -> None:
    async with serving() as pair:  # opens what the process keeps, zmq's context for one
        assert (await pair.post(COMPLETIONS, STREAMED))[0] == 200
    before = descriptors()
    async with serving() as pair:
        for _ in range(5):
            assert (await pair.post(COMPLETIONS, STREAMED))[0] == 200
        _, writer = await pair.raw(STREAMED)
        writer.close()
    assert descriptors() <= before


async def test_c72_a_character_of_four_tokens_and_frames_of_several() -> None:
    """C72: pieces end inside characters and inside the event with the counts, which the router edits (C62)."""
    ship = "🚢"
    events = [
        {"choices": [{"index": 0, "text": "", "token_ids": [1, 2]}]},
        {"choices": [{"index": 0, "text": f"{ship}é", "token_ids": [3, 4, 5]}]},
        {"choices": [{"index": 0, "text": ship, "token_ids": [6, 7, 8, 9]}]},
        {"choices": [], "usage": usage(100, 9, cached=99)},
    ]
    sent = b"".join(f"data: {json.dumps(one, ensure_ascii=False)}\n\n".encode() for one in events) + DONE

    async def decode(call: Call) -> web.StreamResponse:
        return await stream(call, [sent[at : at + 3] for at in range(0, len(sent), 3)])

    async def prefill(call: Call) -> web.StreamResponse:
        return prefilled(call, usage=usage(100, 1, cached=96))

    async with serving() as pair:
        pair.p.script, pair.d.script = prefill, decode
        status, _, raw = await pair.complete(stream=True, stream_options={"include_usage": True})
        text = raw.decode()
        assert status == 200 and "\ufffd" not in text and raw.endswith(DONE)
        got = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]
        assert got[:3] == events[:3]
        assert got[3]["usage"] == usage(100, 9, cached=96)
        made = sum(len(choice["token_ids"]) for one in got for choice in one["choices"])
        assert got[3]["usage"]["completion_tokens"] == made == 9


@pytest.mark.parametrize("fails", [False, True])
async def test_responses_wait_for_prefill_behind_their_opening(fails: bool) -> None:
    """C04, C20: `response.created` comes before D has its KV, so P's error is still the client's, with its status."""
    opening = b"event: response.created\ndata: {}\n\n"
    rest = b'event: response.output_text.delta\ndata: {"delta":"a"}\n\nevent: response.completed\ndata: {}\n\n'
    gate, answered = asyncio.Event(), asyncio.Event()

    async def decode(call: Call) -> web.StreamResponse:
        response = await begin_stream(call)
        await response.write(opening)
        answered.set()
        await gate.wait()
        await response.write(rest)
        await response.write_eof()
        return response

    async def prefill(call: Call) -> web.StreamResponse:
        await answered.wait()
        return web.json_response({"error": {"message": "no", "code": 500}}, status=500) if fails else prefilled(call)

    async with serving() as pair:
        pair.p.script, pair.d.script = prefill, decode
        asked = asyncio.create_task(pair.post("/v1/responses", {"model": MODEL, "input": "a", "stream": True}))
        await pair.d.call()
        if not fails:
            gate.set()
        status, _, raw = await asked
        assert (status, raw) == (200, opening + rest) if not fails else status == 500
        if fails:
            async with asyncio.timeout(1):
                await pair.d.calls[0].cancelled.wait()
