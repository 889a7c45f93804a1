"""The router with a render tier: what each side is told, what the client sees, and what becomes of lost workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
from aiohttp import web
from render_stand_in import RenderStandIn
from scripted import (
    CHAT,
    COMPLETIONS,
    DONE,
    MODEL,
    SOON,
    Call,
    Pair,
    begin_stream,
    error_of,
    prefilled,
    serving,
    slam,
    usage,
)

from kvferry.render.settings import Settings
from kvferry.router.render import session as module
from kvferry.router.render.history import BLOCK

GENERATE = "/inference/v1/generate"
MIB = 1024 * 1024
STREAMED = {"model": MODEL, "prompt": "hi", "stream": True, "max_tokens": 4}


def chunk(*ids: int, index: int = 0, end: str | None = None) -> bytes:
    choice = {"index": index, "logprobs": None, "finish_reason": end, "stop_reason": None, "token_ids": list(ids)}
    return b"data: " + json.dumps({"request_id": "d", "choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"


def counts(cached: int | None = None) -> bytes:
    return b"data: " + json.dumps({"request_id": "d", "choices": [], "usage": usage(3, 2, cached)}).encode() + b"\n\n"


async def decode_tokens(call: Call) -> web.StreamResponse:
    """Two tokens for each choice, streamed or whole: numbers that tell the prompt's first id."""
    first, n = call.body["token_ids"][0], call.body["sampling_params"].get("n", 1)
    if not call.body.get("stream"):
        choices = [{"index": at, "token_ids": [first, at], "finish_reason": "length"} for at in range(n)]
        return web.json_response({"request_id": "d", "choices": choices, "usage": usage()})
    response = await begin_stream(call)
    for at in range(n):
        await response.write(chunk(first, index=at))
    for at in range(n):
        await response.write(chunk(at, index=at, end="length"))
    await response.write(counts(99) + DONE)
    return response


async def prefill_tokens(call: Call) -> web.StreamResponse:
    scores = [None, {"7": {"logprob": -0.5}}] if "prompt_logprobs" in call.body["sampling_params"] else None
    return prefilled(call, usage=usage(3, 1, cached=2), prompt_logprobs=scores)


@contextlib.asynccontextmanager
async def rendering(count: int = 1, **config: Any) -> AsyncIterator[tuple[Pair, list[RenderStandIn]]]:
    workers = [RenderStandIn() for _ in range(count)]
    for worker in workers:
        await worker.start()
    try:
        urls = tuple(worker.url for worker in workers)
        async with serving(render=urls, probe_interval_s=0.1, **config) as pair:
            pair.p.script, pair.d.script = prefill_tokens, decode_tokens
            async with asyncio.timeout(SOON):
                await pair.running.until_rendering()
                await pair.running.pool.until_ready()
            yield pair, workers
            assert [fault for worker in workers for fault in worker.faults] == []
    finally:
        for worker in workers:
            await worker.stop()


def events_of(raw: bytes) -> list[Any]:
    assert raw.endswith(b"data: [DONE]\n\n"), raw
    return [json.loads(event.removeprefix("data: ")) for event in raw.decode().split("\n\n")[:-2]]


def fed(queue: asyncio.Queue[bytes]) -> Callable[[Call], Awaitable[web.StreamResponse]]:
    async def script(call: Call) -> web.StreamResponse:
        response = await begin_stream(call)
        while piece := await queue.get():
            await response.write(piece)
        await response.write_eof()
        return response

    return script


async def test_ids_go_to_both_engines_and_text_to_none() -> None:
    async with rendering() as (pair, (worker,)):
        status, headers, raw = await pair.complete(
            prompt="hello", stream=True, kv_transfer_params={"remote_host": "evil"}, user="u"
        )
        assert status == 200 and headers["Content-Type"] == "text/event-stream; charset=utf-8"
        made = events_of(raw)
        assert [event.get("ids") for event in made[:2]] == [[104], [0]]
        assert made[-1]["cached"] == [2], "P's number, not D's"
        for call in (pair.p.calls[0], pair.d.calls[0]):
            assert call.request.path == GENERATE and call.body["token_ids"] == list(b"hello")
            assert b"hello" not in call.raw and b"evil" not in call.raw
        assert pair.p.calls[0].body["sampling_params"]["max_tokens"] == 1 and pair.d.calls[0].body["stream"]
        assert worker.opened[0].path == COMPLETIONS and "kv_transfer_params" not in worker.opened[0].body
        assert headers["x-kvferry-transfer-id"] == pair.d.calls[0].params["transfer_id"]


