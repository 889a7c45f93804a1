"""What each leg is told: rows C01 to C04, C07 to C12, C34, C35, C37, C44, C67."""

from __future__ import annotations

import asyncio
import json
import uuid

import pytest
from aiohttp import web
from scripted import (
    CHAT,
    COMPLETIONS,
    MODEL,
    Call,
    Engine,
    after,
    decode_ok,
    error_of,
    hang,
    prefill_ok,
    prefilled,
    refuse,
    serving,
    usage,
)

from kvferry.router.dispatch import dispatch

MESSAGES = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
HOP_BY_HOP = ("Keep-Alive", "TE", "Upgrade", "Proxy-Authorization", "X-Named")


async def test_c01_chat_limits() -> None:
    async with serving() as pair:
        first = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 64}
        second = {"model": MODEL, "messages": MESSAGES}
        for number, body in enumerate((first, second)):
            status, _, _ = await pair.post(CHAT, body)
            assert status == 200
            p, d = pair.p.calls[number].body, pair.d.calls[number].body
            assert (p["max_tokens"], p["max_completion_tokens"], p["stream"]) == (1, 1, False)
            assert d.pop("kv_transfer_params")
            assert d == body
        assert len(pair.p.calls) == len(pair.d.calls) == 2


async def test_c02_stream_options_and_min_tokens() -> None:
    async def strict(call: Call) -> web.StreamResponse:
        body = call.body
        if (body.get("stream_options") and not body.get("stream")) or body.get("min_tokens", 0) > body["max_tokens"]:
            return web.json_response({"error": {"message": "bad", "type": "BadRequestError", "code": 400}}, status=400)
        return await prefill_ok(call)

    async with serving() as pair:
        pair.p.script = strict
        sent = {"stream": True, "stream_options": {"include_usage": True}, "min_tokens": 5, "max_tokens": 100}
        status, _, raw = await pair.complete(**sent)
        assert status == 200
        p, d = pair.p.calls[0].body, pair.d.calls[0].body
        assert p["stream"] is False and "stream_options" not in p and p.get("min_tokens", 0) <= 1
        assert sent.items() <= d.items()
        events = [part for part in raw.decode().split("\n\n") if part]
        assert events[-1] == "data: [DONE]"
        last = json.loads(events[-2].removeprefix("data: "))
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 2


GENERATE = "/inference/v1/generate"
RESPONSES = "/v1/responses"


async def test_c03_generate_has_its_limits_in_sampling_params() -> None:
    """C03: on P the limit is 1 and there is no minimum, nothing appears at top level; on D nothing changed."""
    async with serving() as pair:
        sent = {"model": MODEL, "token_ids": [1, 2, 3, 4], "sampling_params": {"max_tokens": 32, "min_tokens": 4}}
        status, _, _ = await pair.post(GENERATE, sent)
        assert status == 200
        p, d = pair.p.calls[0].body, pair.d.calls[0].body
        assert p["sampling_params"] == {"max_tokens": 1, "ignore_eos": True}
        assert not p.keys() & {"max_tokens", "max_completion_tokens", "min_tokens"} and p["stream"] is False
        assert p["kv_transfer_params"]["transfer_id"] == d.pop("kv_transfer_params")["transfer_id"]
        assert d == sent


@pytest.mark.parametrize("stream", [False, True])
async def test_c04_responses_are_one_transfer(stream: bool) -> None:
    """C04: P and D each get one leg of one transfer; P stores, streams and parses nothing."""
    async with serving() as pair:
        tool = {"type": "function", "name": "f", "parameters": {}}
        sent = {"model": MODEL, "input": "hi", "stream": stream, "tools": [tool], "tool_choice": "required"}
        sent |= {"max_output_tokens": 9, "include": ["message.output_text.logprobs"]}
        status, headers, _ = await pair.post(RESPONSES, sent)
        assert status == 200 and len(pair.p.calls) == len(pair.d.calls) == 1
        p, d = pair.p.calls[0].body, pair.d.calls[0].body
        assert p["kv_transfer_params"]["transfer_id"] == d.pop("kv_transfer_params")["transfer_id"]
        assert headers["x-kvferry-transfer-id"] == p["kv_transfer_params"]["transfer_id"]
        assert d == sent
        assert (p["max_output_tokens"], p["store"], p["stream"], p["tool_choice"]) == (1, False, False, "auto")
        assert p["tools"] == [tool] and "include" not in p


