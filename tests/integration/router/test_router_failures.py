"""Who hears of a failure, and how fast: rows C20 to C23, C26, C28 to C31, C59; the routers' verdicts and stories."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from aiohttp import web
from scripted import (
    COMPLETIONS,
    MODEL,
    SOON,
    Call,
    Engine,
    after,
    begin_stream,
    decode_ok,
    error_of,
    event,
    hang,
    prefill_ok,
    refuse,
    serving,
    slam,
    stream,
)

from kvferry.router.dispatch import dispatch
from kvferry.story import read_story

MIB = 1024 * 1024
TOO_LONG = {"error": {"message": "This model's maximum context length is 8", "type": "BadRequestError", "code": 400}}


async def cancelled(call: Call, within: float = 1.0) -> None:
    async with asyncio.timeout(within):
        await call.cancelled.wait()


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 401, 404, 422, 500])
async def test_c20_prefills_error_is_the_clients(mode: str, stream: bool, status: int) -> None:
    body = {"error": TOO_LONG["error"] | {"code": status}}
    async with serving(mode=mode) as pair:
        pair.p.script, pair.d.script = refuse(status, body), hang
        got, headers, raw = await pair.complete(stream=stream)
        assert (got, json.loads(raw)) == (status, body)
        assert headers["Content-Type"].startswith("application/json")
        assert len(pair.p.calls) == 1
        # push started it at once; pull asks whether D has better words for what is the client's own fault
        assert len(pair.d.calls) <= 1 and (mode == "push" or status == 500 or pair.d.calls)
        for call in pair.d.calls:
            await cancelled(call)


@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_c20_decodes_refusal_is_of_the_clients_own_request(mode: str) -> None:
    """P was asked for one token, D for the client's 64: the message that names a limit is D's."""
    own = {"error": TOO_LONG["error"] | {"message": "64 tokens are too many"}}
    async with serving(mode=mode) as pair:
        pair.p.script, pair.d.script = refuse(400, TOO_LONG), refuse(400, own)
        status, _, raw = await pair.complete(max_tokens=64)
        assert (status, json.loads(raw)) == (400, own)
        assert (len(pair.p.calls), len(pair.d.calls)) == (1, 1)


async def test_c20_of_upstream_pull_the_refusal_is_prefills() -> None:
    """C20: D can't be asked before P has answered; P was asked for one token, so its message may say so."""
    async with serving(connector="upstream-pull") as pair:
        pair.p.script = refuse(400, TOO_LONG)
        status, _, raw = await pair.complete(max_tokens=64)
        assert (status, json.loads(raw)) == (400, TOO_LONG)
        assert pair.p.calls[0].body["max_tokens"] == 1 and pair.d.calls == []


async def test_c20_the_fields_that_the_engine_counts_are_the_clients() -> None:
    """vLLM's validation messages count the body's fields; the transfer's parameters are not the client's."""

    async def counts(call: Call) -> web.StreamResponse:
        said = {"error": {"message": f"'input': '<dict of {len(call.body)} items>'", "code": 400}}
        return web.json_response(said, status=400)

    async with serving() as pair:
        pair.p.script = pair.d.script = counts
        status, _, raw = await pair.post(COMPLETIONS, {"prompt": "", "stop": ["x"], "prompt_logprobs": 1})
        assert status == 400
        assert "<dict of 3 items>" in json.loads(raw)["error"]["message"]


async def test_c20_prefills_error_wins_over_a_decode_that_fails_first() -> None:
    loop = asyncio.get_running_loop()
    gate = asyncio.Event()

    async def answers(call: Call) -> web.StreamResponse:
        loop.call_later(0.05, gate.set)
        return await refuse(500, {"error": {"message": "the KV never came"}})(call)

    async with serving() as pair:
        pair.p.script, pair.d.script = after(gate, refuse(400, TOO_LONG)), answers
        for stream in (False, True):
            gate.clear()
            status, _, raw = await pair.complete(stream=stream)
            assert (status, json.loads(raw)) == (400, TOO_LONG)