async def test_the_session_gets_the_clients_own_body_and_headers_but_no_word_of_the_protocol() -> None:
    async with rendering() as (pair, (worker,)):
        status, _, _ = await pair.post(
            CHAT,
            {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "odd": [1]},
            **{"Authorization": "Bearer k", "X-Request-Id": "mine", "X-Kvferry-Said": "7", "X-Kvferry-Path": "/evil"},
        )
        session = worker.opened[0]
        assert status == 200 and session.path == CHAT and session.body["odd"] == [1] and session.said == 0
        assert session.headers["Authorization"] == "Bearer k" and session.headers["X-Request-Id"] == "mine"


async def test_an_answer_that_is_not_streamed_is_asked_for_whole() -> None:
    async with rendering() as (pair, (worker,)):
        status, headers, raw = await pair.complete(n=2)
        made = json.loads(raw)
        assert status == 200 and int(headers["Content-Length"]) == len(raw)
        assert [choice["ids"] for choice in made["choices"]] == [[104, 0], [104, 1]]
        assert not pair.d.calls[0].body["stream"] and "stream_options" not in pair.d.calls[0].body
        assert len(worker.opened[0].replies) == 1


async def test_prompt_logprobs_come_from_prefill() -> None:
    async with rendering() as (pair, _):
        _, _, raw = await pair.complete(prompt_logprobs=1)
        assert json.loads(raw)["scores"] == [[0, [None, {"7": {"logprob": -0.5}}]]]
        assert "prompt_logprobs" not in pair.d.calls[0].body["sampling_params"]
        assert pair.p.calls[0].body["sampling_params"]["prompt_logprobs"] == 1


async def test_several_prompts_are_one_session_and_a_transfer_each() -> None:
    async with rendering() as (pair, (worker,)):
        status, headers, raw = await pair.complete(prompt=["ab", "cd"], stream=True, n=2)
        assert status == 200 and len(worker.opened) == 1
        last = events_of(raw)[-1]
        assert [choice["choice"] for choice in last["choices"]] == [[0, 0], [0, 1], [1, 0], [1, 1]]
        assert [choice["ids"][0] for choice in last["choices"]] == [97, 97, 99, 99]
        assert len(set(headers["x-kvferry-transfer-id"].split(","))) == 2


async def test_c72_chunks_stay_apart_and_in_order_while_a_request_is_out() -> None:
    """C72: the router never joins chunks; what comes meanwhile goes together, each its own."""
    queue: asyncio.Queue[bytes] = asyncio.Queue()
    async with rendering() as (pair, (worker,)):
        pair.d.script = fed(queue)
        worker.hold = asyncio.Event()
        asking = asyncio.create_task(pair.complete(stream=True))
        await queue.put(chunk(0, 1))
        await worker.held.wait()
        text = b"".join(chunk(number, number + 1) for number in range(2, 40, 2)) + chunk(40, end="stop")
        for at in range(0, len(text), 1000):
            await queue.put(text[at : at + 1000])
        await queue.put(counts() + DONE)
        await queue.put(b"")
        await pair.d.calls[0].ended.wait()
        worker.hold.set()
        events_of((await asking)[2])
        told = [one["choices"][0]["token_ids"] for _, one in worker.opened[0].told if one["choices"]]
        assert told == [[number, number + 1] for number in range(0, 40, 2)] + [[40]]
        assert len(worker.opened[0].replies) < len(told)


async def test_a_refusal_of_the_tier_is_the_answer_and_no_engine_is_asked() -> None:
    async with rendering() as (pair, _):
        status, _, raw = await pair.complete(prompt="refused")
        assert status == 400 and error_of(raw)["message"] == "refused by the tier"
        async with pair.session.post(pair.url + COMPLETIONS, data=b'{"model": ') as response:
            assert response.status == 400 and error_of(await response.read())["message"] == "no JSON"
        assert pair.p.calls == pair.d.calls == []


