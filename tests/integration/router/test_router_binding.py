"""Mode `stream` with a decode engine that is chosen late: when prefill is done, or when P has so much of the prompt."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from scripted import (
    COMPLETIONS,
    MODEL,
    SOON,
    Call,
    Engine,
    Pair,
    after,
    decode_ok,
    error_of,
    hang,
    prefill_ok,
    refuse,
    serving,
    slam,
)

from kvferry.router.choice.room import Room
from kvferry.story import read_story

LATER = ["late", "at=50"]
BROKEN = {"error": {"message": "out of blocks", "type": "InternalServerError", "code": 500}}


@contextlib.asynccontextmanager
async def binding(bind: str, **config: Any) -> AsyncIterator[tuple[Pair, asyncio.Event]]:
    """A pair, and the gate that P's answer waits at."""
    gate = asyncio.Event()
    async with serving(mode="stream", bind=bind, **config) as pair:
        pair.p.script = after(gate, prefill_ok)
        yield pair, gate
        async with asyncio.timeout(SOON):
            while any(engine.in_flight for engine in pair.running.pool.all()):
                await settled(pair)  # D may have been faster than P's word, which is waited for beside


async def settled(pair: Pair) -> None:
    """The router has had time to deal with what it was told: it has answered some questions since."""
    for _ in range(5):
        async with pair.session.get(pair.url + "/health") as response:
            await response.read()


async def transfer_of(engine: Engine, number: int = 0) -> str:
    """The transfer id of the call of that number."""
    found: str = (await engine.call(number)).params["transfer_id"]
    return found


async def test_early_is_as_push_and_asks_for_no_progress() -> None:
    async with binding("early") as (pair, gate):
        asking = asyncio.create_task(pair.complete())
        p, d = await pair.p.call(), await pair.d.call()
        assert p.params["mode"] == d.params["mode"] == "stream"
        gate.set()
        assert (await asking)[0] == 200 and pair.p.side.watched == {}


@pytest.mark.parametrize("stream", [False, True])
async def test_late_asks_decode_when_prefill_is_done(stream: bool, tmp_path: Path) -> None:
    async with binding("late", story_dir=str(tmp_path)) as (pair, gate):
        asking = asyncio.create_task(pair.complete(stream=stream))
        transfer_id = await transfer_of(pair.p)
        await settled(pair)
        assert pair.d.calls == [] and [engine.in_flight for engine in pair.running.pool.all()] == [1, 0]
        gate.set()
        status, headers, raw = await asking
        assert status == 200 and b"hi" in raw and headers["x-kvferry-transfer-id"] == transfer_id
        (call,) = pair.d.calls
        assert call.params["transfer_id"] == transfer_id and call.params["mode"] == "stream"
        assert pair.p.side.watched == pair.p.side.abandoned == {}
    story = read_story(tmp_path, transfer_id)
    told = ["received", "dispatched", "prefill_done", "bound", "first_token", "last_token"]
    assert [line["event"] for line in story] == told
    assert story[1]["bind"] == "late" and "decode" not in story[1] and story[3]["decode"] == pair.d.url


async def test_at_asks_decode_while_prefill_runs_on(tmp_path: Path) -> None:
    async with binding("at=50", story_dir=str(tmp_path)) as (pair, gate):
        asking = asyncio.create_task(pair.complete(stream=True))
        transfer_id = await transfer_of(pair.p)
        assert await pair.p.side.watch_of(transfer_id) == 50
        await settled(pair)
        assert pair.d.calls == []
        await pair.p.side.reach(transfer_id)
        assert (await pair.d.call()).params["transfer_id"] == transfer_id
        assert not pair.p.calls[0].ended.is_set()
        gate.set()
        assert (await asking)[0] == 200
    events = [line["event"] for line in read_story(tmp_path, transfer_id)]
    assert events.index("bound") < events.index("prefill_done")


@pytest.mark.parametrize("bind", LATER)
@pytest.mark.parametrize("how", ["status", "slam"])
async def test_prefill_fails_before_decode_is_bound(bind: str, how: str, tmp_path: Path) -> None:
    async with binding(bind, story_dir=str(tmp_path)) as (pair, gate):
        pair.p.script = after(gate, slam if how == "slam" else refuse(500, BROKEN))
        asking = asyncio.create_task(pair.complete(stream=True))
        transfer_id = await transfer_of(pair.p)
        gate.set()
        status, headers, raw = await asking
        if how == "status":
            assert (status, json.loads(raw)) == (500, BROKEN)
        else:
            assert status == 502 and error_of(raw)["side"] == "prefill" and error_of(raw)["peer"] == pair.p.url
        assert headers["x-kvferry-transfer-id"] == transfer_id and pair.d.calls == []
        await pair.p.side.abandon_of(transfer_id)
    events = [line["event"] for line in read_story(tmp_path, transfer_id)]
    assert "bound" not in events and events.count("failed") == 1