def peak(*, reset: bool = False) -> int:
    """The most memory that this process had since the last reset, in bytes."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_c21_an_error_of_100_mb(side: str) -> None:
    async def flood(call: Call) -> web.StreamResponse:
        response = web.StreamResponse(status=400, headers={"Content-Type": "application/json"})
        await response.prepare(call.request)
        piece = b"x" * MIB
        for _ in range(100):
            await response.write(piece)
        return response

    async with serving() as pair:
        (pair.p if side == "prefill" else pair.d).script = flood
        (pair.d if side == "prefill" else pair.p).script = hang if side == "prefill" else prefill_ok
        before = peak(reset=True)
        status, _, raw = await pair.complete()
        assert status == 400 and len(raw) <= MIB
        assert "cut" in error_of(raw)["message"]
        assert peak() - before < 32 * MIB


@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_c22_decode_closes_before_its_headers(mode: str) -> None:
    async with serving(mode=mode) as pair:
        pair.d.script = slam
        status, headers, raw = await pair.complete(stream=True)
        facts = error_of(raw)
        assert status == 502 and facts["side"] == "decode" and facts["peer"] == pair.d.url
        transfer_id = headers["x-kvferry-transfer-id"]
        assert facts["transfer_id"] == transfer_id == pair.d.calls[0].params["transfer_id"]
        _, reason = await pair.p.side.abandon_of(transfer_id)
        assert pair.d.url in reason


@pytest.mark.parametrize("streamed", [True, False])
async def test_c22_never_a_200_with_nothing_in_it(streamed: bool) -> None:
    async def empty(call: Call) -> web.StreamResponse:
        return await stream(call, []) if streamed else web.Response(body=b"", content_type="application/json")

    async with serving() as pair:
        pair.d.script = empty
        status, headers, raw = await pair.complete(stream=streamed)
        assert status == 502 and error_of(raw)["side"] == "decode"
        await pair.p.side.abandon_of(headers["x-kvferry-transfer-id"])


@pytest.mark.parametrize("begun", [False, True])
async def test_c23_decode_is_cancelled_when_prefill_fails(begun: bool) -> None:
    loop = asyncio.get_running_loop()

    async def fails(call: Call) -> web.StreamResponse:
        gate = asyncio.Event()
        loop.call_later(0.1, gate.set)
        return await after(gate, refuse(500, {"error": {"message": "out of blocks"}}))(call)

    async def waits(call: Call) -> web.StreamResponse:
        if begun:
            await begin_stream(call)  # 200 and headers, as vLLM sends them before its first token
        return await hang(call)

    async with serving() as pair:
        pair.p.script, pair.d.script = fails, waits
        started = time.monotonic()
        status, _, raw = await pair.complete(stream=True)
        assert status == 500 and json.loads(raw)["error"]["message"] == "out of blocks"
        assert time.monotonic() - started < 1.5
        await cancelled(pair.d.calls[0])
        assert pair.d.calls[0].cancelled_at - started < 1.1


@pytest.mark.parametrize("who", ["prefill", "decode"])
async def test_c26_the_deadline(who: str) -> None:
    async with serving(request_timeout_s=1.0) as pair:
        mute = pair.p if who == "prefill" else pair.d
        good, mute.script = mute.script, hang
        if who == "prefill":
            pair.d.script = hang
        started = time.monotonic()
        status, headers, raw = await pair.complete(stream=True)
        assert status == 504 and 1.0 <= time.monotonic() - started < 2.0
        facts = error_of(raw)
        assert facts["code"] == "transfer_timeout" and (facts["side"], facts["peer"]) == (who, mute.url)
        await cancelled(pair.d.calls[0])
        if who == "prefill":
            await cancelled(pair.p.calls[0])
        await pair.p.side.abandon_of(headers["x-kvferry-transfer-id"])
        mute.script = good
        pair.d.script = decode_ok
        assert (await pair.complete())[0] == 200


async def test_c26_the_deadline_in_the_middle_of_a_stream() -> None:
    async def stalls(call: Call) -> web.StreamResponse:
        await (await begin_stream(call)).write(event("a"))
        return await hang(call)

    async with serving(request_timeout_s=0.5) as pair:
        pair.d.script = stalls
        status, _, raw = await pair.complete(stream=True)
        assert status == 200 and raw.startswith(event("a"))
        assert error_of(raw[len(event("a")) :].removeprefix(b"data: "))["code"] == "transfer_timeout"
        await cancelled(pair.d.calls[0])


async def test_c28_no_prefill_is_a_503_not_a_decode_alone() -> None:
    async with serving() as pair:
        await pair.p._runner.cleanup()
        started = time.monotonic()
        for _ in range(2):  # found out by the request, then known
            status, headers, raw = await pair.complete()
            facts = error_of(raw)
            assert status == 503 and pair.p.url in facts["message"] and headers["Retry-After"] == "1"
        assert time.monotonic() - started < 1.0
        assert facts["code"] == "no_prefill_engine"
        async with pair.session.get(pair.url + "/health") as response:
            assert response.status == 503 and (await response.json())["missing"] == ["prefill"]
        for call in pair.d.calls:
            await call.ended.wait()


async def test_c28_local_prefill_only_by_flag_and_counted() -> None:
    prefill = Engine("prefill")
    await prefill.start()
    await prefill.stop()
    prefill.stop = prefill.side.stop  # type: ignore[method-assign]
    async with serving(prefill=[prefill], allow_local_prefill=True, ready=False) as pair:
        async with asyncio.timeout(SOON):
            while pair.running.pool.missing() != ["prefill"]:
                await pair.running.pool.change()
        for number in (1, 2):
            assert (await pair.complete())[0] == 200
            async with pair.session.get(pair.url + "/metrics") as response:
                assert f"kvferry_router_local_prefills_total {number}.0" in await response.text()
        assert "kv_transfer_params" not in pair.d.calls[0].body


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_c29_an_engine_without_our_connector_is_refused_at_readiness(role: str) -> None:
    engine = Engine(role)
    async with serving(**{role: [engine]}, ready=False) as pair:
        await engine.side.stop()
        watched = pair.running.pool.engines[role][0]  # type: ignore[index]
        started = time.monotonic()
        async with asyncio.timeout(SOON):
            while "KVFerryConnector" not in watched.reason:
                await pair.running.pool.change()
        status, _, raw = await pair.complete()
        assert time.monotonic() - started < 5.0
        message = error_of(raw)["message"]
        assert status == 503 and engine.url in message and "KVFerryConnector" in message
        assert pair.p.calls == pair.d.calls == []


async def test_c29_roles_and_identity_are_checked_at_readiness() -> None:
    swapped, other = Engine("prefill"), Engine("prefill")
    swapped.side.role = "consumer"
    other.side.tp_size = 2
    async with serving(prefill=[swapped, other], spec={"tp": 1}, ready=False) as pair:
        pool = pair.running.pool
        async with asyncio.timeout(SOON):
            while any(engine.reason == "not probed yet" for engine in pool.all()):
                await pool.change()
        _, _, raw = await pair.complete()
        message = error_of(raw)["message"]
        assert "as consumer" in message and "told tp=1, its side channel says 2" in message


@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_c29_a_prefill_that_gives_no_transfer_parameters(mode: str) -> None:
    async def plain(call: Call) -> web.StreamResponse:
        return web.json_response({"choices": [{"index": 0, "text": "x"}], "kv_transfer_params": None})

    async with serving(mode=mode) as pair:
        pair.p.script, pair.d.script = plain, hang
        started = time.monotonic()
        status, _, raw = await pair.complete()
        facts = error_of(raw)
        assert status == 502 and time.monotonic() - started < 5.0
        assert facts["peer"] == pair.p.url and "KVFerryConnector" in facts["message"]


async def test_c29_upstream_prefill_without_its_connector() -> None:
    for connector in ("upstream-pull", "upstream-push"):
        async with serving(connector=connector, spec={"engine_id": "E"}) as pair:
            pair.d.script = hang
            status, _, raw = await pair.complete()
            facts = error_of(raw)
            assert status == 502 and facts["peer"] == pair.p.url and "kv_transfer_params" in facts["message"]


async def test_c30_a_client_that_leaves_before_any_byte_cancels_both_legs() -> None:
    async with serving() as pair:
        pair.p.script = pair.d.script = hang
        _, writer = await pair.raw({"model": MODEL, "prompt": "x" * 100, "stream": True})
        p, d = await pair.p.call(), await pair.d.call()
        left = time.monotonic()
        writer.close()
        for call in (p, d):
            await cancelled(call)
            assert call.cancelled_at - left < 1.0
        _, reason = await pair.p.side.abandon_of(p.params["transfer_id"])
        assert "client left" in reason


@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_c31_a_client_that_leaves_between_prefill_and_decode(mode: str) -> None:
    async with serving(mode=mode) as pair:
        pair.d.script = hang
        _, writer = await pair.raw({"model": MODEL, "prompt": "hi"})
        d = await pair.d.call()
        await pair.p.calls[0].ended.wait()
        left = time.monotonic()
        writer.close()
        await cancelled(d)
        at, _ = await pair.p.side.abandon_of(d.params["transfer_id"])
        assert at - left < 2.0


async def test_c31_nothing_is_abandoned_once_decode_has_its_kv() -> None:
    async def stalls(call: Call) -> web.StreamResponse:
        await (await begin_stream(call)).write(event("a"))
        return await hang(call)

    async with serving() as pair:
        pair.d.script = stalls
        reader, writer = await pair.raw({"model": MODEL, "prompt": "hi", "stream": True})
        await reader.readuntil(event("a"))
        writer.close()
        await cancelled(pair.d.calls[0])
    assert pair.p.side.abandoned == {}


@pytest.mark.parametrize("status", [400, 404])
async def test_c59_decode_turns_the_request_down(status: int) -> None:
    body = {"error": {"message": "chat template failed", "type": "BadRequestError", "code": status}}
    async with serving() as pair:
        pair.d.script = refuse(status, body)
        started = time.monotonic()
        got, headers, raw = await pair.complete()
        assert (got, json.loads(raw)) == (status, body)
        at, _ = await pair.p.side.abandon_of(headers["x-kvferry-transfer-id"])
        assert at - started < 2.0


@pytest.mark.parametrize("shape", ["status", "event"])
async def test_why_a_transfer_failed_is_in_the_error(shape: str) -> None:
    own = {"error": {"message": "internal error", "type": "InternalServerError", "code": 500}}

    async def fails(call: Call) -> web.StreamResponse:
        if shape == "status":
            return web.json_response(own, status=500)
        return await stream(call, [f"data: {json.dumps(own)}\n\n".encode(), b"data: [DONE]\n\n"])

    async with serving() as pair:
        pair.d.script = fails
        status, _, raw = await pair.complete(stream=shape == "event")
        assert (status, json.loads(raw)) == (500, own)  # no verdict: the engine's own words
        pair.d.side.verdict = ("failed", "transfer_timeout", "no registration within 30 s")
        status, headers, raw = await pair.complete(stream=shape == "event")
        facts = error_of(raw)
        assert status == 504 and facts["code"] == "transfer_timeout" and facts["side"] == "decode"
        assert "no registration within 30 s" in facts["message"] and pair.p.url in facts["message"]
        assert pair.d.side.asked_why[-1] == headers["x-kvferry-transfer-id"] == facts["transfer_id"]


async def test_the_story_of_a_request(tmp_path: Path) -> None:
    async with serving(story_dir=str(tmp_path)) as pair:
        _, headers, _ = await pair.complete(stream=True)
        pair.d.script = slam
        _, failed, _ = await pair.complete(stream=True)
    story = read_story(tmp_path, headers["x-kvferry-transfer-id"])
    names = [line["event"] for line in story]
    assert names[:2] == ["received", "dispatched"] and names[-1] == "last_token"
    assert sorted(names[2:-1]) == ["first_token", "prefill_done"]
    assert {line["side"] for line in story} == {"router"}
    last = read_story(tmp_path, failed["x-kvferry-transfer-id"])[-1]
    assert last["event"] == "failed" and pair.d.url in last["reason"]


async def test_health_and_metrics() -> None:
    async with serving() as pair:
        assert (await pair.complete(stream=True))[0] == 200
        assert (await pair.complete())[0] == 200
        pair.p.script, pair.d.script = refuse(400, TOO_LONG), hang
        assert (await pair.complete())[0] == 400
        async with pair.session.get(pair.url + "/health") as response:
            facts = await response.json()
            assert response.status == 200 and facts["status"] == "ready" and len(facts["engines"]) == 2
        async with pair.session.get(pair.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
    for line in (
        f'kvferry_router_requests_total{{mode="push",route="{COMPLETIONS}",status="200"}} 2.0',
        f'kvferry_router_requests_total{{mode="push",route="{COMPLETIONS}",status="400"}} 1.0',
        f'kvferry_router_request_errors_total{{code="engine_error",route="{COMPLETIONS}",side="prefill"}} 1.0',
        f'kvferry_router_pd_prefill_errors_total{{code="engine_error",engine="{pair.p.url}"}} 1.0',
        'kvferry_router_request_ttft_seconds_count{streaming="true"} 1.0',
        'kvferry_router_request_ttft_seconds_count{streaming="false"} 1.0',
        f'kvferry_router_request_duration_seconds_count{{route="{COMPLETIONS}"}} 3.0',
        f'kvferry_router_worker_health{{engine="{pair.p.url}",role="prefill"}} 1.0',
        'kvferry_router_pd_requests_total{mode="push"} 3.0',
    ):
        assert line in lines, line


async def test_c27_an_engine_that_drains_gets_no_new_request() -> None:
    first, second = Engine("decode"), Engine("decode")
    async with serving(decode=[first, second], probe_interval_s=0.05) as pair:
        pool = pair.running.pool
        async with asyncio.timeout(SOON):
            while not all(engine.ready for engine in pool.all()):
                await pool.change()
            first.health = 503
            while pool.engines["decode"][0].ready:
                await pool.change()
            for _ in range(3):
                assert (await pair.complete())[0] == 200
            assert (len(first.calls), len(second.calls)) == (0, 3)
            first.health = 200
            while not pool.engines["decode"][0].ready:
                await pool.change()
            for _ in range(2):
                assert (await pair.complete())[0] == 200
            assert len(first.calls) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_of_decode_outlives_its_prefill(stream: bool) -> None:
    """D's token shows that the KV has landed: P may die before it says so. What only P knows isn't told then."""

    async def late(call: Call) -> web.StreamResponse:
        answered.set()
        return await decode_ok(call)

    answered = asyncio.Event()
    async with serving() as pair:
        pair.p.script, pair.d.script = after(answered, slam), late
        begun = time.monotonic()
        status, _, raw = await pair.complete(stream=stream, stream_options={"include_usage": True} if stream else None)
        assert (status, time.monotonic() - begun < SOON) == (200, True), raw
        if stream:
            assert raw.endswith(b"data: [DONE]\n\n") and b"error" not in raw
            raw = raw.split(b"\n\n")[-3].removeprefix(b"data: ")
        told = json.loads(raw)["usage"]
        assert told["completion_tokens"] > 0 and not told.get("prompt_tokens_details")
        assert len(pair.d.calls) == 1


async def test_prefill_is_heard_out_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """D's answer went out whole before P's word: that is waited for beside, and not for long."""
    monkeypatch.setattr(dispatch, "LAST_WORD_S", 0.2)
    async with serving() as pair:
        pair.p.script = hang
        status, _, raw = await pair.complete(stream=True)
        assert status == 200 and raw.endswith(b"data: [DONE]\n\n")
        p, d = (pair.running.pool.engines[role][0] for role in ("prefill", "decode"))
        assert (p.in_flight, d.in_flight) == (1, 0) and p.ranks[0].load.prefill == 0
        await cancelled(pair.p.calls[0])
        async with asyncio.timeout(SOON):
            while p.in_flight:
                await asyncio.sleep(0.01)


async def test_a_refusal_that_breaks_off_is_still_one() -> None:
    """P said 400: D's answer does not stand, though why is lost."""

    async def breaks(call: Call) -> web.StreamResponse:
        response = web.StreamResponse(status=400, headers={"Content-Length": "1000"})
        await response.prepare(call.request)
        await response.write(b'{"error":')
        refused.set()
        return await slam(call)

    async def late(call: Call) -> web.StreamResponse:
        await refused.wait()
        await asyncio.sleep(0.2)
        return await decode_ok(call)

    refused = asyncio.Event()
    async with serving() as pair:
        pair.p.script, pair.d.script = breaks, late
        status, _, raw = await pair.complete()
        assert status == 502 and error_of(raw)["side"] == "prefill"
