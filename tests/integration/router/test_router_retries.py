"""Tries on other engines before the first byte: C18's rule for whole requests, C22, C24, C25, C28, C31, C36."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from aiohttp import web
from scripted import (
    MODEL,
    Call,
    Engine,
    Pair,
    begin_stream,
    decode_ok,
    error_of,
    event,
    hang,
    prefill_ok,
    refuse,
    serving,
    slam,
)

from kvferry.router.engines.breaker import BreakerSettings
from kvferry.router.engines.budget import RetrySettings
from kvferry.story import read_story

BUSY = {"error": {"message": "busy", "type": "x", "code": 503}}
TOO_LONG = {"error": {"message": "maximum context length is 8", "type": "BadRequestError", "code": 400}}
AT_ONCE = RetrySettings(backoff_s=0.0)
NEVER_OPEN = BreakerSettings(failures=0)


def first(times: int, script, then):
    """`script` for the first calls of this engine, `then` for the rest."""
    seen: list[Call] = []

    async def chosen(call: Call) -> web.StreamResponse:
        seen.append(call)
        return await (script if len(seen) <= times else then)(call)

    return chosen


async def ready(pair: Pair) -> None:
    async with asyncio.timeout(5):
        while not all(engine.ready for engine in pair.running.pool.all()):
            await pair.running.pool.change()


async def metric(pair: Pair, name: str) -> float:
    async with pair.session.get(pair.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["push", "pull", "stream"])
async def test_c36_a_second_try_is_another_transfer(mode: str, stream: bool) -> None:
    async with serving(mode=mode, retries=2, retry=AT_ONCE) as pair:
        pair.p.script = first(1, refuse(503, BUSY), prefill_ok)
        pair.d.script = first(1, hang, decode_ok) if mode != "pull" else decode_ok
        status, headers, raw = await pair.complete(stream=stream)
        assert status == 200 and b"hi" in raw
        old, new = (call.params["transfer_id"] for call in pair.p.calls)
        assert old != new and headers["x-kvferry-transfer-id"] == new
        at, reason = await pair.p.side.abandon_of(old)
        assert at < pair.p.calls[1].at, "let go before the next begins"
        assert "503" in reason and new not in pair.p.side.abandoned
        ids = [call.params["transfer_id"] for call in pair.d.calls]
        assert ids == ([new] if mode == "pull" else [old, new])
        for call in pair.d.calls[:-1]:
            await call.cancelled.wait()
            assert call.cancelled_at < pair.d.calls[-1].at
        assert await metric(pair, 'kvferry_router_retries_total{code="engine_error",side="prefill"}') == 1


@pytest.mark.parametrize("mode", ["push", "pull", "stream"])
async def test_c24_another_decode_engine_takes_over(mode: str) -> None:
    dead, well = Engine("decode"), Engine("decode")
    async with serving(mode=mode, decode=[dead, well], retries=2, retry=AT_ONCE, probe_interval_s=60) as pair:
        await ready(pair)
        await dead._runner.cleanup()
        answers = [await pair.complete() for _ in range(2)]
        assert [status for status, _, _ in answers] == [200, 200]
        ids = [call.params["transfer_id"] for call in pair.p.calls]
        assert len(ids) == len(set(ids)) == 3, "one try went to the dead one, and its prefill is computed anew"
        taken = [call.params["transfer_id"] for call in well.calls]
        assert taken == [headers["x-kvferry-transfer-id"] for _, headers, _ in answers]
        (lost,) = set(ids) - set(taken)
        await pair.p.side.abandon_of(lost)


async def test_c24_none_left_is_a_503_that_names_the_role() -> None:
    async with serving(retries=2, retry=AT_ONCE, probe_interval_s=60) as pair:
        await pair.d._runner.cleanup()
        started = time.monotonic()
        status, headers, raw = await pair.complete()
        facts = error_of(raw)
        assert status == 503 and headers["Retry-After"] == "1" and time.monotonic() - started < 1.0
        assert facts["code"] == "no_decode_engine" and pair.d.url in facts["message"]
        await pair.p.side.abandon_of(pair.p.calls[0].params["transfer_id"])


async def test_c22_closed_before_the_headers_goes_to_another() -> None:
    bad, well = Engine("decode"), Engine("decode")
    bad.script = slam
    async with serving(decode=[bad, well], retries=2, retry=AT_ONCE) as pair:
        await ready(pair)
        for _ in range(4):
            status, _, raw = await pair.complete(stream=True)
            assert status == 200 and raw.endswith(b"data: [DONE]\n\n")
        begun = {call.params["transfer_id"] for call in bad.calls}
        assert len(begun) == 2, "of four requests in turn, two began there"


@pytest.mark.parametrize("code", [400, 401, 404, 413, 422])
async def test_c25_what_the_request_deserved_is_asked_once(code: int) -> None:
    async with serving(retries=2, retry=AT_ONCE) as pair:
        pair.p.script, pair.d.script = refuse(code, TOO_LONG), hang
        for _ in range(20):
            status, _, raw = await pair.complete()
            assert (status, json.loads(raw)) == (code, TOO_LONG)
        assert len(pair.p.calls) == 20
        pair.p.script, pair.d.script = prefill_ok, decode_ok
        assert (await pair.complete())[0] == 200, "and no circuit opened"
        assert await metric(pair, "kvferry_router_cb_state") == 0
        assert await metric(pair, "kvferry_router_retries_total") == 0


@pytest.mark.parametrize("code", [408, 429, 500, 502, 503, 504])
async def test_an_engines_own_error_after_the_last_try_is_the_clients(code: int) -> None:
    async with serving(retries=2, retry=AT_ONCE, breaker=NEVER_OPEN) as pair:
        pair.d.script = refuse(code, BUSY)
        status, _, raw = await pair.complete()
        assert (status, json.loads(raw)) == (code, BUSY)
        assert len(pair.d.calls) == 3 and len({call.params["transfer_id"] for call in pair.d.calls}) == 3
        assert await metric(pair, 'kvferry_router_retries_exhausted_total{reason="tries"}') == 1


async def test_kv_that_did_not_land_is_tried_on_another_pair() -> None:
    prefills, decodes = [Engine("prefill"), Engine("prefill")], [Engine("decode"), Engine("decode")]
    own = {"error": {"message": "internal error", "type": "InternalServerError", "code": 500}}
    async with serving(prefill=prefills, decode=decodes, retries=1, retry=AT_ONCE) as pair:
        await ready(pair)
        decodes[0].script = refuse(500, own)
        decodes[0].side.verdict = ("failed", "kv_mismatch", "layer 3 differs")
        assert (await pair.complete())[0] == 200
        assert [len(engine.calls) for engine in (*prefills, *decodes)] == [1, 1, 1, 1], "neither is asked again"
        decodes[0].side.verdict = ("failed", "prompt_mismatch", "another prompt")
        decodes[1].script, decodes[1].side.verdict = decodes[0].script, decodes[0].side.verdict
        status, _, raw = await pair.complete()
        assert status == 502 and error_of(raw)["code"] == "prompt_mismatch"
        assert sum(len(engine.calls) for engine in decodes) == 3, "a second try would only hide this one"


async def test_no_second_try_once_the_head_is_out() -> None:
    async def breaks(call: Call) -> web.StreamResponse:
        response = await begin_stream(call)
        await response.write(event("a"))
        return await slam(call)

    async with serving(retries=2, retry=AT_ONCE) as pair:
        pair.d.script = breaks
        status, _, raw = await pair.complete(stream=True)
        assert status == 200 and raw.startswith(event("a")) and raw.count(b"data: ") == 2
        assert error_of(raw[len(event("a")) :].removeprefix(b"data: "))["side"] == "decode"
        assert len(pair.d.calls) == len(pair.p.calls) == 1


async def test_the_part_that_failed_is_tried_again_alone() -> None:
    async with serving(retries=1, retry=AT_ONCE) as pair:
        failed: list[str] = []

        async def one_fails(call: Call) -> web.StreamResponse:
            if call.body["prompt"] == ["beta"] and not failed:
                failed.append(call.params["transfer_id"])
                return await refuse(503, BUSY)(call)
            return await decode_ok(call)

        pair.d.script = one_fails
        status, headers, raw = await pair.complete(prompt=["alpha", "beta"])
        assert status == 200
        assert [choice["text"] for choice in json.loads(raw)["choices"]] == ['["alpha"]', '["beta"]']
        assert [call.body["prompt"] for call in pair.p.calls].count(["alpha"]) == 1 and len(pair.p.calls) == 3
        assert failed[0] not in headers["x-kvferry-transfer-id"].split(",")
        await pair.p.side.abandon_of(failed[0])


async def test_the_deadline_covers_all_tries() -> None:
    async with serving(retries=2, retry=AT_ONCE, request_timeout_s=0.5) as pair:
        pair.d.script = first(1, refuse(503, BUSY), hang)
        started = time.monotonic()
        status, _, _ = await pair.complete()
        assert status == 504 and 0.5 <= time.monotonic() - started < 1.0
        assert len(pair.d.calls) == 2


async def test_an_outage_is_not_multiplied() -> None:
    settings = RetrySettings(floor=3, ratio=0.2, backoff_s=0.0, window_s=60.0)
    async with serving(retries=2, retry=settings, breaker=NEVER_OPEN) as pair:
        pair.p.script, pair.d.script = refuse(503, BUSY), hang
        for _ in range(30):
            assert (await pair.complete())[0] == 503
        assert len(pair.p.calls) == 30 + 3 + 6
        assert await metric(pair, "kvferry_router_retries_total") == 9
        assert await metric(pair, 'kvferry_router_retries_exhausted_total{reason="budget"}') >= 20


@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_c31_a_client_that_leaves_in_a_second_try(mode: str) -> None:
    async with serving(mode=mode, retries=2, retry=AT_ONCE) as pair:
        pair.p.script = first(1, refuse(503, BUSY), prefill_ok)
        pair.d.script = hang
        _, writer = await pair.raw({"model": MODEL, "prompt": "hi"})
        p = [await pair.p.call(number) for number in (0, 1)]
        await p[1].ended.wait()
        async with asyncio.timeout(5):
            while len(pair.d.calls) < (1 if mode == "pull" else 2):
                await asyncio.sleep(0.01)
        left = time.monotonic()
        writer.close()
        for call in p:
            at, _ = await pair.p.side.abandon_of(call.params["transfer_id"])
            assert at - left < 1.0
        for call in pair.d.calls:
            async with asyncio.timeout(1):
                await call.cancelled.wait()
    assert all(engine.in_flight == 0 for engine in pair.running.pool.all())


async def test_a_client_that_leaves_between_two_tries_leaves_nothing() -> None:
    async with serving(retries=2, retry=RetrySettings(backoff_s=30, backoff_max_s=30)) as pair:
        pair.p.script, pair.d.script = refuse(503, BUSY), hang
        _, writer = await pair.raw({"model": MODEL, "prompt": "hi"})
        call = await pair.p.call()
        await pair.p.side.abandon_of(call.params["transfer_id"])
        writer.close()
        async with asyncio.timeout(2):
            while await metric(pair, "kvferry_router_running_requests"):
                await asyncio.sleep(0.01)
        assert len(pair.p.calls) == 1 and all(engine.in_flight == 0 for engine in pair.running.pool.all())


async def test_a_prefill_engine_that_is_gone_is_not_waited_for() -> None:
    dead, well = Engine("prefill"), Engine("prefill")
    async with serving(prefill=[dead, well], retries=1, retry=AT_ONCE, probe_interval_s=60) as pair:
        await ready(pair)
        await dead._runner.cleanup()
        await dead.side.stop()
        started = time.monotonic()
        assert (await pair.complete())[0] == 200
        assert time.monotonic() - started < 0.4 and len(well.calls) == 1


async def test_a_bound_late_decode_that_fails_costs_a_new_prefill() -> None:
    async with serving(mode="stream", bind="late", retries=1, retry=AT_ONCE) as pair:
        pair.d.script = first(1, refuse(503, BUSY), decode_ok)
        status, headers, _ = await pair.complete()
        assert status == 200 and len(pair.p.calls) == len(pair.d.calls) == 2
        old, new = (call.params["transfer_id"] for call in pair.p.calls)
        assert [call.params["transfer_id"] for call in pair.d.calls] == [old, new]
        await pair.p.side.abandon_of(old)
        assert headers["x-kvferry-transfer-id"] == new


async def test_the_story_tells_of_both_tries(tmp_path) -> None:
    async with serving(retries=1, retry=AT_ONCE, story_dir=str(tmp_path)) as pair:
        pair.d.script = first(1, refuse(503, BUSY), decode_ok)
        assert (await pair.complete(X_Request_Id="r1"))[0] == 200
        old, new = (call.params["transfer_id"] for call in pair.p.calls)
    *_, failed, again = read_story(tmp_path, old)
    assert failed["event"] == "failed" and pair.d.url in failed["reason"]
    assert (again["event"], again["next"]) == ("tried_again", new)
    story = read_story(tmp_path, new)
    assert [line["event"] for line in story][:3] == ["received", "tried_again", "dispatched"]
    assert (story[1]["last"], story[1]["code"]) == (old, "engine_error")
    assert story[-1]["event"] == "last_token"