async def test_a_stop_string_ends_the_leg_and_the_rest_goes_on() -> None:
    first: asyncio.Queue[bytes] = asyncio.Queue()
    second: asyncio.Queue[bytes] = asyncio.Queue()
    async with rendering() as (pair, _):

        async def script(call: Call) -> web.StreamResponse:
            return await fed(first if call.body["token_ids"] == [97] else second)(call)

        pair.d.script = script
        asking = asyncio.create_task(pair.complete(prompt=["a", "b"], stop=7))
        await first.put(chunk(1))
        await second.put(chunk(2))
        calls = [await pair.d.call(0), await pair.d.call(1)]
        stopped = next(call for call in calls if call.body["token_ids"] == [97])
        await first.put(chunk(7))
        async with asyncio.timeout(SOON):
            await stopped.cancelled.wait()
        await second.put(chunk(3, end="length") + counts() + DONE)
        await second.put(b"")
        made = json.loads((await asking)[2])
        assert [(one["ids"], one["why"]) for one in made["choices"]] == [([1, 7], "stop"), ([2, 3], "length")]


async def test_a_client_that_leaves_ends_legs_and_session() -> None:
    queue: asyncio.Queue[bytes] = asyncio.Queue()
    async with rendering() as (pair, (worker,)):
        pair.d.script = fed(queue)
        await queue.put(chunk(1))
        reader, writer = await pair.raw(STREAMED)
        await reader.readuntil(b'"ids"')
        writer.transport.abort()
        async with asyncio.timeout(SOON):
            await pair.d.calls[0].cancelled.wait()
            await worker.opened[0].deleted.wait()


async def test_an_opening_that_nobody_waits_for_ends_with_its_connection() -> None:
    """The worker then renders no more of it and keeps no session: the router would never learn that one's name."""
    async with rendering() as (pair, (worker,)):
        worker.busy = True
        _, writer = await pair.raw(STREAMED)
        async with asyncio.timeout(SOON):
            await worker.held.wait()
            writer.transport.abort()
            await worker.left.wait()
    async with rendering(render_timeout_s=0.1) as (pair, (worker,)):
        worker.busy = True
        assert (await pair.complete())[0] == 503
        async with asyncio.timeout(SOON):
            await worker.left.wait()


async def test_a_slow_client_holds_the_engine_back() -> None:
    written, most = 0, 160 * MIB

    async def flood(call: Call) -> web.StreamResponse:
        nonlocal written
        response = await begin_stream(call)
        piece = chunk(*range(100_000, 150_000))
        while written < most:
            await response.write(piece)
            written += len(piece)
        await response.write(chunk(1, end="length") + counts() + DONE)
        return response

    async with rendering() as (pair, (worker,)):
        pair.d.script = flood
        reader, writer = await pair.raw(STREAMED)
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()
        before = -1
        while written != before or before == 0:
            before = written
            await asyncio.sleep(0.4)
        assert before < 64 * MIB, "what sockets hold"
        assert len(worker.opened[0].told) * 350_000 < 32 * MIB, "the session is not fed for a client that reads nothing"
        writer.transport.abort()
        async with asyncio.timeout(SOON):
            await pair.d.calls[0].cancelled.wait()


# -- workers that fail


async def undisturbed(**body: Any) -> bytes:
    async with rendering() as (pair, _):
        pair.d.script = many
        return (await pair.complete(stream=True, **body))[2]


async def many(call: Call) -> web.StreamResponse:
    response = await begin_stream(call)
    for number in range(60):
        await response.write(chunk(number, number + 1))
        await asyncio.sleep(0)
    await response.write(chunk(60, end="length") + counts() + DONE)
    return response


def alike(raw: bytes) -> list[Any]:
    made = events_of(raw)
    assert [event["number"] for event in made] == list(range(len(made))), "nothing twice, nothing lost"
    assert len({event["created"] for event in made}) == 1
    return [{key: value for key, value in event.items() if key not in ("created", "id")} for event in made]


async def test_a_lost_reply_is_asked_for_again() -> None:
    async with rendering() as (pair, (worker,)):
        pair.d.script = many
        worker.lost = {0, 1}
        raw = (await pair.complete(stream=True))[2]
        assert len(worker.opened) == 1 and worker.lost == set()
    assert alike(raw) == alike(await undisturbed())