async def test_prefill_fails_after_decode_is_bound() -> None:
    async with binding("at=50") as (pair, gate):
        pair.p.script, pair.d.script = after(gate, refuse(500, BROKEN)), hang
        asking = asyncio.create_task(pair.complete(stream=True))
        transfer_id = await transfer_of(pair.p)
        await pair.p.side.watch_of(transfer_id)
        await pair.p.side.reach(transfer_id)
        call = await pair.d.call()
        gate.set()
        status, _, raw = await asking
        assert (status, json.loads(raw)) == (500, BROKEN)
        async with asyncio.timeout(1.0):
            await call.cancelled.wait()


@pytest.mark.parametrize("bind", LATER)
async def test_the_client_leaves_before_decode_is_bound(bind: str, tmp_path: Path) -> None:
    async with binding(bind, story_dir=str(tmp_path)) as (pair, _):
        pair.p.script = hang
        _, writer = await pair.raw({"model": MODEL, "prompt": "hi", "stream": True})
        call = await pair.p.call()
        transfer_id = call.params["transfer_id"]
        writer.close()
        async with asyncio.timeout(1.0):
            await call.cancelled.wait()
        _, reason = await pair.p.side.abandon_of(transfer_id)
        assert "client left" in reason and pair.d.calls == []
    last = read_story(tmp_path, transfer_id)[-1]
    assert (last["event"], last["reason"]) == ("failed", "the client left")


@pytest.mark.parametrize("bind", LATER)
async def test_the_deadline_passes_before_decode_is_bound(bind: str) -> None:
    async with binding(bind, request_timeout_s=0.5) as (pair, _):
        status, headers, raw = await pair.complete(stream=True)
        facts = error_of(raw)
        assert status == 504 and facts["code"] == "transfer_timeout"
        assert (facts["side"], facts["peer"]) == ("prefill", pair.p.url) and "0.5 s" in facts["message"]
        assert pair.d.calls == []
        await pair.p.side.abandon_of(headers["x-kvferry-transfer-id"])


async def until(pair: Pair, number: int, ready: bool) -> None:
    """The decode engine of that number is, or is no more, ready."""
    async with asyncio.timeout(SOON):
        while pair.running.pool.engines["decode"][number].ready != ready:
            await pair.running.pool.change()


async def test_decode_is_chosen_among_those_that_are_ready_at_that_time() -> None:
    first, second = Engine("decode"), Engine("decode")
    second.health = 503
    async with binding("late", decode=[first, second], probe_interval_s=0.05) as (pair, gate):
        await until(pair, 0, True)
        asking = asyncio.create_task(pair.complete())
        await pair.p.call()
        first.health, second.health = 503, 200
        await until(pair, 0, False)
        await until(pair, 1, True)
        gate.set()
        assert (await asking)[0] == 200 and (len(first.calls), len(second.calls)) == (0, 1)


@pytest.mark.parametrize("bind", LATER)
async def test_no_decode_engine_is_left_when_one_is_to_be_bound(bind: str) -> None:
    async with binding(bind, probe_interval_s=0.05) as (pair, gate):
        asking = asyncio.create_task(pair.complete())
        transfer_id = await transfer_of(pair.p)
        pair.d.health = 503
        await until(pair, 0, False)
        if bind == "late":
            gate.set()
        else:
            await pair.p.side.watch_of(transfer_id)
            await pair.p.side.reach(transfer_id)
        status, headers, raw = await asking
        facts = error_of(raw)
        assert status == 503 and facts["code"] == "no_decode_engine" and headers["Retry-After"] == "1"
        assert pair.d.url in facts["message"] and facts["transfer_id"] == transfer_id and pair.d.calls == []
        await pair.p.side.abandon_of(transfer_id)
        if bind != "late":
            async with asyncio.timeout(1.0):
                await pair.p.calls[0].cancelled.wait()


@pytest.mark.parametrize("how", ["silent", "refuses", "says that it is over"])
async def test_a_prefill_engine_that_cannot_tell_its_progress_binds_when_it_is_done(how: str) -> None:
    async with binding("at=50") as (pair, gate):
        pair.p.side.refuses_watch = how == "refuses"
        asking = asyncio.create_task(pair.complete())
        transfer_id = await transfer_of(pair.p)
        await pair.p.side.watch_of(transfer_id)
        if how == "says that it is over":
            await pair.p.side.reach(transfer_id, ended=True)
        await settled(pair)
        assert pair.d.calls == [] and not asking.done()
        gate.set()
        assert (await asking)[0] == 200 and len(pair.d.calls) == 1


