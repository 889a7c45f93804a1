"""A router's process that is killed, and what its clients get: the row 'router dies' of the failure matrix."""

from __future__ import annotations

import asyncio
import functools
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

import aiohttp
from aiohttp import web
from router_process import router
from scripted import COMPLETIONS, MODEL, SOON, Call, Engine, begin_stream, event, hang, prefill_ok

STARTS_S = 20.0


@dataclass(frozen=True)
class Got:
    """`status` 0: not even that came. `whole`: the reply ended as its framing says."""

    status: int
    body: bytes
    transfer_id: str
    whole: bool


async def got_of(asked: aiohttp.client._RequestContextManager, seen: asyncio.Event) -> Got:
    """Sets `seen` once the client has D's first token."""
    status, body, transfer_id = 0, b"", ""
    try:
        async with asked as response:
            status, transfer_id = response.status, response.headers.get("x-kvferry-transfer-id", "")
            async for piece in response.content.iter_any():
                body += piece
                if b"one" in body:
                    seen.set()
            return Got(status, body, transfer_id, True)
    except aiohttp.ClientError:
        return Got(status, body, transfer_id, False)


def told(mode: str, *, p_answers: bool, begun: bool) -> str:
    """`begun`: D's first token was out."""
    which = _named(p_answers, begun)
    for streams in (False, True):
        got = _killed(mode)[which, streams]
        assert not got.whole
        assert (got.status, got.body) == ((200, event("one")) if begun and streams else (0, b""))
    return "its connection breaks"


@functools.cache
def _killed(mode: str) -> dict[tuple[str, bool], Got]:
    return asyncio.run(_kill(mode))


def _named(p_answers: bool, begun: bool) -> str:
    """The prompt says how its legs go."""
    return "decodes" if begun else "prefilled" if p_answers else "prefills"


async def _kill(mode: str) -> dict[tuple[str, bool], Got]:
    """One router, and one client of each kind, whose connections are all open when it is killed."""
    p, d = Engine("prefill"), Engine("decode")
    p.script, d.script = _prefill, _decode
    asks = [(which, streams) for which in ("prefills", "prefilled", "decodes") for streams in (False, True)]
    async with AsyncExitStack() as stack:
        for engine in (p, d):
            await engine.start()
            stack.push_async_callback(engine.stop)
        pair = [f"{one.url},side_channel={one.host}:{one.side.port}" for one in (p, d)]
        process = await stack.enter_async_context(
            router("--port", "0", "--mode", mode, "--prefill", pair[0], "--decode", pair[1])
        )
        url = await _ready(process)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)))
        seen = {ask: asyncio.Event() for ask in asks}
        clients = []
        for which, streams in asks:
            body = {"model": MODEL, "prompt": which, "max_tokens": 4, "stream": streams}
            clients.append(
                asyncio.create_task(got_of(session.post(url + COMPLETIONS, json=body), seen[which, streams]))
            )
        # in pull D is asked once P has answered
        await p.call(len(asks) - 1)
        await d.call(len(asks) - 1 - (2 if mode == "pull" else 0))
        async with asyncio.timeout(SOON):
            await seen["decodes", True].wait()
        process.kill()
        async with asyncio.timeout(SOON):
            got = await asyncio.gather(*clients)
            for call in (*p.calls, *d.calls):
                await call.ended.wait()
        left = [call for call in (*p.calls, *d.calls) if call.cancelled.is_set()]
        assert len(left) == 2 + len(d.calls), "P's two that compute, and all of D's, see their connection close"
        return dict(zip(asks, got, strict=True))


async def _ready(process: asyncio.subprocess.Process) -> str:
    """Its address, once it takes requests."""
    assert process.stdout is not None
    async with asyncio.timeout(STARTS_S), aiohttp.ClientSession() as session:
        url = (await process.stdout.readline()).decode().removeprefix("listening ").strip()
        while True:
            with suppress(aiohttp.ClientError):
                async with session.get(url + "/health") as response:
                    if response.status == 200:
                        return url
            await asyncio.sleep(0.02)  # another process: it is asked again


async def _prefill(call: Call) -> web.StreamResponse:
    return await (hang if call.body["prompt"] == "prefills" else prefill_ok)(call)


async def _decode(call: Call) -> web.StreamResponse:
    if call.body["prompt"] != "decodes" or not call.body.get("stream"):
        return await hang(call)
    response = await begin_stream(call)
    await response.write(event("one"))
    return await hang(call)
