"""Which engines take a request, as scripted engines see it: C13, sessions, racks, loads, disaggregation, objectives."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp import web
from scripted import (
    COMPLETIONS,
    MODEL,
    SOON,
    Call,
    Engine,
    Pair,
    SideChannel,
    after,
    decode_ok,
    error_of,
    hang,
    prefill_ok,
    prefilled,
    refuse,
    serving,
    slam,
)

from kvferry.router.choice.ask import Ask
from kvferry.router.choice.load import Share
from kvferry.router.engines.pool import Role, no_engine
from kvferry.router.replies import Refusal
from kvferry.router.spec import EngineSpec
from kvferry.story import read_story

LONG, SHORT = list(range(640)), list(range(7))


async def metric(pair: Pair, name: str, **labels: str) -> float:
    async with pair.session.get(pair.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    found = [line for line in lines if line.startswith(name) and all(label in line for label in wanted)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def loads(pair: Pair) -> list[tuple[int, int, int, int]]:
    """(prefill tokens, held tokens, requests, in flight) of each engine."""
    out = []
    for engine in pair.running.pool.all():
        ranks = [rank.load for rank in engine.ranks]
        sums = [sum(getattr(load, name) for load in ranks) for name in ("prefill", "held", "requests")]
        out.append((sums[0], sums[1], sums[2], engine.in_flight))
    return out


# -- data-parallel ranks


class Ranks(Engine):
    """`ranks` data-parallel ranks of `tp` each behind one port: a side channel for the first of each of them, where
    our connector has it."""

    def __init__(self, role: str, ranks: int, tp: int = 1) -> None:
        super().__init__(role)
        self.channels = [self.side, *(SideChannel(role, self.host) for _ in range(ranks - 1))]
        for number, channel in enumerate(self.channels):
            channel.engine_id, channel.tp_size = f"{role}-engine_dp{number}", tp
        self.tp = tp

    async def start(self, keepalive_timeout: float = 75.0) -> None:
        for _ in range(50):
            await super().start(keepalive_timeout)
            try:
                for number, channel in enumerate(self.channels[1:], 1):
                    await channel.start(self.side.port + number * self.tp)
            except zmq.ZMQError:
                await self.stop()
                continue
            return
        raise AssertionError("no free ports in a row")

    async def stop(self) -> None:
        await super().stop()
        for channel in self.channels[1:]:
            await channel.stop()


RANK = "X-data-parallel-rank"


@pytest.mark.parametrize("tp", [1, 2])
async def test_c13_both_legs_are_pinned_and_the_transfer_names_the_rank_of_prefill(tp: int) -> None:
    p, d = Ranks("prefill", 2, tp), Ranks("decode", 2, tp)
    gate = asyncio.Event()
    p.script = after(gate, prefill_ok)
    async with serving(prefill=[p], decode=[d], spec={"dp": 2}, decode_spec={"dp": 2}) as pair:
        asking = [asyncio.create_task(pair.complete(prompt=f"{number} " * 40)) for number in range(20)]
        await p.call(19)
        await d.call(19)
        gate.set()
        assert {(await task)[0] for task in asking} == {200}
        by_id = {call.params["transfer_id"]: call.headers[RANK] for call in p.calls}
        assert sorted(by_id.values()) == ["0"] * 10 + ["1"] * 10
        for call in d.calls:
            rank = int(by_id[call.params["transfer_id"]])
            assert call.params["remote_dp_rank"] == rank
            assert call.params["remote_port"] == p.side.port + rank * tp
            assert call.params["remote_engine_id"] == f"prefill-engine_dp{rank}"
        assert sorted(call.headers[RANK] for call in d.calls) == ["0"] * 10 + ["1"] * 10
        assert loads(pair) == [(0, 0, 0, 0)] * 2


async def test_c13_a_client_cannot_choose_the_rank_and_what_it_left_is_abandoned_at_its_rank() -> None:
    p = Ranks("prefill", 2)
    async with serving(prefill=[p], spec={"dp": 2}) as pair:
        status, _, _ = await pair.post(COMPLETIONS, {"model": MODEL, "prompt": "a"}, X_data_parallel_rank="7")
        assert status == 200 and p.calls[0].headers[RANK] in "01" and RANK not in pair.d.calls[0].headers
        p.script = pair.d.script = hang
        leaving = [asyncio.create_task(pair.complete(prompt="b")) for _ in range(2)]
        calls = [await p.call(1), await p.call(2)]
        assert {call.headers[RANK] for call in calls} == {"0", "1"}
        for task in leaving:
            task.cancel()
        for call in calls:
            await p.channels[int(call.headers[RANK])].abandon_of(call.params["transfer_id"])


async def test_ranks_are_found_from_the_engine() -> None:
    p = Ranks("prefill", 2)
    p.metrics = "".join(f'vllm:num_requests_running{{engine="{n}",model_name="m"}} 0\n' for n in (0, 1))
    async with serving(prefill=[p]) as pair:
        await pair.complete()
        assert p.calls[0].headers[RANK] == "0" and len(pair.running.pool.engines["prefill"][0].ranks) == 2
        assert pair.d.calls[0].params["remote_dp_rank"] == 0


async def test_upstream_push_names_the_rank_as_vllm_does() -> None:
    p = Engine("prefill")

    async def upstream(call: Call) -> web.StreamResponse:
        return prefilled(call, kv_transfer_params={"remote_engine_id": "E_dp1"})

    p.script = upstream
    spec = {"dp": 2, "engine_id": "E"}
    async with serving(prefill=[p], connector="upstream-push", spec=spec) as pair:
        for _ in range(2):
            assert (await pair.complete())[0] == 200
        for call in pair.d.calls:
            rank = call.params["remote_dp_rank"]
            assert call.params["remote_engine_id"] == f"E_dp{rank}"
            assert call.params["remote_port"] == p.side.port + rank


# -- loads


async def begun(pair: Pair, **body: Any) -> asyncio.Task[Any]:
    """A request whose legs have arrived."""
    task = asyncio.create_task(pair.complete(**body))
    await pair.p.call()
    await pair.d.call()
    return task


async def test_loads_while_it_runs_and_after() -> None:
    gate, last = asyncio.Event(), asyncio.Event()

    async def slow(call: Call) -> web.StreamResponse:
        await gate.wait()
        return await prefill_ok(call)

    async with serving() as pair:
        pair.p.script, pair.d.script = slow, after(last, decode_ok)
        task = await begun(pair, prompt=LONG)
        assert loads(pair) == [(640, 0, 1, 1), (0, 640, 1, 1)]
        gate.set()
        await pair.p.calls[0].ended.wait()
        async with asyncio.timeout(SOON):
            while loads(pair)[0][0]:
                await asyncio.sleep(0)
        assert loads(pair) == [(0, 0, 1, 1), (0, 640, 1, 1)]
        last.set()
        assert (await task)[0] == 200 and loads(pair) == [(0, 0, 0, 0)] * 2


@pytest.mark.parametrize("bind", ["early", "late"])
@pytest.mark.parametrize("end", ["ok", "stream", "prefill fails", "decode fails", "slam", "leaves", "late"])
async def test_every_end_takes_the_load_away(end: str, bind: str) -> None:
    limit = 0.3 if end == "late" else 0.0
    async with serving(mode="stream", bind=bind, request_timeout_s=limit) as pair:
        if end == "prefill fails":
            pair.p.script = refuse(500, {"error": {"message": "x"}})
        if end in ("decode fails", "slam"):
            pair.d.script = slam if end == "slam" else refuse(503, {"error": {"message": "x"}})
        if end in ("leaves", "late"):
            pair.p.script = hang
        asking = asyncio.create_task(pair.complete(prompt=LONG, stream=end == "stream"))
        if end == "leaves":
            await pair.p.call()
            assert loads(pair)[0][0] == 640
            asking.cancel()
            await pair.p.calls[0].cancelled.wait()
        await asyncio.gather(asking, return_exceptions=True)
        async with asyncio.timeout(SOON):
            while loads(pair) != [(0, 0, 0, 0)] * 2:
                await asyncio.sleep(0.01)


async def test_no_decode_engine_leaves_no_load_on_prefill() -> None:
    async with serving() as pair:
        pool = pair.running.pool
        pick = pool.pick

        def gone(role: Role, *args: Any, **more: Any) -> Any:
            if role == "decode":
                raise no_engine("decode", [])
            return pick(role, *args, **more)

        pool.pick = gone  # type: ignore[method-assign]
        status, _, raw = await pair.complete()
        assert status == 503 and error_of(raw)["code"] == "no_decode_engine"
        assert loads(pair) == [(0, 0, 0, 0)] * 2


# -- policies in the router


@contextlib.asynccontextmanager
async def all_ready(**more: Any) -> AsyncIterator[Pair]:
    async with serving(**more) as pair:
        async with asyncio.timeout(SOON):
            while not all(engine.ready for engine in pair.running.pool.all()):
                await pair.running.pool.change()
        yield pair


def engines(role: str, count: int) -> list[Engine]:
    return [Engine(role) for _ in range(count)]


async def test_a_known_prefix_goes_where_it_was_until_that_is_busier() -> None:
    async with all_ready(prefill=engines("prefill", 2), prefill_policy="prefix_aware") as pair:
        for number in range(3):
            assert (await pair.complete(prompt=[*LONG, number]))[0] == 200
        assert sorted(len(p.calls) for p in pair.prefills) == [0, 3]
        busy = max(pair.prefills, key=lambda p: len(p.calls))
        busy.script = hang
        hanging = []
        async with asyncio.timeout(SOON):
            while min(len(p.calls) for p in pair.prefills) == 0:
                at = sum(len(p.calls) for p in pair.prefills)
                hanging.append(asyncio.create_task(pair.complete(prompt=[*LONG, *range(9000 + at, 9300 + at)])))
                while sum(len(p.calls) for p in pair.prefills) == at:
                    await asyncio.sleep(0)
        assert 2 <= len(hanging) <= 4, "each adds what it does not share"
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)


async def test_sessions_stick_on_both_sides_until_they_are_finished() -> None:
    policies = {"prefill_policy": "session", "decode_policy": "session"}
    async with all_ready(prefill=engines("prefill", 3), decode=engines("decode", 3), **policies) as pair:
        for number in range(6):
            assert (await pair.complete(prompt=f"{number}", user="u"))[0] == 200
            body = {"model": MODEL, "prompt": f"x{number}", "user": "u"}
            assert (await pair.post(COMPLETIONS, body, X_Session_ID="other"))[0] == 200
        for side in (pair.prefills, pair.decodes):
            counts = [{"u": 0, "other": 0} for _ in side]
            for engine, count in zip(side, counts, strict=True):
                for call in engine.calls:
                    count[call.headers.get("X-Session-ID", "u")] += 1
            for name in ("u", "other"):
                assert sorted(count[name] for count in counts) == [0, 0, 6]
        ended = pair.url + "/finish_session"
        for params, status in (({"session_id": "u"}, 200), ({"session_id": "u"}, 404), ({}, 400)):
            async with pair.session.post(ended, params=params) as response:
                assert response.status == status, params


async def test_decode_in_the_rack_of_prefill() -> None:
    p = engines("prefill", 2)
    d = engines("decode", 2)
    racks = {id(p[0]): "r0", id(p[1]): "r1", id(d[0]): "r1", id(d[1]): "r0"}
    plain = Engine.spec

    def spec(engine: Engine, **more: Any) -> EngineSpec:
        return plain(engine, topology=racks[id(engine)], **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "spec", spec)
        async with all_ready(prefill=p, decode=d) as pair:
            for number in range(6):
                assert (await pair.complete(prompt=[number]))[0] == 200
    ids = [{call.params["transfer_id"] for call in engine.calls} for engine in (*p, *d)]
    assert len(ids[0]) == 3 and ids[0] == ids[3] and ids[1] == ids[2]


async def test_pick_avoids_what_it_is_told_to() -> None:
    async with all_ready(prefill=engines("prefill", 3)) as pair:
        pool, urls = pair.running.pool, [p.url for p in pair.prefills]
        role: Role = "prefill"
        for _ in range(5):
            assert pool.pick(role, Ask(), avoid=frozenset(urls[:2])).url == urls[2]
            assert pool.pick(role, MODEL, avoid=frozenset(urls[1:])).url == urls[0]
        assert pool.pick(role, None, avoid=frozenset(urls)).url in urls, "rather than none"
        with pytest.raises(Refusal, match="was tried already") as caught:
            pool.pick(role, Ask(avoid=frozenset(urls)))
        assert caught.value.http_status == 503


async def test_kv_events_of_the_engine_decide() -> None:
    p = engines("prefill", 2)
    sockets = []
    specs: dict[int, int] = {}
    for engine in p:
        socket = zmq.asyncio.Context.instance().socket(zmq.XPUB)
        socket.linger = 0
        specs[id(engine)] = socket.bind_to_random_port("tcp://127.0.0.1")
        sockets.append(socket)
    plain = Engine.spec

    def spec(engine: Engine, **more: Any) -> EngineSpec:
        events = {"kv_events": f"127.0.0.1:{specs[id(engine)]}"} if id(engine) in specs else {}
        return plain(engine, **events, **more)

    def batch(kind: str, **fields: Any) -> list[bytes]:
        return [b"", (0).to_bytes(8, "big"), msgspec.msgpack.encode([0.0, [{"type": kind, **fields}], 0])]

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Engine, "spec", spec)
            async with all_ready(prefill=p, prefill_policy="prefix_aware") as pair:
                for socket in sockets:
                    assert await asyncio.wait_for(socket.recv(), SOON) == b"\x01", "the router has subscribed"
                hashes = [bytes([number]) for number in range(40)]
                stored = {"parent_block_hash": None, "token_ids": LONG, "block_size": 16, "medium": "GPU"}
                await sockets[1].send_multipart(batch("BlockStored", block_hashes=hashes, **stored))
                ranks = [engine.ranks[0] for engine in pair.running.pool.engines["prefill"]]
                async with asyncio.timeout(SOON):
                    while not len(ranks[1].blocks or ()):
                        await asyncio.sleep(0.005)
                for number in range(4):
                    await pair.complete(prompt=[*LONG, number])
                assert [len(engine.calls) for engine in p] == [0, 4]
    finally:
        for socket in sockets:
            socket.close()


# -- with or without a transfer


async def test_short_prompts_stay_on_decode(tmp_path: Path) -> None:
    async with serving(disaggregate=100, story_dir=str(tmp_path)) as pair:
        for prompt, number in ((SHORT, 0), (LONG, 1), (LONG, 1)):
            status, headers, _ = await pair.complete(prompt=prompt)
            assert status == 200 and len(pair.p.calls) == number
        assert "kv_transfer_params" not in pair.d.calls[0].body and "kv_transfer_params" in pair.d.calls[1].body
        assert "kv_transfer_params" not in pair.d.calls[2].body, "all of it but the last token is on D by now"
        assert await metric(pair, "kvferry:disagg_decision_total", decision_type="decode-only") == 2
        assert await metric(pair, "kvferry:disagg_decision_total", decision_type="prefill-decode") == 1
        story = read_story(tmp_path, headers["x-kvferry-transfer-id"])
        assert [line["event"] for line in story] == ["received", "dispatched", "first_token", "last_token"]
        assert loads(pair) == [(0, 0, 0, 0)] * 2


async def test_prompt_logprobs_are_always_prefills() -> None:
    async with serving(disaggregate=100) as pair:
        await pair.complete(prompt=SHORT, prompt_logprobs=1)
        assert len(pair.p.calls) == 1


async def test_auto_measures_first_and_then_leaves_short_ones_on_decode() -> None:
    """Prefill takes 0.1 ms per token, and decode's first token comes 30 ms after it: worth 300 tokens when idle."""

    async def prefill(call: Call) -> web.StreamResponse:
        await asyncio.sleep(1e-4 * len(call.body["prompt"]))
        return await prefill_ok(call)

    async def decode(call: Call) -> web.StreamResponse:
        if "kv_transfer_params" in call.body:
            await pair.p.calls[-1].ended.wait()
            await asyncio.sleep(0.03)
        return await decode_ok(call)

    async with serving(disaggregate="auto") as pair:
        pair.p.script, pair.d.script = prefill, decode
        for number, length in enumerate((40, 900, 300, 600, 100)):
            assert (await pair.complete(prompt=[number + 1] * length, stream=True))[0] == 200
        assert len(pair.p.calls) == 5, "nothing was known yet"
        costs = pair.running.selection.costs
        assert (costs.prefill.fit() or (0, 0))[1] == pytest.approx(1e-4, rel=0.5)
        await pair.complete(prompt=[11] * 20, stream=True)
        assert len(pair.p.calls) == 5
        await pair.complete(prompt=[12] * 3000, stream=True)
        assert len(pair.p.calls) == 6