@pytest.mark.parametrize("seq", [0, 1])
async def test_a_worker_that_dies_is_followed_by_another(seq: int) -> None:
    """Its reply is lost with it, or it had said some: the client sees one stream either way."""
    async with rendering(2) as (pair, workers):
        gate = asyncio.Event()

        async def script(call: Call) -> web.StreamResponse:
            response = await begin_stream(call)
            for number in range(60):
                await response.write(chunk(number, number + 1))
                if number == 10:
                    await gate.wait()
            await response.write(chunk(60, end="length") + counts() + DONE)
            return response

        pair.d.script = script
        for worker, other in (workers, workers[::-1]):
            worker.dies_at, worker.heir = seq, other
        async with asyncio.timeout(SOON), pair.session.post(pair.url + COMPLETIONS, json=STREAMED) as response:
            raw = await response.content.readuntil(b"\n\n") if seq else b""
            gate.set()
            raw += await response.read()
        assert [len(worker.opened) for worker in workers] == [1, 1]
        assert sorted(worker.dead for worker in workers) == [False, True]
    assert alike(raw) == alike(await undisturbed())


async def test_a_long_answer_is_told_to_the_next_worker_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """And while that one has no room, it waits."""
    monkeypatch.setattr(module, "FULL_AGAIN_S", 0.02)
    queue: asyncio.Queue[bytes] = asyncio.Queue()
    async with rendering(2) as (pair, workers):
        pair.d.script = fed(queue)
        asking = asyncio.create_task(pair.complete(stream=True))
        text = b"".join(chunk(number) for number in range(1500))
        await queue.put(text)
        first = None
        async with asyncio.timeout(SOON):
            while first is None or len(first.told) < 1500:
                await asyncio.sleep(0.01)
                first = next((session for worker in workers for session in worker.opened), None)
        mine, other = workers if workers[0].opened else workers[::-1]
        mine.dead = other.full = True
        await queue.put(chunk(1500, end="length") + counts() + DONE)
        await queue.put(b"")
        async with asyncio.timeout(SOON):
            while other.asked < 3:
                await asyncio.sleep(0.01)
            other.full = False
            made = events_of((await asking)[2])
        assert [event["number"] for event in made] == list(range(1502))
        assert len(other.opened) == 1 and len(other.opened[0].replies) > len(text) // (2 * BLOCK)


async def test_a_worker_that_is_late_is_left_and_not_lost_for_others() -> None:
    async with rendering(2, render_timeout_s=0.2) as (pair, workers):
        pair.d.script = many
        for worker in workers:
            worker.hold = asyncio.Event()
        asking = asyncio.create_task(pair.complete(stream=True))
        async with asyncio.timeout(SOON):
            while not any(worker.held.is_set() for worker in workers):
                await asyncio.sleep(0.01)
            mine, other = workers if workers[0].opened else workers[::-1]
            assert other.hold is not None
            other.hold.set()
            raw = (await asking)[2]
            await mine.opened[0].deleted.wait()
        async with pair.session.get(pair.url + "/health") as response:
            assert [one["ready"] for one in (await response.json())["render"]] == [True, True]
        async with pair.session.get(pair.url + "/metrics") as response:
            assert 'resumes_total{how="moved"} 1.0' in await response.text()
    assert alike(raw) == alike(await undisturbed())


@pytest.mark.parametrize("way", ["opening", "tokens", "tokenize", "busy"])
async def test_a_prompt_that_kills_or_blocks_workers_takes_two_along(way: str) -> None:
    async with rendering(4, render_timeout_s=0.2 if way == "busy" else 30.0) as (pair, workers):
        for worker in workers:
            worker.dies_at = 0
            worker.dead_to = {"opening": "_open", "tokenize": "_plain"}.get(way, "")
            worker.busy = way == "busy"
        if way == "tokenize":
            status, _, raw = await pair.post("/tokenize", {"prompt": "x"})
        else:
            status, _, raw = await pair.complete(stream=True)
        assert status == 503 and error_of(raw)["code"] == "render_unavailable"
        assert sum(worker.asked > 0 for worker in workers) == 2