@pytest.mark.parametrize("field", ["previous_response_id", "background"])
async def test_c04_what_only_one_engine_remembers_is_refused_by_field(field: str) -> None:
    """C04: never D alone."""
    async with serving() as pair:
        value = "resp_1" if field == "previous_response_id" else True
        status, _, raw = await pair.post(RESPONSES, {"model": MODEL, "input": "hi", field: value})
        assert status == 501 and error_of(raw)["param"] == field and field in error_of(raw)["message"]
        assert pair.p.calls == pair.d.calls == []


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
async def test_c07_prompt_logprobs_come_from_prefill(route: str) -> None:
    entries = [None, {"5": {"logprob": -0.5}}]

    async def script(call: Call) -> web.StreamResponse:
        choice = {"index": 0, "prompt_logprobs": entries}
        return prefilled(call, choices=[choice], prompt_logprobs=entries)

    async with serving() as pair:
        pair.p.script = script
        body = {"model": MODEL, "prompt": "hi", "messages": MESSAGES, "prompt_logprobs": 1}
        status, headers, raw = await pair.post(route, body)
        assert status == 200 and int(headers["Content-Length"]) == len(raw)
        reply = json.loads(raw)
        found = reply["prompt_logprobs"] if route == CHAT else reply["choices"][0]["prompt_logprobs"]
        assert found == entries
        assert pair.p.calls[0].body["prompt_logprobs"] == 1
        assert "prompt_logprobs" not in pair.d.calls[0].body
        refused = {"error": {"message": "not when stream", "type": "BadRequestError", "param": None, "code": 400}}
        pair.p.script, pair.d.script = refuse(400, refused), hang
        status, _, raw = await pair.post(route, body | {"stream": True})
        assert (status, json.loads(raw)) == (400, refused)
        assert pair.p.calls[1].body["stream"] is True and pair.p.calls[1].body["prompt_logprobs"] == 1
        assert all("prompt_logprobs" not in call.body for call in pair.d.calls)


@pytest.mark.parametrize(
    ("route", "field", "body"),
    [
        (COMPLETIONS, "use_beam_search", {"use_beam_search": True, "n": 2}),
        (COMPLETIONS, "prompt_embeds", {"prompt_embeds": "AAAA"}),
    ],
)
async def test_what_no_pair_can_do_is_refused_by_field(route: str, field: str, body: dict) -> None:
    async with serving() as pair:
        status, _, raw = await pair.post(route, {"model": MODEL, "prompt": "a", "messages": MESSAGES} | body)
        assert status == 501
        assert error_of(raw)["param"] == field and field in error_of(raw)["message"]
        assert pair.p.calls == pair.d.calls == []


@pytest.mark.parametrize("choice", ["required", "auto", {"type": "function", "function": {"name": "f"}}, "absent"])
async def test_c09_tools_stay_and_nothing_must_be_parsed(choice: object) -> None:
    async def parses(call: Call) -> web.StreamResponse:
        if call.body.get("tool_choice", "auto") not in (None, "none"):
            return web.json_response({"error": {"message": "cannot parse a call"}}, status=500)
        return await prefill_ok(call)

    async with serving() as pair:
        pair.p.script = parses
        body = {"model": MODEL, "messages": MESSAGES, "tools": [TOOL], "response_format": {"type": "json_object"}}
        if choice != "absent":
            body["tool_choice"] = choice
        status, _, _ = await pair.post(CHAT, body)
        assert status == 200
        p, d = pair.p.calls[0].body, pair.d.calls[0].body
        # null renders the tools also under --exclude-tools-when-tool-choice-none, "none" would not
        assert p["tools"] == [TOOL] and p["tool_choice"] is None
        assert p["response_format"] == {"type": "json_object"}
        assert d.pop("kv_transfer_params") and d == body


async def test_c09_a_clients_none_stays_none() -> None:
    async with serving() as pair:
        await pair.post(CHAT, {"model": MODEL, "messages": MESSAGES, "tools": [TOOL], "tool_choice": "none"})
        assert pair.p.calls[0].body["tool_choice"] == pair.d.calls[0].body["tool_choice"] == "none"


async def test_c10_the_routers_key() -> None:
    engines = [Engine("prefill")], [Engine("decode")]
    for engine in (*engines[0], *engines[1]):
        engine.key = "k1"
    async with serving(prefill=engines[0], decode=engines[1], api_key="k1") as pair:  # ready within 5 s, or it raises
        status, _, _ = await pair.complete()
        assert status == 200
        for engine in (pair.p, pair.d):
            assert {headers.get("Authorization") for _, headers in engine.probes} == {"Bearer k1"}
            assert engine.calls[0].headers["Authorization"] == "Bearer k1"
        await pair.post(COMPLETIONS, {"model": MODEL, "prompt": "x"}, Authorization="Bearer other")
        assert [e.calls[1].headers["Authorization"] for e in (pair.p, pair.d)] == ["Bearer other"] * 2


