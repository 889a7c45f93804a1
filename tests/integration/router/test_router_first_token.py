"""`--first-token prefill`: P's token goes out before D is heard, and from then on there is no second try."""

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
    DONE,
    MODEL,
    SOON,
    Call,
    Engine,
    Pair,
    after,
    error_of,
    hang,
    prefilled,
    refuse,
    serving,
    slam,
    stream,
)

from kvferry.router.app import ROUTER
from kvferry.router.engines.breaker import BreakerSettings, State
from kvferry.router.requests.openai import GENERATE
from kvferry.story import read_story

MODES: dict[str, dict[str, Any]] = {"pull": {"mode": "pull"}, "late": {"mode": "stream", "bind": "late"}}


BROKEN = {"error": {"message": "out of blocks", "type": "InternalServerError", "code": 500}}


class Listed(Engine):
    """It tells the model's length."""

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 100}]})


def choice(ids: list[int], finish: str | None) -> dict[str, Any]:
    return {"index": 0, "token_ids": ids, "finish_reason": finish, "stop_reason": None, "logprobs": None}


def counts(prompt: int, completion: int) -> dict[str, Any]:
    details = {"cached_tokens": prompt}
    total = prompt + completion
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total} | {
        "prompt_tokens_details": details
    }


def first(finish: str = "length") -> Any:
    async def script(call: Call) -> web.StreamResponse:
        usage = counts(3, 1) | {"prompt_tokens_details": {"cached_tokens": 1}}
        return prefilled(call, request_id="r", choices=[choice([9], finish)], usage=usage)

    return script


def event(facts: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps({"request_id": "r"} | facts).encode() + b"\n\n"


async def rest(call: Call) -> web.StreamResponse:
    """Tokens 10 and 11."""
    ids = call.body["token_ids"]
    if not call.body.get("stream"):
        usage = counts(len(ids), 2)
        return web.json_response({"request_id": "r", "choices": [choice([10, 11], "length")], "usage": usage})
    pieces = [event({"choices": [choice([10], None)]}), event({"choices": [choice([11], "length")]})]
    return await stream(call, [*pieces, event({"choices": [], "usage": counts(len(ids), 2)}), DONE])


@contextlib.asynccontextmanager
async def begun(mode: str, **config: Any) -> AsyncIterator[Pair]:
    decodes = config.pop("decode", None) or [Listed("decode")]
    async with serving(decode=decodes, first_token="prefill", **MODES[mode], **config) as pair:
        for engine in pair.prefills:
            engine.script = first()
        for engine in pair.decodes:
            engine.script = rest
        yield pair
        async with asyncio.timeout(SOON):
            while any(engine.in_flight for engine in pair.running.pool.all()):
                await asyncio.sleep(0)


def asked(**more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 3}, "stream": True}
    return body | {"stream_options": {"include_usage": True}} | more


async def metrics(pair: Pair) -> str:
    async with pair.session.get(pair.url + "/metrics") as response:
        return await response.text()


@pytest.mark.parametrize("mode", MODES)
async def test_the_client_has_it_before_decode_answers(mode: str, tmp_path: Path) -> None:
    async with begun(mode, story_dir=str(tmp_path)) as pair:
        gate = asyncio.Event()
        pair.d.script = after(gate, rest)
        async with pair.session.post(pair.url + GENERATE, json=asked()) as response:
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            read = await response.content.readuntil(b"\n\n")
            assert json.loads(read[6:])["choices"] == [choice([9], None)]
            call = await pair.d.call()
            gate.set()
            lines = (await response.read()).decode().strip().split("\n\n")
        ids = [json.loads(line[6:])["choices"][0]["token_ids"] for line in lines[:2]]
        usage = counts(3, 3) | {"prompt_tokens_details": {"cached_tokens": 1}}
        assert ids == [[10], [11]] and lines[3] == "data: [DONE]" and json.loads(lines[2][6:])["usage"] == usage
        assert call.body["token_ids"] == [5, 6, 7, 9] and call.body["sampling_params"] == {"max_tokens": 2}
        assert call.headers["X-Request-Id"] == pair.p.calls[0].headers["X-Request-Id"]
        assert 'kvferry_router_first_tokens_total{by="prefill"} 1.0' in await metrics(pair)
        (record,) = pair.running._app[ROUTER].services.seen.recent.since(0)
        assert (record.first_token, record.prompt_tokens, record.completion_tokens) == ("prefill", 3, 3)
        assert record.facts()["first_token"] == "prefill" and " first_token=prefill " in str(record)
        transfer_id = response.headers["x-kvferry-transfer-id"]
    told = [line["event"] for line in read_story(tmp_path, transfer_id)]
    assert told.index("prefill_done") < told.index("begun") < told.index("first_token") < told.index("last_token")


@pytest.mark.parametrize("mode", MODES)
async def test_a_whole_answer_is_joined_and_tried_again(mode: str) -> None:
    decodes = [Listed("decode"), Listed("decode")]
    async with begun(mode, decode=decodes, retries=1) as pair:
        failing = []

        async def once(call: Call) -> web.StreamResponse:
            failing.append(call)
            return await (refuse(500, BROKEN)(call) if len(failing) == 1 else rest(call))

        for engine in decodes:
            engine.script = once
        status, _, raw = await pair.post(GENERATE, asked(stream=False))
        body = json.loads(raw)
        assert status == 200 and body["choices"] == [choice([9, 10, 11], "length")], body
        assert body["usage"] == counts(3, 3) | {"prompt_tokens_details": {"cached_tokens": 1}}
        assert len(failing) == len(pair.p.calls) == 2, "nothing had gone out"