# -- the TTFT objective


async def measured(pair: Pair) -> None:
    """As if prefill had been seen to take 1 ms per token."""
    for tokens in range(100, 1000, 100):
        pair.running.selection.costs.prefill.add(tokens, tokens / 1000)


@contextlib.asynccontextmanager
async def busy(action: str, **more: Any) -> AsyncIterator[tuple[Pair, asyncio.Task[Any], asyncio.Event]]:
    """With an objective of 500 ms, and 640 tokens being computed until the event."""
    gate = asyncio.Event()
    async with serving(ttft_slo_ms=500.0, slo_action=action, **more) as pair:
        await measured(pair)
        pair.p.script = after(gate, prefill_ok)
        first = asyncio.create_task(pair.complete(prompt=LONG))
        await pair.p.call()
        yield pair, first, gate
        gate.set()
        await first


async def test_shed() -> None:
    async with busy("shed") as (pair, first, gate):
        status, headers, raw = await pair.complete(prompt=[9] * 100)
        assert status == 429 and error_of(raw)["code"] == headers["x-kvferry-reason"] == "ttft_slo"
        assert int(headers["Retry-After"]) >= 1 and "objective is 500 ms" in error_of(raw)["message"]
        gate.set()
        assert (await first)[0] == 200
        assert (await pair.complete(prompt=LONG))[0] == 200, "idle again"
        counts = {action: await metric(pair, "kvferry_router_slo_decisions_total", action=action) for action in
                  ("admitted", "shed", "queued", "colocated")}  # fmt: skip
        assert counts == {"admitted": 2, "shed": 1, "queued": 0, "colocated": 0}