async def test_a_prompt_that_ends_their_processes_takes_two_along() -> None:
    """Then no second connection can be made to them: they were reached all the same."""
    async with rendering(4) as (pair, workers):
        for _ in workers:
            assert (await pair.complete())[0] == 200  # a kept connection to each
        for worker in workers:
            worker.asked, worker.dead_to, worker.exits = 0, "_open", True
        status, _, raw = await pair.complete(stream=True)
        assert status == 503 and "2 render workers were lost over it" in error_of(raw)["message"]
        assert sum(worker.asked for worker in workers) == 2


async def test_the_only_worker_dies() -> None:
    """Before the first byte one typed answer, after it one typed event."""
    async with rendering() as (pair, (worker,)):
        worker.dies_at = 0
        status, headers, raw = await pair.complete(stream=True)
        assert status == 503 and error_of(raw)["code"] == "render_unavailable"
        assert headers["x-kvferry-reason"] == "render_unavailable"
    queue: asyncio.Queue[bytes] = asyncio.Queue()
    async with rendering() as (pair, (worker,)):
        pair.d.script = fed(queue)
        worker.dies_at = 1
        await queue.put(chunk(1))
        reader, writer = await pair.raw(STREAMED)
        await reader.readuntil(b'"ids"')
        await queue.put(chunk(2))
        rest = await reader.readuntil(b"0\r\n\r\n")
        assert b'"code": "render_unavailable"' in rest and b"[DONE]" not in rest
        async with asyncio.timeout(SOON):
            await pair.d.calls[0].cancelled.wait()
        writer.close()


async def test_with_no_worker_engines_may_render_themselves() -> None:
    async def text(call: Call) -> web.StreamResponse:
        return web.json_response({"choices": [{"index": 0, "text": "old"}], "usage": usage()})

    async with rendering(render_fallback="engines") as (pair, (worker,)):
        worker.dies_at = 0
        pair.d.script = decode_tokens

        async def either(call: Call) -> web.StreamResponse:
            return await (decode_tokens if "token_ids" in call.body else text)(call)

        async def prefill(call: Call) -> web.StreamResponse:
            return await prefill_tokens(call) if "token_ids" in call.body else prefilled(call)

        pair.d.script, pair.p.script = either, prefill
        for _ in range(2):  # the worker is lost in the middle of the first, and known to be by the second
            status, _, raw = await pair.complete()
            assert status == 200 and json.loads(raw)["choices"][0]["text"] == "old"
        async with pair.session.get(pair.url + "/health") as response:
            assert response.status == 200


async def test_a_full_worker_is_passed_over_and_full_ones_are_429() -> None:
    async with rendering(2) as (pair, workers):
        workers[0].full = True
        for _ in range(3):
            assert (await pair.complete())[0] == 200
        assert workers[0].opened == [] and len(workers[1].opened) == 3
        workers[1].full = True
        status, headers, raw = await pair.complete()
        assert status == 429 and headers["Retry-After"] == "3" and error_of(raw)["code"] == "render_overloaded"


async def test_sessions_are_spread() -> None:
    queue: asyncio.Queue[bytes] = asyncio.Queue()
    async with rendering(2) as (pair, workers):
        pair.d.script = fed(queue)
        asking = [asyncio.create_task(pair.complete(stream=True)) for _ in range(4)]
        await pair.d.call(3)
        assert [len(worker.opened) for worker in workers] == [2, 2]
        for _ in range(4):
            await queue.put(chunk(1, end="length") + counts() + DONE)
            await queue.put(b"")
        assert [(await one)[0] for one in asking] == [200] * 4
        async with pair.session.get(pair.url + "/metrics") as response:
            page = await response.text()
        assert 'kvferry_router_render_opens_total{outcome="open"} 4.0' in page
        assert f'kvferry_router_render_sessions{{worker="{workers[0].url}"}} 0.0' in page


# -- engines that fail


async def test_decode_is_tried_again_before_the_first_byte_with_one_rendering() -> None:
    async with rendering(retries=2) as (pair, (worker,)):

        async def script(call: Call) -> web.StreamResponse:
            return await (slam(call) if len(pair.d.calls) == 1 else decode_tokens(call))

        pair.d.script = script
        status, _, raw = await pair.complete(stream=True)
        assert status == 200 and events_of(raw)[-1]["choices"][0]["ids"] == [104, 0]
        assert len(worker.opened) == 1 and len(pair.d.calls) == 2