@pytest.mark.parametrize("mode", MODES)
async def test_a_failure_after_it_is_one_typed_event(mode: str) -> None:
    async with begun(mode, retries=2) as pair:
        pair.d.script = slam
        status, headers, raw = await pair.post(GENERATE, asked())
        head, error = raw.decode().strip().split("\n\n")
        assert status == 200 and json.loads(head[6:])["choices"] == [choice([9], None)]
        facts = error_of(error[6:].encode())
        assert facts["side"] == "decode" and facts["transfer_id"] == headers["x-kvferry-transfer-id"]
        assert len(pair.p.calls) == 1, "no second try after the first byte"
        await pair.p.side.abandon_of(facts["transfer_id"])


@pytest.mark.parametrize(("status", "most"), [(429, 6), (500, 2)])
async def test_a_failure_after_it_counts_once_and_a_refusal_does_not(status: int, most: int) -> None:
    """429 is no failure of the engine's; of real ones two open this circuit, and no single one does."""
    limit = BreakerSettings(failures=2, open_s=60.0)
    async with begun("pull", breaker=limit, retries=0) as pair:
        pair.d.script = refuse(status, BROKEN)
        for count in range(1, most + 1):
            assert (await pair.post(GENERATE, asked()))[0] == 200
            opened = pair.running.pool.engines["decode"][0].standing.state is not State.CLOSED
            assert opened == (status == 500 and count == 2), count


@pytest.mark.parametrize("mode", MODES)
async def test_the_deadline_after_it(mode: str) -> None:
    async with begun(mode, request_timeout_s=0.3) as pair:
        pair.d.script = hang
        status, _, raw = await pair.post(GENERATE, asked())
        assert status == 200 and error_of(raw.decode().strip().split("\n\n")[-1][6:].encode())["side"] == "decode"


@pytest.mark.parametrize("mode", MODES)
async def test_a_client_that_leaves_after_it(mode: str) -> None:
    async with begun(mode) as pair:
        pair.d.script = hang
        reader, writer = await pair.raw(asked(), GENERATE)
        await reader.readuntil(b"[9]")
        call = await pair.d.call()
        writer.close()
        async with asyncio.timeout(SOON):
            await call.cancelled.wait()
        await pair.p.side.abandon_of(pair.p.calls[0].params["transfer_id"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("whole", [False, True], ids=["streamed", "whole"])
async def test_an_answer_that_ends_with_it(mode: str, whole: bool) -> None:
    async with begun(mode) as pair:
        pair.p.script = first("stop")
        status, headers, raw = await pair.post(GENERATE, asked(stream=not whole))
        assert status == 200 and pair.d.calls == []
        if whole:
            body = json.loads(raw)
            assert body["choices"] == [choice([9], "stop")] and body["kv_transfer_params"] is None
        else:
            head, usage, end = raw.decode().strip().split("\n\n")
            assert json.loads(head[6:])["choices"] == [choice([9], "stop")] and end == "data: [DONE]"
            assert json.loads(usage[6:])["usage"]["completion_tokens"] == 1
        _, reason = await pair.p.side.abandon_of(headers["x-kvferry-transfer-id"])
        assert reason == "the answer ended with its first token"


@pytest.mark.parametrize("mode", MODES)
async def test_no_decode_engine_is_an_error_before_it(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    async with begun(mode) as pair:
        gate = asyncio.Event()
        pair.p.script = after(gate, first())
        asking = asyncio.create_task(pair.post(GENERATE, asked()))
        await pair.p.call()
        (decode,) = pair.running.pool.engines["decode"]
        decode.draining = True
        gate.set()
        status, _, raw = await asking
        if mode == "late":
            assert status == 503 and error_of(raw)["code"] == "no_decode_engine", raw
            assert "first_token=" not in caplog.text
        else:
            assert status == 200, "it was chosen before"


async def test_a_decode_engine_that_does_not_tell_its_length_makes_all_of_it() -> None:
    async with begun("pull", decode=[Engine("decode")]) as pair:
        status, _, raw = await pair.post(GENERATE, asked(stream=False))
        assert status == 200 and pair.d.calls[0].body["token_ids"] == [5, 6, 7]
        assert json.loads(raw)["choices"] == [choice([10, 11], "length")]
        assert 'kvferry_router_first_tokens_total{by="decode"} 1.0' in await metrics(pair)


async def test_of_one_token_prefill_makes_all() -> None:
    async with begun("pull") as pair:
        pair.p.script = first("length")

        async def alone(call: Call) -> web.StreamResponse:
            assert "kv_transfer_params" not in call.body
            return web.json_response({"request_id": "r", "choices": [choice([9], "length")], "usage": counts(3, 1)})

        pair.p.script = alone
        status, _, raw = await pair.post(GENERATE, asked(stream=False, sampling_params={"max_tokens": 1}))
        assert status == 200 and json.loads(raw)["choices"] == [choice([9], "length")] and pair.d.calls == []
        assert 'kvferry_router_first_tokens_total{by="prefill"} 1.0' in await metrics(pair)


async def test_decode_that_answers_a_stream_as_a_whole() -> None:
    async with begun("pull") as pair:

        async def whole(call: Call) -> web.StreamResponse:
            return web.json_response({"choices": []})

        pair.d.script = whole
        status, _, raw = await pair.post(GENERATE, asked())
        facts = error_of(raw.decode().strip().split("\n\n")[-1][6:].encode())
        assert status == 200 and "answered a stream as a whole" in facts["message"]
