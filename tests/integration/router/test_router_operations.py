"""Engines in, out, to rest and to the other side while the router runs, by the admin routes; the end of a transfer."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from scripted import (
    COMPLETIONS,
    DONE,
    MODEL,
    Call,
    Engine,
    Pair,
    decode_ok,
    hang,
    prefill_ok,
    serving,
    streams_on,
)

from kvferry.router.admin.operations import add_routes
from kvferry.router.app import ROUTER


@contextlib.asynccontextmanager
async def operated(**config: Any) -> AsyncIterator[tuple[Pair, Admin]]:
    async with serving(**config) as pair:
        app = web.Application()
        add_routes(app, pair.running._app[ROUTER].services)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            yield pair, Admin(pair, f"http://{host}:{port}/admin")
        finally:
            await runner.cleanup()


class Admin:
    def __init__(self, pair: Pair, url: str) -> None:
        self._pair, self._url = pair, url

    async def __call__(self, method: str, route: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        raw = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        async with self._pair.session.request(method, f"{self._url}/{route}", data=raw) as response:
            return response.status, await response.json()

    async def engines(self) -> dict[str, dict[str, Any]]:
        _, facts = await self("GET", "engines")
        return {one["url"]: one for one in facts["engines"]}


def spec_text(engine: Engine) -> str:
    return f"{engine.url},side_channel={engine.host}:{engine.side.port}"


async def until(holds: Any) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.01)


async def test_c27_drain_keeps_streams_and_sends_no_new_one() -> None:
    first, second = Engine("decode"), Engine("decode")
    async with operated(decode=[first, second], decode_policy="round_robin") as (pair, admin):
        await until(lambda: all(engine.ready for engine in pair.running.pool.all()))
        gate = asyncio.Event()
        asked = await streams_on(pair, first, 2, gate)
        status, facts = await admin("POST", "drain", {"url": first.url, "timeout_s": 0})
        assert status == 200 and facts["drained"] is False and facts["engine"]["in_flight"] == 2
        assert facts["engine"]["draining"] and facts["engine"]["reason"] == "it is draining"
        before = len(first.calls)
        for _ in range(4):
            assert (await pair.complete())[0] == 200
        assert len(first.calls) == before
        async with pair.session.get(pair.url + "/metrics") as response:
            assert f'worker_draining{{engine="{first.url}",role="decode"}} 1.0' in await response.text()
        waits = asyncio.create_task(admin("POST", "drain", {"url": first.url, "timeout_s": 30}))
        gate.set()
        status, facts = await waits
        assert facts["drained"] is True and facts["engine"]["in_flight"] == 0
        for status, _, raw in await asyncio.gather(*asked):
            assert status == 200 and raw.endswith(DONE), "their streams ended whole"
        status, facts = await admin("POST", "undrain", {"url": first.url})
        assert status == 200 and facts["engine"]["takes"]
        for _ in range(2):
            await pair.complete()
        assert len(first.calls) == before + 1


async def test_an_engine_is_added_and_used_and_removed_after_its_last_stream() -> None:
    extra = Engine("decode")
    await extra.start()
    async with operated() as (pair, admin):
        try:
            status, facts = await admin("POST", "engines", {"engine": spec_text(extra), "role": "decode"})
            assert status == 201 and facts["engine"]["source"] == "the admin API" and not facts["engine"]["ready"]
            await until(lambda: all(engine.ready for engine in pair.running.pool.all()))
            gate = asyncio.Event()
            asked = await streams_on(pair, extra, 1, gate)
            removal = asyncio.create_task(admin("DELETE", "engines", {"url": extra.url, "timeout_s": 30}))
            await until(lambda: any(engine.leaving for engine in pair.running.pool.all()))
            assert (await admin.engines())[extra.url]["leaving"]
            gate.set()
            status, facts = await removal
            assert status == 200 and facts["drained"] is True
            assert [engine.url for engine in pair.running.pool.engines["decode"]] == [pair.d.url]
            assert all(raw.endswith(DONE) for _, _, raw in await asyncio.gather(*asked))
            probes = len(extra.probes)
            assert (await admin("DELETE", "engines", {"url": extra.url}))[0] == 404
            assert (await pair.complete())[0] == 200 and len(extra.probes) == probes, "nobody probes it any more"
        finally:
            await extra.stop()


async def test_one_that_does_not_drain_in_time_is_removed_and_its_streams_run_on() -> None:
    first, second = Engine("decode"), Engine("decode")
    async with operated(decode=[first, second]) as (pair, admin):
        await until(lambda: all(engine.ready for engine in pair.running.pool.all()))
        gate = asyncio.Event()
        asked = await streams_on(pair, first, 1, gate)
        status, facts = await admin("DELETE", "engines", {"url": first.url, "timeout_s": 0.1})
        assert status == 200 and facts["drained"] is False and first.url not in await admin.engines()
        gate.set()
        assert all(raw.endswith(DONE) for _, _, raw in await asyncio.gather(*asked))


async def test_the_last_of_a_role_may_go_and_then_requests_are_refused() -> None:
    async with operated() as (pair, admin):
        status, facts = await admin("DELETE", "engines", {"url": pair.d.url})
        assert status == 200 and facts["missing"] == ["decode"]
        status, headers, raw = await pair.complete()
        assert status == 503 and headers["Retry-After"] == "1" and b"no decode engine is ready: none is known" in raw
        await admin("POST", "engines", {"engine": spec_text(pair.d), "role": "decode"})
        await until(lambda: not pair.running.pool.missing())
        assert (await pair.complete())[0] == 200


async def test_an_engine_changes_sides() -> None:
    swings = Engine("decode")
    swings.side.role = "both"
    async with operated(decode=[Engine("decode"), swings]) as (pair, admin):
        await until(lambda: all(engine.ready for engine in pair.running.pool.all()))
        status, facts = await admin("POST", "role", {"url": swings.url, "role": "prefill", "timeout_s": 5})
        assert status == 200 and facts["engine"]["role"] == "prefill"
        await until(lambda: all(engine.ready for engine in pair.running.pool.all()))

        async def either(call: Call) -> web.StreamResponse:
            return await (prefill_ok if call.params.get("do_remote_decode") else decode_ok)(call)

        swings.script = either
        for _ in range(2):
            assert (await pair.complete())[0] == 200
        assert [call.params.get("do_remote_decode") for call in swings.calls] == [True]
        status, facts = await admin("POST", "role", {"url": pair.p.url, "role": "decode"})
        assert status == 409 and "as producer" in facts["error"]["message"] and "kv_both" in facts["error"]["message"]
        assert (await admin.engines())[pair.p.url]["takes"], "it is what it was"


async def test_a_role_is_not_changed_under_a_running_stream() -> None:
    swings = Engine("decode")
    swings.side.role = "both"
    async with operated(decode=[swings]) as (pair, admin):
        gate = asyncio.Event()
        asked = await streams_on(pair, swings, 1, gate)
        status, facts = await admin("POST", "role", {"url": swings.url, "role": "prefill", "timeout_s": 0.05})
        assert status == 409 and facts["error"]["code"] == "not_drained"
        assert (await admin.engines())[swings.url]["role"] == "decode"
        assert (await admin.engines())[swings.url]["takes"]
        gate.set()
        assert all(raw.endswith(DONE) for _, _, raw in await asyncio.gather(*asked))


async def test_cancel_tells_every_rank_of_every_engine() -> None:
    two_ranks = Engine("decode")
    two_ranks.side.tp_size = 2
    async with operated(decode=[two_ranks]) as (pair, admin):
        pair.p.script = pair.d.script = hang
        asked = asyncio.create_task(pair.complete())
        transfer_id = (await pair.d.call()).params["transfer_id"]
        status, facts = await admin("POST", "cancel", {"transfer_id": transfer_id, "reason": "it hangs"})
        assert status == 200 and facts["released"] == 2
        assert {(one["role"], one["rank"], one["outcome"]) for one in facts["told"]} == {
            ("prefill", 0, "released"),
            ("decode", 0, "released"),
            ("decode", 1, "unreachable"),  # nothing listens on the port above
        }
        for engine in (pair.p, pair.d):
            assert engine.side.abandoned[transfer_id][1] == "it hangs"
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


@pytest.mark.parametrize(
    ("method", "route", "body", "status", "said"),
    [
        ("POST", "drain", b"{", 400, "not JSON"),
        ("POST", "drain", [], 400, "expected {url, timeout_s?}"),
        ("POST", "drain", {}, 400, "missing required field `url`"),
        ("POST", "drain", {"url": "http://x", "timeout": 3}, 400, "did you mean 'timeout_s'?"),
        ("POST", "drain", {"url": "http://x", "timeout_s": -1}, 400, "`$.timeout_s`"),
        ("POST", "drain", {"url": "http://x", "timeout_s": "3"}, 400, "Expected `float | null`"),
        ("POST", "drain", {"url": "http://x"}, 404, "no engine has the url 'http://x' (known: http://127.0.0.1"),
        ("POST", "undrain", {"url": ""}, 400, "`$.url`"),
        ("POST", "engines", {"engine": "http://h:1", "role": "both"}, 400, "'both'"),
        ("POST", "engines", {"engine": "::1:8100", "role": "decode"}, 400, "http://[::1]:8100"),
        ("POST", "engines", {"engine": "http://h:1,rak=a", "role": "decode"}, 400, "rak"),
        ("DELETE", "engines", {"url": "http://x"}, 404, "known"),
        ("POST", "role", {"url": "http://x", "role": "prefill"}, 404, "known"),
        ("POST", "cancel", {"transfer_id": ""}, 400, "`$.transfer_id`"),
        ("POST", "cancel", b"x" * 70_000, 413, "65536"),
    ],
)
async def test_bad_bodies_are_one_clear_line(method: str, route: str, body: Any, status: int, said: str) -> None:
    async with operated() as (_, admin):
        got, facts = await admin(method, route, body)
        message = facts["error"]["message"]
        assert got == status and said in message and "\n" not in message, message


async def test_a_url_is_known_once() -> None:
    async with operated() as (pair, admin):
        status, facts = await admin("POST", "engines", {"engine": spec_text(pair.d), "role": "decode"})
        assert status == 409 and facts["error"]["code"] == "engine_known"
        listed = await admin.engines()
        assert listed[pair.d.url]["models"] == [MODEL] and listed[pair.d.url]["circuit"] == "closed"
        assert (await pair.post(COMPLETIONS, {"model": MODEL, "prompt": "x"}))[0] == 200


async def test_other_connectors_have_nobody_to_tell() -> None:
    async with operated(connector="upstream-pull") as (_, admin):
        status, facts = await admin("POST", "cancel", {"transfer_id": "t"})
        assert status == 409 and facts["error"]["code"] == "no_side_channel"