async def test_decode_that_dies_in_the_middle_is_one_typed_event() -> None:
    async def script(call: Call) -> web.StreamResponse:
        response = await begin_stream(call)
        await response.write(chunk(1))
        await asyncio.sleep(0.05)
        assert call.request.transport is not None
        call.request.transport.abort()
        return response

    async with rendering() as (pair, (worker,)):
        pair.d.script = script
        status, _, raw = await pair.complete(stream=True)
        last = json.loads(raw.decode().split("\n\n")[-2].removeprefix("data: "))["error"]
        assert status == 200 and last["code"] == "engine_error" and last["side"] == "decode"
        async with asyncio.timeout(SOON):
            await worker.opened[0].deleted.wait()


async def test_an_error_event_of_decode_is_the_clients() -> None:
    said = {"error": {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}}

    async def script(call: Call) -> web.StreamResponse:
        response = await begin_stream(call)
        await response.write(chunk(1))
        await asyncio.sleep(0.05)
        await response.write(b"data: " + json.dumps(said).encode() + b"\n\n" + DONE)
        return response

    async with rendering() as (pair, _):
        pair.d.script = script
        raw = (await pair.complete(stream=True))[2]
        assert events_of(raw)[-1] == said


# -- settings, passage, seeing


async def test_tokenize_goes_to_the_tier_and_other_routes_do_not() -> None:
    async with rendering() as (pair, (worker,)):
        status, _, raw = await pair.post("/tokenize", {"prompt": "x"})
        assert status == 200 and json.loads(raw) == {"tokens": [1, 2, 3]} and worker.plain[0][0] == "/tokenize"
        status, _, _ = await pair.post(GENERATE, {"token_ids": [5], "sampling_params": {"max_tokens": 2}})
        assert status == 200 and worker.opened == []


async def test_engines_that_parse_otherwise_are_refused_by_name() -> None:
    worker = RenderStandIn(Settings(model="toy", served_model_names=("toy",), tool_call_parser="hermes"))
    await worker.start()
    told = Settings(model="toy", served_model_names=("toy",), tool_call_parser="mistral")
    try:
        async with serving(render=(worker.url,), ready=False, probe_interval_s=0.1) as pair:
            pair.d.settings = msgspec.to_builtins(told)
            await pair.running.until_rendering()
            engine = next(one for one in pair.running.pool.all() if one.role == "decode")
            async with asyncio.timeout(SOON):
                while "tool_call_parser" not in engine.reason:
                    await pair.running.pool.change()
            assert not engine.takes
            assert "'mistral'" in engine.reason and "'hermes'" in engine.reason and "start both" in engine.reason
            assert (await pair.complete())[0] == 503
            pair.d.settings = msgspec.to_builtins(worker.settings)
            async with asyncio.timeout(SOON):
                await pair.running.pool.until_ready()
    finally:
        await worker.stop()


async def test_a_shared_address_leads_to_the_workers_behind_it() -> None:
    door, own = RenderStandIn(), RenderStandIn()
    await door.start()
    await own.start()
    door.shared = own.url
    try:
        async with serving(render=(door.url,), probe_interval_s=0.1) as pair:
            pair.p.script, pair.d.script = prefill_tokens, decode_tokens
            await pair.running.until_rendering()
            await pair.running.pool.until_ready()
            assert (await pair.complete())[0] == 200
            assert door.opened == [] and len(own.opened) == 1
            async with pair.session.get(pair.url + "/health") as response:
                assert [one["url"] for one in (await response.json())["render"]] == [own.url]
    finally:
        await door.stop()
        await own.stop()


async def test_the_log_line_names_worker_and_time(caplog: pytest.LogCaptureFixture) -> None:
    async with rendering() as (pair, (worker,)):
        with caplog.at_level("INFO", "kvferry.router.requests"):
            await pair.complete(stream=True, stream_options={"include_usage": True})
        record = next(one.msg for one in caplog.records if one.name == "kvferry.router.requests")
        assert f"render={worker.url} render_ms=" in str(record) and record.render_ms > 0
        assert (record.prompt_tokens, record.completion_tokens) == (3, 2) and record.ttft_ms is not None