async def test_each_part_of_a_request_is_bound_by_itself() -> None:
    async def second_fails(call: Call) -> web.StreamResponse:
        return await (refuse(500, BROKEN)(call) if call.body["prompt"] == ["b"] else prefill_ok(call))

    async with binding("at=50") as (pair, gate):
        asking = asyncio.create_task(pair.complete(prompt=["a", "b"]))
        for number in (0, 1):
            await pair.p.side.watch_of(await transfer_of(pair.p, number))
        await pair.p.side.reach(pair.p.calls[1].params["transfer_id"])
        assert (await pair.d.call()).body["prompt"] == pair.p.calls[1].body["prompt"]
        gate.set()
        status, _, raw = await asking
        assert status == 200 and [choice["index"] for choice in json.loads(raw)["choices"]] == [0, 1]
        pair.p.script = second_fails
        status, headers, raw = await pair.complete(prompt=["a", "b"])
        assert (status, json.loads(raw)) == (500, BROKEN)
        for transfer_id in headers["x-kvferry-transfer-id"].split(","):
            if transfer_id not in {call.params["transfer_id"] for call in pair.d.calls}:
                await pair.p.side.abandon_of(transfer_id)


async def test_without_a_prefill_engine_there_is_nothing_to_wait_for() -> None:
    prefill = Engine("prefill")
    await prefill.start()
    prefill.health = 503
    async with binding("late", prefill=[prefill], allow_local_prefill=True, ready=False) as (pair, _):
        await until(pair, 0, True)
        status, _, _ = await pair.post(COMPLETIONS, {"model": MODEL, "prompt": "hi", "max_tokens": 4})
        assert status == 200 and "kv_transfer_params" not in pair.d.calls[0].body and pair.p.calls == []


PAGE = 'vllm:cache_config_info{block_size="16",enable_prefix_caching="False",num_gpu_blocks="%d"} 1.0\n'


async def test_who_is_bound_late_waits_for_room_and_takes_what_is_free_first() -> None:
    """Both decode engines hold one prompt of 40 tokens at a time; the one that is free again first gets the third."""
    decodes = [Engine("decode"), Engine("decode")]
    for engine in decodes:
        engine.metrics = PAGE % 4
    gates = [asyncio.Event(), asyncio.Event()]

    def held(gate: asyncio.Event) -> Any:
        async def script(call: Call) -> web.StreamResponse:
            await gate.wait()
            return await decode_ok(call)

        return script

    async with serving(mode="stream", bind="late", decode=decodes) as pair:
        for engine, gate in zip(decodes, gates, strict=True):
            engine.script = held(gate)
        prompts = [list(range(at, at + 40)) for at in (100, 200, 300)]
        asked = []
        for prompt in prompts:
            asked.append(asyncio.create_task(pair.complete(prompt=prompt)))
            await pair.p.call(len(asked) - 1)
            await settled(pair)
        assert sorted(len(engine.calls) for engine in decodes) == [1, 1], "the third has nowhere to go"
        gates[1].set()
        assert (await asked[2])[0] == 200 and len(decodes[1].calls) == 2
        gates[0].set()
        assert [(await one)[0] for one in asked] == [200, 200, 200]


async def test_who_finds_no_room_goes_into_a_queue_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Room.wait, "__defaults__", (0.1,))
    decode, gate = Engine("decode"), asyncio.Event()
    decode.metrics = PAGE % 4
    decode.script = after(gate, decode_ok)
    async with serving(mode="stream", bind="late", decode=[decode]) as pair:
        asked = [asyncio.create_task(pair.complete(prompt=list(range(at, at + 40)))) for at in (100, 200)]
        await decode.call(1)
        gate.set()
        assert [(await one)[0] for one in asked] == [200, 200]


async def test_the_deadline_passes_while_no_decode_engine_has_room() -> None:
    """Nobody's fault: the prefill engine has done its part, and no decode engine was asked."""
    decode, gate = Engine("decode"), asyncio.Event()
    decode.metrics = PAGE % 4
    decode.script = after(gate, decode_ok)
    async with serving(mode="stream", bind="late", decode=[decode], request_timeout_s=0.6) as pair:
        asked = [asyncio.create_task(pair.complete(prompt=list(range(at, at + 40)))) for at in (100, 200)]
        results = await asyncio.gather(*asked)
        errors = [error_of(raw) for status, _, raw in results if status == 504]
        assert len(errors) == 2 and len(decode.calls) == 1
        assert any("no decode engine had room" in error["message"] for error in errors)
        assert pair.p.url and all(engine.standing.sample().bad == 0 for engine in pair.running.pool.engines["prefill"])
