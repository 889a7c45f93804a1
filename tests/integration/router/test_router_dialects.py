"""How a pair is told of its transfer, by connector and mode (C38)."""

from __future__ import annotations

import asyncio

from aiohttp import web
from scripted import (
    CHAT,
    COMPLETIONS,
    MODEL,
    Call,
    after,
    decode_ok,
    error_of,
    prefill_ok,
    serving,
)

from kvferry.router.engines.dialect import UPSTREAM_PREFILL

MESSAGES = [{"role": "user", "content": "hello"}]
GENERATE = "/inference/v1/generate"
RESPONSES = "/v1/responses"


async def test_c38_both_legs_start_at_once() -> None:
    loop = asyncio.get_running_loop()

    async def slow(call: Call) -> web.StreamResponse:
        gate = asyncio.Event()
        loop.call_later(0.5, gate.set)
        return await after(gate, prefill_ok)(call)

    async def slower(call: Call) -> web.StreamResponse:
        gate = asyncio.Event()
        loop.call_later(0.6, gate.set)
        return await after(gate, decode_ok)(call)

    async with serving() as pair:
        pair.p.script, pair.d.script = slow, slower
        begun = loop.time()
        assert (await pair.complete(stream=True))[0] == 200
        assert abs(pair.d.calls[0].at - pair.p.calls[0].at) < 0.05
        assert 0.6 <= loop.time() - begun < 0.9  # the longer leg, not the sum


async def test_pull_decodes_after_prefill() -> None:
    gate = asyncio.Event()
    async with serving(mode="pull") as pair:
        pair.p.script = after(gate, prefill_ok)
        task = asyncio.create_task(pair.complete())
        call = await pair.p.call()
        assert pair.d.calls == [] and call.params["mode"] == "pull"
        gate.set()
        assert (await task)[0] == 200
        assert pair.d.calls[0].params == {
            "transfer_id": call.params["transfer_id"],
            "do_remote_prefill": True,
            "mode": "pull",
            "remote_host": "127.0.0.1",
            "remote_port": pair.p.side.port,
            "remote_engine_id": "prefill-engine",
            "remote_tp_size": 1,
        }


async def test_upstream_pull_hands_on_what_prefill_returned() -> None:
    given = {"do_remote_prefill": True, "remote_engine_id": "E", "remote_block_ids": [[1, 2]], "remote_request_id": "r"}

    async def script(call: Call) -> web.StreamResponse:
        return web.json_response({"choices": [], "kv_transfer_params": given})

    async with serving(connector="upstream-pull") as pair:
        pair.p.script = script
        assert (await pair.complete())[0] == 200
        assert pair.p.calls[0].params == UPSTREAM_PREFILL
        assert pair.d.calls[0].params == given
        status, _, raw = await pair.complete(n=2)
        assert status == 501 and error_of(raw)["param"] == "n"


async def test_upstream_push_gives_every_key_and_one_fresh_request_id() -> None:
    async def script(call: Call) -> web.StreamResponse:
        return web.json_response({"choices": [], "kv_transfer_params": {"remote_engine_id": "E"}})

    async with serving(connector="upstream-push", spec={"engine_id": "E", "tp": 2}) as pair:
        pair.p.script = script
        names = ((COMPLETIONS, "cmpl-{}-0"), (CHAT, "chatcmpl-{}"), (GENERATE, "generate-tokens-{}"))
        for route, external in names:
            body = {"model": MODEL, "prompt": "hi", "messages": MESSAGES}
            status, headers, _ = await pair.post(route, body, X_Request_Id="dup")
            fresh = headers["x-kvferry-transfer-id"]
            p, d = pair.p.calls[-1], pair.d.calls[-1]
            assert status == 200 and p.headers["X-Request-Id"] == d.headers["X-Request-Id"] == fresh
            assert p.params == UPSTREAM_PREFILL
            assert d.params == {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": "E",
                "remote_request_id": external.format(fresh),
                "remote_block_ids": [],
                "remote_host": "127.0.0.1",
                "remote_port": pair.p.side.port,
                "tp_size": 2,
                "dcp_size": 1,
                "pp_size": 1,
            }


async def test_upstream_push_cannot_pair_responses() -> None:
    """Their requests carry no id of ours."""
    async with serving(connector="upstream-push", spec={"engine_id": "E"}) as pair:
        status, _, raw = await pair.post(RESPONSES, {"model": MODEL, "input": "a"})
        assert status == 501 and RESPONSES in error_of(raw)["message"]
        assert pair.p.calls == pair.d.calls == []


async def test_colocated_passes_the_body_through() -> None:
    async with serving(mode="colocated", prefill=[]) as pair:
        body = {"model": MODEL, "prompt": ["a", "b"], "echo": True, "logprobs": 1, "prompt_logprobs": 1, "n": 2}
        assert (await pair.post(COMPLETIONS, body))[0] == 200
        assert pair.d.calls[0].body == body
