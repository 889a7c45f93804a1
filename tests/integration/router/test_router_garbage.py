"""Requests leave nothing for the collector: else memory grows by what waits for it, and streams stop while it looks."""

from __future__ import annotations

import asyncio
import functools
import gc
import tracemalloc
from collections import Counter
from collections.abc import Iterator

import pytest
from aiohttp import web
from scripted import DONE, MODEL, Call, Script, begin_stream, event, prefill_ok, refuse, serving

from kvferry.router.dispatch.dispatch import Exchange
from kvferry.router.dispatch.serve import Generation
from kvferry.router.http.connection import Response
from kvferry.router.http.server import Request

KINDS = (Generation, Exchange, Request, Response)


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive() -> Counter[str]:
    return Counter(type(one).__name__ for one in gc.get_objects() if isinstance(one, KINDS))


async def settled() -> Counter[str]:
    """What is alive once what runs beside the requests has ended."""
    for _ in range(100):
        if not alive():
            break
        await asyncio.sleep(0.02)
    return alive()


async def cut(call: Call) -> web.StreamResponse:
    response = await begin_stream(call)
    await response.write(event("a"))
    assert call.request.transport is not None
    call.request.transport.abort()
    return response


@pytest.mark.parametrize("stream", [False, True])
async def test_of_good_ones(stream: bool, uncollected: None) -> None:
    async with serving() as pair:
        for _ in range(5):
            assert (await pair.complete(stream=stream))[0] == 200
        assert await settled() == {}


async def test_of_streams_that_were_cut(uncollected: None) -> None:
    async with serving() as pair:
        pair.d.script = cut
        for _ in range(3):
            status, _, raw = await pair.complete(stream=True)
            assert status == 200 and b"error" in raw
        assert await settled() == {}


async def test_of_legs_that_failed(uncollected: None) -> None:
    async with serving(retries=1) as pair:
        pair.d.script = refuse(503, {"error": {"message": "busy"}})
        for _ in range(3):
            assert (await pair.complete())[0] == 503
        assert await settled() == {}


async def test_a_long_prompt_is_not_kept_for_as_long_as_its_answer_takes() -> None:
    """Neither the client's body nor what was made of it for the engines."""
    prompt = list(range(200_000, 500_000))  # numbers of their own: 12 MB as Python has them

    async def forgets(call: Call, script: Script) -> web.StreamResponse:
        call.raw, call.body = b"", {key: value for key, value in call.body.items() if key != "prompt"}
        call.request._read_bytes = None
        return await script(call)

    async def one_token(call: Call) -> web.StreamResponse:
        response = await begin_stream(call)
        await response.write(event("one"))
        await finish.wait()
        await response.write(DONE)
        await response.write_eof()
        return response

    finish = asyncio.Event()
    async with serving() as pair:
        pair.p.script, pair.d.script = (functools.partial(forgets, script=one) for one in (prefill_ok, one_token))
        tracemalloc.start()
        try:
            reader, writer = await pair.raw({"model": MODEL, "prompt": prompt, "max_tokens": 4, "stream": True})
            async with asyncio.timeout(20):
                await reader.readuntil(b"one")
            kept, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        finish.set()
        assert b"[DONE]" in await reader.readuntil(b"0\r\n\r\n")
        writer.close()
    assert most > 10e6, "the prompt came through"
    assert kept < 1.5e6, f"{kept:,} bytes are kept of a prompt that nobody needs any more"
