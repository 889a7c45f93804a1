"""Routes that take no pair, and the models that both sides serve (C04, C67)."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web
from scripted import (
    COMPLETIONS,
    MODEL,
    Call,
    Engine,
    Script,
    error_of,
    hang,
    prefill_ok,
    refuse,
    serving,
)

RESPONSES = "/v1/responses"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["/v1/messages", "/v1/audio/speech", "/pause", "/v1/load_lora_adapter"])
async def test_c04_other_routes_are_refused_by_name(route: str, stream: bool) -> None:
    """C04, and no client steers an engine."""
    async with serving() as pair:
        status, _, raw = await pair.post(route, {"model": MODEL, "input": "hi", "stream": stream})
        assert status == 501
        assert route in error_of(raw)["message"]
        assert pair.p.calls == pair.d.calls == []


@pytest.mark.parametrize("route", ["/tokenize", "/detokenize", "/v1/embeddings", "/v1/chat/completions/render"])
async def test_what_moves_no_kv_goes_to_one_engine_as_it_is(route: str) -> None:
    async def answer(call: Call) -> web.StreamResponse:
        return web.Response(status=418, body=call.raw[::-1], headers={"X-Mine": "1"}, content_type="text/plain")

    async with serving() as pair:
        pair.d.script = answer
        raw = b'{"prompt" :  "a" , "model":"nope"}'
        headers = {"Content-Type": "application/json", "Authorization": "Bearer mine"}
        async with pair.session.post(pair.url + route + "?q=1", data=raw, headers=headers) as response:
            assert response.status == 418 and response.headers["X-Mine"] == "1"
            assert await response.read() == raw[::-1]
        assert pair.p.calls == [] and len(pair.d.calls) == 1
        assert pair.d.calls[0].headers["Authorization"] == "Bearer mine"
        assert pair.d.calls[0].request.path_qs == route + "?q=1"


@pytest.mark.parametrize(
    "sent", [b'{"kv_transfer_params":{"a":1},"k":1}', b'{"\\u006bv_transfer_params":{"a":1},"k":1}']
)
async def test_c67_nor_do_addresses_pass_with_what_moves_no_kv(sent: bytes) -> None:
    """C67, however the name is spelt."""
    kind = {"Content-Type": "application/json"}
    async with serving() as pair, pair.session.post(pair.url + "/tokenize", data=sent, headers=kind):
        assert pair.d.calls[0].body == {"k": 1}


async def test_a_stored_response_is_looked_for_on_every_decode_engine() -> None:
    async with serving(decode=[Engine("decode"), Engine("decode")]) as pair:
        async with asyncio.timeout(5):
            while not all(engine.ready for engine in pair.running.pool.all()):
                await pair.running.pool.change()
        pair.decodes[0].script = refuse(404, {"error": {"message": "no"}})
        pair.decodes[1].script = refuse(409, {"error": {"message": "ended"}})
        status, _, raw = await pair.post(f"{RESPONSES}/resp_1/cancel", {})
        assert (status, json.loads(raw)) == (409, {"error": {"message": "ended"}})
        pair.decodes[1].script = refuse(404, {"error": {"message": "no"}})
        status, _, raw = await pair.post(f"{RESPONSES}/resp_1/cancel", {})
        assert (status, json.loads(raw)) == (404, {"error": {"message": "no"}})
        assert pair.p.calls == []


async def test_ping_and_a_wrong_method() -> None:
    async with serving() as pair:
        for method in ("GET", "POST"):
            async with pair.session.request(method, pair.url + "/ping") as response:
                assert (response.status, await response.read()) == (200, b"")
        async with pair.session.get(pair.url + COMPLETIONS) as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
        async with pair.session.get(pair.url + "/nope") as response:
            assert response.status == 404


def knows(*names: str) -> Script:
    """An engine that refuses other models, as one does."""

    async def script(call: Call) -> web.StreamResponse:
        model = call.body["model"]
        if model not in names:
            said = {"error": {"message": f"The model `{model}` does not exist.", "type": "NotFoundError", "code": 404}}
            return web.json_response(said, status=404)
        return await (prefill_ok if call.params.get("do_remote_decode") else hang)(call)

    return script


async def test_models_and_an_unknown_one() -> None:
    """The engine that doesn't know a model says so itself; nothing is computed by the other alone."""
    prefill, decode = Engine("prefill"), Engine("decode")
    prefill.models, decode.models = ["toy", "only-p"], ["toy", "only-d"]
    async with serving(prefill=[prefill], decode=[decode]) as pair:
        async with pair.session.get(pair.url + "/v1/models") as response:
            assert [entry["id"] for entry in (await response.json())["data"]] == ["toy"]
        prefill.script, decode.script = knows(*prefill.models), knows(*decode.models)
        for number, name in enumerate(("only-p", "only-d", "typo")):
            status, _, raw = await pair.complete(model=name)
            assert status == 404 and json.loads(raw)["error"]["message"] == f"The model `{name}` does not exist."
            for call in (pair.p.calls[number], pair.d.calls[number]):
                async with asyncio.timeout(1):
                    await call.ended.wait()


async def test_a_model_that_was_loaded_since_the_engines_were_asked() -> None:
    """An adapter that no list has yet: the engines know."""
    async with serving() as pair:
        status, _, _ = await pair.complete(model="adapter")
        assert status == 200
        assert pair.p.calls[0].body["model"] == pair.d.calls[0].body["model"] == "adapter"