async def test_queue() -> None:
    async with busy("queue", slo_queue=1) as (pair, first, gate):
        second = asyncio.create_task(pair.complete(prompt=[9] * 100))
        async with asyncio.timeout(SOON):
            while await metric(pair, "kvferry_router_flow_control_queue_size") != 1:
                await asyncio.sleep(0.005)
        status, headers, _ = await pair.complete(prompt=[8] * 100)
        assert (status, headers["x-kvferry-reason"]) == (429, "ttft_slo"), "the queue is full"
        assert len(pair.p.calls) == 1
        gate.set()
        assert ((await first)[0], (await second)[0]) == (200, 200)
        assert await metric(pair, "kvferry_router_flow_control_queue_size") == 0
        assert await metric(pair, "kvferry_router_slo_decisions_total", action="queued") == 1


async def test_a_client_that_leaves_the_queue_is_no_load() -> None:
    async with busy("queue") as (pair, _, _):
        second = asyncio.create_task(pair.complete(prompt=[9] * 100))
        gate = pair.running.selection.gate
        assert gate is not None
        async with asyncio.timeout(SOON):
            while not gate.waiting:
                await asyncio.sleep(0.005)
            second.cancel()
            while gate.waiting:
                await asyncio.sleep(0.005)
        assert len(pair.p.calls) == 1 and loads(pair)[0] == (640, 0, 1, 1)


async def test_the_deadline_passes_in_the_queue() -> None:
    async with serving(ttft_slo_ms=500.0, request_timeout_s=0.1) as pair:
        await measured(pair)
        share = Share(pair.running.pool.engines["prefill"][0].ranks[0].load, prefill=640)
        status, headers, raw = await pair.complete(prompt=[9] * 100)
        assert (status, headers["x-kvferry-reason"]) == (429, "ttft_slo")
        assert "deadline" in error_of(raw)["message"] and pair.p.calls == []
        share.release()


async def test_colocate() -> None:
    async with busy("colocate") as (pair, _, _):
        status, _, raw = await pair.complete(prompt=[9] * 100)
        assert status == 200 and json.loads(raw)["choices"]
        assert len(pair.p.calls) == 1 and "kv_transfer_params" not in pair.d.calls[-1].body
        assert await metric(pair, "kvferry:disagg_decision_total", decision_type="decode-only") == 1