async def test_c10_no_key_means_no_header() -> None:
    async with serving() as pair:
        assert (await pair.complete())[0] == 200
        for engine in (pair.p, pair.d):
            assert all("Authorization" not in headers for _, headers in engine.probes)
            assert "Authorization" not in engine.calls[0].headers


async def test_c10_a_key_that_is_missing_is_named() -> None:
    engine = Engine("prefill")
    engine.key = "k1"
    async with serving(prefill=[engine], ready=False) as pair:
        async with asyncio.timeout(5):
            while "401" not in pair.running.pool.engines["prefill"][0].reason:
                await pair.running.pool.change()
        status, _, raw = await pair.complete()
        assert status == 503 and "--api-key" in error_of(raw)["message"] and engine.url in error_of(raw)["message"]


async def test_c11_lengths_and_hop_by_hop_headers() -> None:
    async def decode(call: Call) -> web.StreamResponse:
        body = json.dumps({"choices": [{"index": 0, "text": "ü"}], "usage": usage(100, 4, cached=99)}).encode()
        headers = {"Keep-Alive": "timeout=9", "Upgrade": "h2c", "X-Named": "1", "Connection": "X-Named", "X-Mine": "1"}
        return web.Response(body=body, headers=headers, content_type="application/json")

    async def prefill(call: Call) -> web.StreamResponse:
        return prefilled(call, usage=usage(100, 1, cached=96))

    async with serving() as pair:
        pair.p.script, pair.d.script = prefill, decode
        sent = {name: "x" for name in HOP_BY_HOP} | {"Connection": "X-Named", "X-Other": "kept"}
        body = {"model": MODEL, "prompt": "hé", "stop": ["s"] * 50, "max_tokens": 4}
        async with pair.session.post(pair.url + COMPLETIONS, json=body, headers=sent) as response:
            raw = await response.read()
            assert response.status == 200
            assert int(response.headers["Content-Length"]) == len(raw)
            assert "Transfer-Encoding" not in response.headers and response.headers["X-Mine"] == "1"
            assert all(name not in response.headers for name in ("Keep-Alive", "Upgrade", "X-Named"))
        # C62: P's number, not D's
        assert json.loads(raw)["usage"]["prompt_tokens_details"] == {"cached_tokens": 96}
        p, d = pair.p.calls[0], pair.d.calls[0]
        for call in (p, d):
            assert int(call.headers["Content-Length"]) == len(call.raw)
            assert all(name not in call.headers for name in (*HOP_BY_HOP, "Transfer-Encoding", "Connection"))
            assert call.headers["X-Other"] == "kept"
        assert len(p.raw) < len(json.dumps(body)) < len(d.raw)


