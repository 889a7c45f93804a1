"""What requests show of an engine: its circuit opens and closes, and one that does far worse is left out."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from scripted import Call, Engine, Pair, begin_stream, decode_ok, error_of, event, hang, refuse, serving, slam

from kvferry.router.engines.breaker import BreakerSettings, State
from kvferry.router.engines.outliers import OutlierSettings

BOOM = {"error": {"message": "boom", "type": "InternalServerError", "code": 500}}


def engine_of(pair: Pair, role: str, index: int = 0):
    return pair.running.pool.engines[role][index]  # type: ignore[index]


async def ready(pair: Pair) -> None:
    async with asyncio.timeout(5):
        while not all(engine.ready for engine in pair.running.pool.all()):
            await pair.running.pool.change()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_circuit_opens_tries_and_closes(role: str) -> None:
    settings = BreakerSettings(failures=5, open_s=0.3, successes=2)
    async with serving(breaker=settings) as pair:
        bad = pair.p if role == "prefill" else pair.d
        good, bad.script = bad.script, refuse(500, BOOM)
        standing = engine_of(pair, role).standing
        for _ in range(5):
            assert standing.state is State.CLOSED and (await pair.complete())[0] == 500
        status, headers, raw = await pair.complete()
        facts = error_of(raw)
        assert status == 503 and facts["code"] == f"no_{role}_engine" and "circuit is open" in facts["message"]
        assert headers["Retry-After"] == "1" and len(bad.calls) == 5, "it is not asked"
        async with pair.session.get(pair.url + "/metrics") as response:
            assert f'kvferry_router_cb_state{{engine="{bad.url}",role="{role}"}} 1.0' in await response.text()
        bad.script = good
        async with asyncio.timeout(5):
            while not standing.allows:
                await asyncio.sleep(0.02)
        assert standing.state is State.HALF_OPEN
        assert (await pair.complete())[0] == 200 and standing.state is State.HALF_OPEN
        assert (await pair.complete())[0] == 200 and standing.state is State.CLOSED
        other = engine_of(pair, "decode" if role == "prefill" else "prefill")
        assert other.standing.state is State.CLOSED, "the other leg was cancelled, which says nothing of its engine"


async def test_one_request_at_a_time_tries_a_half_open_circuit() -> None:
    bad, well = Engine("decode"), Engine("decode")
    async with serving(decode=[bad, well], breaker=BreakerSettings(failures=1, open_s=0.05)) as pair:
        await ready(pair)
        bad.script = refuse(500, BOOM)
        assert {(await pair.complete())[0] for _ in range(2)} == {200, 500}
        bad.script = hang
        async with asyncio.timeout(5):
            while not engine_of(pair, "decode").standing.allows:
                await asyncio.sleep(0.01)
        asked = [asyncio.create_task(pair.complete()) for _ in range(8)]
        await bad.call(1)
        async with asyncio.timeout(5):
            while sum(task.done() for task in asked) < 7:
                await asyncio.sleep(0.01)
        assert len(bad.calls) == 2, "the one that tries"
        (waits,) = [task for task in asked if not task.done()]
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        await bad.calls[1].cancelled.wait()
        async with asyncio.timeout(5):
            while not engine_of(pair, "decode").standing.allows:
                await asyncio.sleep(0.01)


async def test_a_stream_that_breaks_counts_and_a_client_that_leaves_does_not() -> None:
    async def breaks(call: Call) -> web.StreamResponse:
        await (await begin_stream(call)).write(event("a"))
        return await slam(call)

    async def stalls(call: Call) -> web.StreamResponse:
        await (await begin_stream(call)).write(event("a"))
        return await hang(call)

    async with serving(breaker=BreakerSettings(failures=2, open_s=60)) as pair:
        standing = engine_of(pair, "decode").standing
        pair.d.script = stalls
        for number in range(4):
            reader, writer = await pair.raw({"model": "toy", "prompt": "hi", "stream": True})
            await reader.readuntil(event("a"))
            writer.close()
            await (await pair.d.call(number)).cancelled.wait()
        assert standing.state is State.CLOSED and standing.sample().bad == 0
        pair.d.script = breaks
        assert (await pair.complete(stream=True))[0] == 200
        assert standing.sample().bad == 1 and standing.state is State.CLOSED


async def test_an_engine_that_was_restarted_is_tried_at_once() -> None:
    async with serving(breaker=BreakerSettings(failures=2, open_s=600), probe_interval_s=0.05) as pair:
        pair.d.script = refuse(500, BOOM)
        for _ in range(2):
            assert (await pair.complete())[0] == 500
        watched = engine_of(pair, "decode")
        assert watched.standing.state is State.OPEN
        pair.d.health = 503
        async with asyncio.timeout(5):
            while watched.ready:
                await pair.running.pool.change()
            pair.d.health, pair.d.script = 200, decode_ok
            while not watched.ready:
                await pair.running.pool.change()
        assert watched.standing.state is State.HALF_OPEN
        assert [(await pair.complete())[0] for _ in range(3)] == [200, 200, 200]
        assert watched.standing.state is State.CLOSED


@pytest.mark.parametrize("how", ["fails", "slow"])
async def test_an_outlier_is_left_out_for_a_while(how: str) -> None:
    async def slow(call: Call) -> web.StreamResponse:
        response = await begin_stream(call)
        await asyncio.sleep(0.06)
        await response.write(event("a") + b"data: [DONE]\n\n")
        return response

    turn = 0

    async def every_other(call: Call) -> web.StreamResponse:
        nonlocal turn
        turn += 1
        return await (decode_ok if turn % 2 else refuse(500, BOOM))(call)

    settings = OutlierSettings(volume=4, slow_gap_s=0.04, eject_s=0.5)
    engines = [Engine("decode") for _ in range(3)]
    async with serving(decode=engines, outliers=settings, breaker=BreakerSettings(failures=0)) as pair:
        await ready(pair)
        pool, bad = pair.running.pool, engines[1]
        bad.script = slow if how == "slow" else every_other
        async with asyncio.timeout(20):
            while not pool.ejected_for("decode", bad.url):
                await pair.complete(stream=True)
        before = len(bad.calls)
        bad.script = decode_ok
        for _ in range(6):
            assert (await pair.complete(stream=True))[0] == 200
        assert len(bad.calls) == before and not any(
            pool.ejected_for("decode", one.url) for one in (engines[0], engines[2])
        )
        async with pair.session.get(pair.url + "/metrics") as response:
            assert f'kvferry_router_ejections_total{{engine="{bad.url}",role="decode"}} 1.0' in await response.text()
        for other in (engines[0], engines[2]):
            other.health = 503
            pool.refresh(next(one for one in pool.all() if one.url == other.url))
        async with asyncio.timeout(5):
            while sum(one.ready for one in pool.engines["decode"]) > 1:
                await pool.change()
        assert (await pair.complete())[0] == 200 and len(bad.calls) == before + 1, "better than none"


async def test_an_engine_that_is_silent_once_is_busy_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.router.engines.pool.PROBE_TIMEOUT_S", 0.2)
    mute, asked = asyncio.Event(), 0

    async def health(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        if not mute.is_set():
            await asyncio.sleep(10)
        return web.Response()

    engine = Engine("decode")
    monkeypatch.setattr(engine, "_health", health)
    mute.set()
    async with serving(decode=[engine], probe_interval_s=0.02) as pair:
        watched = engine_of(pair, "decode")
        for silences in (1, 2):
            mute.clear()
            before = asked
            async with asyncio.timeout(5):
                while asked <= before + silences:
                    await asyncio.sleep(0.01)
            assert watched.ready, "not after a probe or two without an answer"
            mute.set()
            before = asked
            async with asyncio.timeout(5):
                while asked <= before + 1:
                    await asyncio.sleep(0.01)
        mute.clear()
        async with asyncio.timeout(5):
            while watched.ready:
                await pair.running.pool.change()
        assert "no answer within 0.2 s" in watched.reason
