"""Engines that fail in every way at random, clients that leave, retries on: whatever happens, the books are right."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from aiohttp import web
from scripted import DONE, MODEL, Call, Engine, Pair, Script, begin_stream, decode_ok, event, prefill_ok, serving, slam

from kvferry.router.engines.breaker import BreakerSettings, State
from kvferry.router.engines.budget import RetrySettings
from kvferry.router.engines.outliers import OutlierSettings

REQUESTS = 160
AT_ONCE = 16
LEFT = "left"


def at_random(draw: random.Random, good: Script, role: str) -> Script:
    async def fails(call: Call) -> web.StreamResponse:
        status = draw.choice([400, 404, 429, 500, 503])
        return web.json_response({"error": {"message": f"{role} says {status}", "code": status}}, status=status)

    async def slow(call: Call) -> web.StreamResponse:
        await asyncio.sleep(draw.random() * 0.05)
        return await good(call)

    async def error_event(call: Call) -> web.StreamResponse:
        response = await begin_stream(call)
        await response.write(b'data: {"error": {"message": "no", "code": 500}}\n\n' + DONE)
        return response

    async def breaks(call: Call) -> web.StreamResponse:
        response = await begin_stream(call)
        await response.write(event("a"))
        return await slam(call)

    async def script(call: Call) -> web.StreamResponse:
        ways = [good, good, good, slow, slow, fails, slam]
        if role == "decode" and call.body.get("stream"):
            ways += [error_event, breaks]
        return await draw.choice(ways)(call)

    return script


def is_typed(status: int, raw: bytes, stream: bool) -> bool:
    """An answer that is whole, or an error that says something."""
    if status == 200 and stream and raw.endswith(DONE):
        return True
    if status == 200 and not stream:
        return bool(json.loads(raw)["choices"])
    body = raw.rsplit(b"data: ", 1)[-1] if status == 200 else raw
    return bool(json.loads(body)["error"]["message"])


async def one(pair: Pair, draw: random.Random, turns: asyncio.Semaphore) -> str:
    stream, leaves = draw.random() < 0.5, draw.random() < 0.15
    body: dict[str, Any] = {"stream": stream} if stream or draw.random() < 0.7 else {"prompt": ["alpha", "beta"]}
    async with turns:
        if leaves:
            _, writer = await pair.raw({"model": MODEL, "prompt": "hi", "stream": stream})
            await asyncio.sleep(draw.random() * 0.04)
            writer.close()
            return LEFT
        status, _, raw = await pair.complete(**body)
        assert is_typed(status, raw, stream), (status, raw)
        return str(status)


@pytest.mark.parametrize(("mode", "bind"), [("push", "early"), ("pull", "early"), ("stream", "late")])
async def test_the_books_are_right_whatever_happens(mode: str, bind: str) -> None:
    draw, turns = random.Random(7), asyncio.Semaphore(AT_ONCE)
    prefills, decodes = [Engine("prefill") for _ in range(2)], [Engine("decode") for _ in range(3)]
    settings: dict[str, Any] = {
        "retries": 2,
        "retry": RetrySettings(backoff_s=0.01, floor=1000),
        "breaker": BreakerSettings(failures=4, open_s=0.1),
        "outliers": OutlierSettings(volume=5, eject_s=0.1),
    }
    async with serving(prefill=prefills, decode=decodes, mode=mode, bind=bind, **settings) as pair:
        for engine in prefills:
            engine.script = at_random(draw, prefill_ok, "prefill")
        for engine in decodes:
            engine.script = at_random(draw, decode_ok, "decode")
        ends = await asyncio.gather(*(one(pair, draw, turns) for _ in range(REQUESTS)))
        assert ends.count("200") > REQUESTS / 4 and LEFT in ends
        for engine in prefills:
            engine.script = prefill_ok
        for engine in decodes:
            engine.script = decode_ok
        pool = pair.running.pool
        async with asyncio.timeout(10):
            while any(engine.in_flight for engine in pool.all()):
                await asyncio.sleep(0.01)
            while any(engine.standing.state is not State.CLOSED for engine in pool.all()):
                await pair.complete()
                await asyncio.sleep(0.01)
        for call in (call for engine in (*prefills, *decodes) for call in engine.calls):
            async with asyncio.timeout(5):
                await call.ended.wait()
    with_kv = {call.params["transfer_id"] for engine in decodes for call in engine.calls}
    begun = [call.params["transfer_id"] for engine in prefills for call in engine.calls]
    owner = {call.params["transfer_id"]: engine for engine in prefills for call in engine.calls}
    for transfer_id in set(begun) - with_kv:
        assert transfer_id in owner[transfer_id].side.abandoned, "a P whose D was never asked is told to let go"
    told = [(transfer_id, engine) for engine in prefills for transfer_id in engine.side.abandoned]
    assert len(told) == len(dict(told)), "one P per transfer"
    assert all(owner.get(transfer_id, engine) is engine for transfer_id, engine in told)