async def test_c12_both_legs_get_all_parts_of_a_message() -> None:
    content = [{"type": "text", "text": "what"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]
    async with serving() as pair:
        await pair.post(CHAT, {"model": MODEL, "messages": [{"role": "user", "content": content}]})
        assert pair.p.calls[0].body["messages"][0]["content"] == content
        assert pair.d.calls[0].body["messages"][0]["content"] == content


async def test_c34_the_clients_request_id_pairs_nothing() -> None:
    gate = asyncio.Event()
    async with serving() as pair:
        pair.d.script = after(gate, decode_ok)
        both = [
            asyncio.create_task(pair.post(COMPLETIONS, {"model": MODEL, "prompt": text}, X_Request_Id="dup"))
            for text in ("one", "two")
        ]
        await pair.d.call(1)
        gate.set()
        for text, (status, headers, raw) in zip(("one", "two"), await asyncio.gather(*both), strict=True):
            assert status == 200 and json.loads(raw)["choices"][0]["text"] == json.dumps(text)
            assert headers["X-Request-Id"] == "dup"
        ids = [call.params["transfer_id"] for call in pair.d.calls]
        assert len(set(ids)) == 2 and set(ids) == {call.params["transfer_id"] for call in pair.p.calls}
        assert not any("dup" in json.dumps(call.body) for call in (*pair.p.calls, *pair.d.calls))


async def test_c37_engines_that_name_requests_as_they_like() -> None:
    """C37: P and D pair by the transfer id alone; whatever they add to a request's id is theirs."""

    async def prefill(call: Call) -> web.StreamResponse:
        return prefilled(call, id=f"cmpl-{call.headers['X-Request-Id']}-0-{uuid.uuid4().hex[:8]}")

    async with serving() as pair:
        pair.p.script = prefill
        for _ in range(3):
            status, _, _ = await pair.post(COMPLETIONS, {"model": MODEL, "prompt": "a"}, X_Request_Id="a-0-1-b")
            assert status == 200
        for p, d in zip(pair.p.calls, pair.d.calls, strict=True):
            assert p.params["transfer_id"] == d.params["transfer_id"]
            assert p.headers["X-Request-Id"] == d.headers["X-Request-Id"] == "a-0-1-b"
            assert b"a-0-1-b" not in p.raw + d.raw
        assert len({call.params["transfer_id"] for call in pair.p.calls}) == 3


async def test_c44_prefill_ends_by_its_length_only() -> None:
    """C44: a stop that is P's one token would end it otherwise than by length, and the KV with it."""
    async with serving() as pair:
        ends = {"stop_token_ids": [5], "stop": ["x"], "include_stop_str_in_output": True, "ignore_eos": False}
        status, _, _ = await pair.complete(**ends)
        assert status == 200
        p, d = pair.p.calls[0].body, pair.d.calls[0].body
        assert not p.keys() & {"stop_token_ids", "stop", "include_stop_str_in_output"} and p["ignore_eos"] is True
        assert ends.items() <= d.items()


async def test_c08_echo_with_logprobs_is_merged() -> None:
    """C08: the prompt's part is P's, the answer's D's; D is asked for nothing of the prompt."""

    async def prefill(call: Call) -> web.StreamResponse:
        scores = {"text_offset": [0, 3, 6], "token_logprobs": [None, -1.0, -9.0], "tokens": ["The", " sk", "x"]}
        choice = {
            "index": 0,
            "text": "The skx",
            "logprobs": scores | {"top_logprobs": [None, {" sk": -1.0}, {"x": -9.0}]},
        }
        return prefilled(call, choices=[choice | {"prompt_logprobs": [None, {"7": {}}]}])

    async def decode(call: Call) -> web.StreamResponse:
        scores = {"text_offset": [0], "token_logprobs": [-2.0], "tokens": ["y"], "top_logprobs": [{"y": -2.0}]}
        choice = {"index": 0, "text": "y", "logprobs": scores, "token_ids": [9], "prompt_token_ids": [6, 7]}
        return web.json_response({"choices": [choice], "usage": usage(2, 1)})

    async with serving() as pair:
        pair.p.script, pair.d.script = prefill, decode
        status, _, raw = await pair.complete(prompt="The sk", echo=True, logprobs=1)
        assert status == 200
        (choice,) = json.loads(raw)["choices"]
        assert choice["text"] == "The sky" and choice["prompt_logprobs"] == [None, {"7": {}}]
        assert choice["logprobs"] == {
            "text_offset": [0, 3, 6],
            "token_logprobs": [None, -1.0, -2.0],
            "tokens": ["The", " sk", "y"],
            "top_logprobs": [None, {" sk": -1.0}, {"y": -2.0}],
        }
        assert choice["token_ids"] is None and choice["prompt_token_ids"] is None
        assert pair.p.calls[0].body["echo"] is True and pair.p.calls[0].body["logprobs"] == 1
        d = pair.d.calls[0].body
        assert "echo" not in d and "prompt_logprobs" not in d and d["logprobs"] == 1


@pytest.mark.parametrize("body", [{"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}])
async def test_an_answer_never_lacks_what_prefill_was_to_tell(body: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """C07, C08: P's answer doesn't come; the client hears so, instead of half a reply."""
    monkeypatch.setattr(dispatch, "PREFILL_TAIL_S", 0.05)
    async with serving() as pair:
        pair.p.script = hang
        status, _, raw = await pair.complete(**body)
        assert status == 502 and error_of(raw)["side"] == "prefill"


async def test_an_echo_without_an_answer_is_prefills_alone() -> None:
    """Nothing is to be decoded, so nothing is transferred; the body is the client's."""
    async with serving() as pair:
        pair.p.script = decode_ok
        sent = {"model": MODEL, "prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 0}
        status, _, _ = await pair.post(COMPLETIONS, sent)
        assert status == 200 and pair.d.calls == [] and pair.p.calls[0].body == sent


async def test_c35_a_transfer_id_of_the_client_is_dropped() -> None:
    gate = asyncio.Event()
    async with serving() as pair:
        pair.d.script = after(gate, decode_ok)
        first = asyncio.create_task(pair.complete(prompt="one"))
        taken = (await pair.d.call(0)).params["transfer_id"]
        second = asyncio.create_task(pair.complete(prompt="two", kv_transfer_params={"transfer_id": taken}))
        assert (await pair.d.call(1)).params["transfer_id"] != taken
        gate.set()
        assert [(await task)[0] for task in (first, second)] == [200, 200]
        assert len({call.params["transfer_id"] for call in pair.p.calls}) == 2
        assert pair.p.side.abandoned == {}


@pytest.mark.parametrize("config", [{}, {"mode": "pull"}, {"mode": "colocated", "prefill": []}])
async def test_c67_addresses_of_the_client_reach_no_engine(config: dict) -> None:
    async with serving(**config) as pair:
        evil = {"remote_host": "10.0.0.9", "remote_port": 9, "do_remote_prefill": True, "extra": "10.0.0.9"}
        status, _, _ = await pair.complete(
            kv_transfer_params=evil, ec_transfer_params=evil, vllm_xargs={"kv_transfer_params": evil, "mine": 1}
        )
        assert status == 200
        calls = [call for engine in (*pair.prefills, pair.d) for call in engine.calls]
        assert calls and all(b"10.0.0.9" not in call.raw for call in calls)
        assert all(call.body["vllm_xargs"] == {"mine": 1} for call in calls)
        if pair.prefills:
            assert pair.d.calls[0].params["remote_host"] == "127.0.0.1"
            assert pair.d.calls[0].params["remote_port"] == pair.p.side.port


@pytest.mark.parametrize("raw", [b"{", b"[1]", b"", b"\xff\xfe", b"[" * 100_000])
async def test_a_body_that_is_no_request(raw: bytes) -> None:
    """The engine says what is wrong with it; where it would take it, the router does."""
    said = {"error": {"message": "1 validation error", "type": "Bad Request", "param": "body", "code": 400}}

    async def takes(call: Call) -> web.StreamResponse:
        return web.Response()

    async with serving() as pair:
        for script, expected in ((refuse(400, said), "Bad Request"), (takes, "invalid_request_error")):
            pair.d.script = script
            async with pair.session.post(pair.url + COMPLETIONS, data=raw) as response:
                assert response.status == 400
                assert error_of(await response.read())["type"] == expected
            assert pair.d.calls[-1].raw == raw
        assert pair.p.calls == []


@pytest.mark.parametrize("name", [b"kv_transfer_params", b"\\u006bv_transfer_params"])
async def test_c67_a_body_that_we_cannot_read_names_no_peer_to_an_engine(name: bytes) -> None:
    """C67: an engine may read what the router could not."""
    async with serving() as pair:
        raw = b'{"' + name + b'": {"remote_host": "10.0.0.9"}'
        async with pair.session.post(pair.url + COMPLETIONS, data=raw) as response:
            assert response.status == 400
        assert pair.p.calls == pair.d.calls == []


@pytest.mark.parametrize("kind", ["text/plain", "application/json; charset=utf-8", None])
async def test_both_legs_get_the_clients_content_type(kind: str | None) -> None:
    """An engine refuses what isn't JSON by name; only it knows what it takes."""
    async with serving() as pair:
        headers = {} if kind is None else {"Content-Type": kind}
        raw = json.dumps({"model": 5, "prompt": "a"}).encode()
        skip = ("Content-Type",) if kind is None else ()
        async with pair.session.post(pair.url + COMPLETIONS, data=raw, headers=headers, skip_auto_headers=skip) as got:
            assert got.status == 200
        assert pair.p.calls[0].headers.get("Content-Type") == pair.d.calls[0].headers.get("Content-Type") == kind
        assert pair.p.calls[0].body["model"] == pair.d.calls[0].body["model"] == 5


async def test_a_body_above_the_limit() -> None:
    async with serving(max_body_bytes=1000) as pair:
        status, _, raw = await pair.complete(prompt="x" * 2000)
        assert status == 413 and "1000" in error_of(raw)["message"]
        assert pair.p.calls == []


async def test_round_robin_over_pairs() -> None:
    async with serving(
        prefill=[Engine("prefill"), Engine("prefill")], decode=[Engine("decode"), Engine("decode"), Engine("decode")]
    ) as pair:
        # each engine comes up on its own time: take what is ready as the number of turns
        pool = pair.running.pool
        async with asyncio.timeout(5):
            while not all(engine.ready for engine in pool.all()):
                await pool.change()
        for _ in range(6):
            assert (await pair.complete())[0] == 200
        assert [len(engine.calls) for engine in pair.prefills] == [3, 3]
        assert [len(engine.calls) for engine in pair.decodes] == [2, 2, 2]
