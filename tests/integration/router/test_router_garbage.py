"""Requests leave nothing for the collector: else memory grows by what waits for it, and streams stop while it looks."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator

import pytest
from aiohttp import web
from scripted import Call, begin_stream, event, refuse, serving

from kvferry.router.connection import Response
from kvferry.router.dispatch import Exchange
from kvferry.router.serve import Generation
from kvferry.router.server import Request

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
