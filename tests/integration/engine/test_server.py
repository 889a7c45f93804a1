"""The engine's HTTP server over a scripted loop: routes, streams, ends of all kinds, as vLLM's server has them."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from scripted_loop import BUILTIN, MAX_LEN, SOON, VOCAB, Front, serving

from kvferry.engine.loop import Stats
from kvferry.engine.scheduler import Counts
from kvferry.engine.text import EOS_TOKEN_ID

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
PUSH = {"do_remote_prefill": True, "transfer_id": "0" * 32, "remote_host": "h", "remote_port": 5600}


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    async with serving() as running:
        yield running


def error(reply: tuple[int, Any]) -> tuple[int, str, str | None]:
    """Status, type and parameter; the body's code is the status."""
    status, body = reply
    assert body["error"]["code"] == status
    assert body["error"]["message"]
    return status, body["error"]["type"], body["error"]["param"]


# -- whole replies


async def test_a_completion(front: Front) -> None:
    params = PUSH | {"mode": "push"}
    body = {"model": "toy", "prompt": " ba bo", "max_tokens": 2, "kv_transfer_params": params, "return_token_ids": True}
    reply = front.post(COMPLETIONS, body, **{"X-Request-Id": "abc", "X-Vllm-Priority": "3"})
    request = await front.engine.next()
    assert re.fullmatch(r"cmpl-abc-0-[0-9a-f]{8}", request.request_id)
    assert list(request.prompt) == BUILTIN.encode(" ba bo")
    assert request.kv_transfer_params == params
    assert (request.sampling.max_tokens, request.sampling.priority) == (2, 3)
    front.engine.say(request, " be", num_cached_tokens=1)
    front.engine.say(request, " bi", "length", kv_transfer_params={"transfer_id": "0" * 32})
    status, facts = await reply
    assert status == 200
    assert (facts["id"], facts["object"], facts["model"]) == ("cmpl-abc", "text_completion", "toy")
    assert facts["kv_transfer_params"] == {"transfer_id": "0" * 32}
    assert facts["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
    assert (facts["usage"]["prompt_tokens"], facts["usage"]["completion_tokens"]) == (2, 2)
    (choice,) = facts["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" be bi", "length", None)
    assert choice["token_ids"] == BUILTIN.encode(" be bi")


async def test_a_chat(front: Front) -> None:
    reply = front.post(CHAT, {"messages": USER, "request_id": "mine"})
    request = await front.engine.next()
    assert request.request_id.startswith("chatcmpl-mine-")
    assert BUILTIN.decode(request.prompt) == "<|user|>\nhi\n<|assistant|>\n"
    assert request.sampling.max_tokens == MAX_LEN - len(request.prompt)
    front.engine.say(request, " ba", "stop", ids=[*BUILTIN.encode(" ba"), EOS_TOKEN_ID])
    status, facts = await reply
    assert (status, facts["id"]) == (200, "chatcmpl-mine")
    (choice,) = facts["choices"]
    assert choice["message"]["content"] == " ba"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert facts["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_token(front: Front, include: bool) -> None:
    (stop,) = BUILTIN.encode(" bi")
    body = {"prompt": "x", "stop_token_ids": [stop], "include_stop_str_in_output": include}
    reply = front.post(COMPLETIONS, body)
    request = await front.engine.next()
    assert request.sampling.stop_token_ids == {stop}
    front.engine.say(request, " ba")
    front.engine.say(request, " bi", "stop", stop_token=stop)
    (choice,) = (await reply)[1]["choices"]
    assert choice["text"] == (" ba bi" if include else " ba")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


async def test_several_prompts_with_several_choices(front: Front) -> None:
    reply = front.post(COMPLETIONS, {"prompt": [[300], [301, 302]], "n": 2}, **{"X-Request-Id": "abc"})
    requests = [await front.engine.next() for _ in range(4)]
    names = [request.request_id[:-9] for request in requests]
    assert names == ["0_cmpl-abc-0", "1_cmpl-abc-0", "0_cmpl-abc-1", "1_cmpl-abc-1"]
    assert [list(request.prompt) for request in requests] == [[300], [300], [301, 302], [301, 302]]
    for at in (2, 0, 3, 1):
        params = {"of": at}
        front.engine.say(requests[at], " bu", "length", num_cached_tokens=at // 2, kv_transfer_params=params)
    _, facts = await reply
    assert [choice["index"] for choice in facts["choices"]] == [0, 1, 2, 3]
    assert facts["kv_transfer_params"] == {"of": 0}
    usage = facts["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 4)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 1


async def test_an_error_of_the_engine(front: Front) -> None:
    reply = front.post(COMPLETIONS, {"prompt": "x", "n": 2})
    first, second = await front.engine.next(), await front.engine.next()
    front.engine.say(first, " ba")
    front.engine.say(first, end="error", error="the KV did not come")
    status, facts = await reply
    assert error((status, facts)) == (500, "InternalServerError", None)
    assert facts["error"]["message"] == "the KV did not come"
    assert await front.engine.until_aborted() == [second.request_id]


# -- streams


async def test_an_event_per_token(front: Front) -> None:
    options = {"include_usage": True}
    async with front.stream(COMPLETIONS, {"prompt": [300, 301], "stream_options": options}) as stream:
        request = await front.engine.next()
        for text in (" ba", ' "é"', "\n", " be"):
            front.engine.say(request, text, num_cached_tokens=1)
            assert await stream.text() == text
        front.engine.say(request, " bi", "length")
        last, usage, done = await stream.rest()
        response = await stream.response()
    assert response.status == 200
    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert last["choices"][0]["text"] == " bi"
    assert last["choices"][0]["finish_reason"] == "length"
    made = 3 + len(BUILTIN.encode(' "é"'))
    facts = {"prompt_tokens": 2, "completion_tokens": made + 1, "total_tokens": made + 3}
    assert usage["usage"] == facts | {"prompt_tokens_details": {"cached_tokens": 1}}
    assert done == "[DONE]"
    assert front.engine.aborted == []


async def test_a_streamed_chat(front: Front) -> None:
    body = {"messages": USER, "max_tokens": 3, "return_token_ids": True, "logprobs": True, "top_logprobs": 1}
    async with front.stream(CHAT, body) as stream:
        request = await front.engine.next()
        front.engine.say(request, " ba")
        opening, first = await stream.next(), await stream.next()
        assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert opening["prompt_token_ids"] == list(request.prompt)
        assert first["choices"][0]["token_ids"] == BUILTIN.encode(" ba")
        front.engine.say(request, " be")
        second = await stream.next()
        assert second["choices"][0]["logprobs"]["content"][0]["token"] == " be"
        front.engine.say(request, " bi", "length")
        last, done = await stream.rest()
    assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")


async def test_a_character_over_several_tokens_comes_whole(front: Front) -> None:
    async with front.stream(COMPLETIONS, {"prompt": "x"}) as stream:
        request = await front.engine.next()
        pieces = []
        for token_id in BUILTIN.encode("é猫"):
            front.engine.say(request, ids=[token_id])
            pieces.append(await stream.text())
        front.engine.say(request, ids=[0xE7], end="length")
        last, _ = await stream.rest()
    assert pieces == ["", "é", "", "", "猫"]
    assert last["choices"][0]["text"] == ""


async def test_a_stop_string_over_several_tokens_ends_the_engines_work(front: Front) -> None:
    async with front.stream(COMPLETIONS, {"prompt": "x", "stop": ["bo bu", "zzz"]}) as stream:
        request = await front.engine.next()
        front.engine.say(request, " babababa")
        assert await stream.text() == " baba"
        front.engine.say(request, " bo")
        assert await stream.text() == "bab"
        front.engine.say(request, " bu")
        front.engine.say(request, " be")
        last, done = await stream.rest()
    (choice,) = last["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a ", "stop", "bo bu")
    assert done == "[DONE]"
    assert front.engine.aborted == [request.request_id]


async def test_choices_of_a_stream_come_as_they_are_made(front: Front) -> None:
    async with front.stream(COMPLETIONS, {"prompt": "x", "n": 2}) as stream:
        first, second = await front.engine.next(), await front.engine.next()
        front.engine.say(second, " ba")
        assert (await stream.next())["choices"][0]["index"] == 1
        front.engine.say(first, " be", "length")
        ended = (await stream.next())["choices"][0]
        assert (ended["index"], ended["text"], ended["finish_reason"]) == (0, " be", "length")
        front.engine.say(second, " bi")
        assert await stream.text() == " bi"
        front.engine.say(second, " bo", "length")
        last, done = await stream.rest()
    assert (last["choices"][0]["index"], done) == (1, "[DONE]")


async def test_echo_and_continuous_usage(front: Front) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": " ba", "echo": True, "logprobs": 1, "stream_options": options}
    async with front.stream(COMPLETIONS, body) as stream:
        request = await front.engine.next()
        front.engine.say(request, " be")
        event = await stream.next()
        assert event["choices"][0]["text"] == " ba be"
        assert event["choices"][0]["logprobs"]["token_logprobs"] == [None, 0.0]
        assert event["usage"] == {"prompt_tokens": 1, "total_tokens": 2, "completion_tokens": 1}
        front.engine.say(request, " bi")
        event = await stream.next()
        assert event["choices"][0]["logprobs"]["text_offset"] == [len(" ba be")]
        assert event["usage"]["completion_tokens"] == 2
        front.engine.say(request, " bo", "length")
        await stream.rest()


async def test_tokens_in_larger_events(front: Front) -> None:
    async with front.stream(COMPLETIONS, {"prompt": "x", "stream_interval": 3}) as stream:
        request = await front.engine.next()
        front.engine.say(request, " ba")
        assert await stream.text() == " ba"
        for text in (" be", " bi", " bo", " bu"):
            front.engine.say(request, text)
        assert await stream.text() == " be bi bo"
        front.engine.say(request, " da", "length")
        last, _ = await stream.rest()
    assert last["choices"][0]["text"] == " bu da"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_an_error_before_the_first_token_is_no_stream(front: Front, path: str) -> None:
    async with front.stream(path, {"prompt": "x", "messages": USER}) as stream:
        front.engine.say(await front.engine.next(), end="error", error="no KV")
        response = await stream.response()
        facts = await response.json()
    assert error((response.status, facts)) == (500, "InternalServerError", None)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_an_error_in_a_stream_is_its_last_event(front: Front, path: str) -> None:
    async with front.stream(path, {"prompt": "x", "messages": USER}) as stream:
        request = await front.engine.next()
        front.engine.say(request, " ba")
        while await stream.text() != " ba":
            pass
        front.engine.say(request, end="error", error="no KV")
        event, done = await stream.rest()
    assert event == {"error": {"message": "no KV", "type": "InternalServerError", "param": None, "code": 500}}
    assert done == "[DONE]"


async def test_an_abort_by_the_engine_is_an_end(front: Front) -> None:
    async with front.stream(COMPLETIONS, {"prompt": "x"}) as stream:
        request = await front.engine.next()
        front.engine.say(request, " ba")
        assert await stream.text() == " ba"
        front.engine.say(request, end="abort")
        last, _ = await stream.rest()
    assert last["choices"][0]["finish_reason"] == "abort"


async def test_a_connection_serves_one_stream_after_the_other(front: Front) -> None:
    connector = aiohttp.TCPConnector(limit=1)
    async with aiohttp.ClientSession(connector=connector) as http:
        ports = set()
        for text in (" ba", " be"):
            call = asyncio.create_task(http.post(front.url + COMPLETIONS, json={"prompt": "x", "stream": True}))
            request = await front.engine.next()
            front.engine.say(request, text)
            response = await call
            assert response.connection is not None and response.connection.transport is not None
            ports.add(response.connection.transport.get_extra_info("sockname"))
            await response.content.readuntil(b"\n\n")
            front.engine.say(request, text)
            await response.content.readuntil(b"\n\n")
            front.engine.say(request, text, "length")
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
    assert len(ports) == 1


# -- clients that leave, or do not read


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token(front: Front, stream: bool) -> None:
    reply = front.post(COMPLETIONS, {"prompt": "x", "n": 2, "stream": stream})
    ids = [(await front.engine.next()).request_id for _ in range(2)]
    reply.cancel()
    assert await front.engine.until_aborted(2) == ids


async def test_a_client_that_leaves_a_stream(front: Front) -> None:
    async with front.stream(COMPLETIONS, {"prompt": "x"}) as stream:
        request = await front.engine.next()
        front.engine.say(request, " ba")
        assert await stream.text() == " ba"
    assert await front.engine.until_aborted() == [request.request_id]
    front.engine.say(request, " be")


async def raw_stream(
    front: Front, version: str, receive_buffer: int = 0
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that reads only when it is told to."""
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", front.port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
    body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 60}).encode()
    head = f"POST {COMPLETIONS} HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return reader, writer


async def test_a_client_that_does_not_read_costs_no_more_than_its_answer(front: Front) -> None:
    reader, writer = await raw_stream(front, "1.1")
    request = await front.engine.next()
    long = " " + "ba" * 30_000
    front.engine.say(request, long)
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"Transfer-Encoding: chunked" in head
    (generation,) = front.server.busy
    assert await eventually(lambda: generation.transport is not None)
    transport = generation.transport
    assert transport is not None
    pieces = 1
    while not generation.congested:
        front.engine.say(request, long)
        pieces += 1
        assert pieces < 1000
        await asyncio.sleep(0)
    buffered = transport.get_write_buffer_size()
    for _ in range(20):
        front.engine.say(request, " bo")
        await asyncio.sleep(0)
    assert transport.get_write_buffer_size() == buffered
    raw = b""
    while generation.congested:
        raw += await asyncio.wait_for(reader.read(1 << 20), SOON)
    front.engine.say(request, " da")
    while not raw.endswith(b"}]}\n\n\r\n") or b" da" not in raw:
        raw += await asyncio.wait_for(reader.read(1 << 20), SOON)
    front.engine.say(request, " bu", "length")
    while not raw.endswith(b"0\r\n\r\n"):
        raw += await asyncio.wait_for(reader.read(1 << 20), SOON)
    writer.close()
    events = [json.loads(line[6:])["choices"][0] for line in unchunked(raw).split(b"\n\n") if line[6:7] == b"{"]
    assert [event["text"] for event in events[-2:]] == [" bo" * 20 + " da", " bu"]
    assert "".join(event["text"] for event in events[:-2]) == long * pieces
    assert events[-1]["finish_reason"] == "length"


async def test_what_came_while_the_first_event_was_taken_follows_at_once(front: Front) -> None:
    reader, writer = await raw_stream(front, "1.1", receive_buffer=4096)
    request = await front.engine.next()
    front.engine.say(request, " zazu" * 1_000_000)
    (generation,) = front.server.busy
    assert await eventually(generation.first.done)
    for _ in range(100):
        await asyncio.sleep(0)
    assert generation.transport is None
    front.engine.say(request, " da")
    raw = b""
    while b'"text":" da"' not in raw[-1000:]:
        raw += await asyncio.wait_for(reader.read(1 << 20), SOON)
    writer.close()
    assert await front.engine.until_aborted() == [request.request_id]


def unchunked(raw: bytes) -> bytes:
    whole = b""
    while raw:
        size, raw = raw.split(b"\r\n", 1)
        whole += raw[: int(size, 16)]
        raw = raw[int(size, 16) + 2 :]
    return whole


async def eventually(what: Any) -> bool:
    """The server's callbacks run in this very loop: give them turns."""
    for _ in range(10_000):
        if what():
            return True
        await asyncio.sleep(0)
    return False


async def test_an_old_client_gets_its_stream_unframed(front: Front) -> None:
    reader, writer = await raw_stream(front, "1.0")
    request = await front.engine.next()
    front.engine.say(request, " ba")
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"chunked" not in head
    first = await reader.readuntil(b"\n\n")
    front.engine.say(request, " be")
    second = await reader.readuntil(b"\n\n")
    front.engine.say(request, " bi", "length")
    rest = await asyncio.wait_for(reader.read(), SOON)
    writer.close()
    events = [json.loads(line[6:]) for line in (first, second, *rest.split(b"\n\n")) if line.startswith(b"data: {")]
    assert [event["choices"][0]["text"] for event in events] == [" ba", " be", " bi"]


# -- refusals


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (COMPLETIONS, {"model": "none", "prompt": "x"}, (404, "NotFoundError", "model")),
        (CHAT, {"model": "none", "messages": USER}, (404, "NotFoundError", "model")),
        (COMPLETIONS, {"prompt": "x", "max_tokens": "many"}, (400, "Bad Request", "body.max_tokens")),
        (COMPLETIONS, {"prompt": ""}, (400, "BadRequestError", "prompt")),
        (COMPLETIONS, {"prompt": []}, (400, "BadRequestError", "prompt")),
        (COMPLETIONS, {"prompt": "x" * (MAX_LEN + 1)}, (400, "BadRequestError", "input_tokens")),
        (COMPLETIONS, {"prompt": [300] * MAX_LEN}, (400, "BadRequestError", "input_tokens")),
        (COMPLETIONS, {"prompt": [VOCAB]}, (400, "BadRequestError", "prompt")),
        (COMPLETIONS, {"prompt": "x", "max_tokens": MAX_LEN + 1}, (400, "BadRequestError", "max_tokens")),
        (CHAT, {"messages": []}, (400, "BadRequestError", "messages")),
        (
            COMPLETIONS,
            {"prompt": "x", "kv_transfer_params": PUSH | {"remote_port": "x"}},
            (400, "BadRequestError", "kv_transfer_params"),
        ),
        ("/tokenize", {}, (400, "BadRequestError", "body.prompt")),
        ("/tokenize", {"prompt": "x", "model": "none"}, (404, "NotFoundError", "model")),
        ("/detokenize", {"tokens": [VOCAB]}, (400, "BadRequestError", "tokens")),
        ("/inference/v1/abort_requests", {}, (400, "Bad Request", "request_ids")),
        ("/fault", {"kind": "freeze"}, (404, "Not Found", None)),
        ("/v1/embeddings", {}, (404, "Not Found", None)),
        ("/v1/models", {}, (405, "Method Not Allowed", None)),
    ],
)
async def test_refusals(front: Front, path: str, body: Any, expected: tuple[int, str, str | None]) -> None:
    assert error(await front.post(path, body)) == expected


async def test_the_known_model_is_named(front: Front) -> None:
    _, facts = await front.post(COMPLETIONS, {"model": "none", "prompt": "x"})
    assert facts["error"]["message"] == "The model `none` does not exist. Valid aliases: toy, other."


async def test_only_json_is_read(front: Front) -> None:
    for data, content_type in ((b"{}", "text/plain"), (b"{", "application/json")):
        headers = {"Content-Type": content_type}
        async with front.http.post(front.url + COMPLETIONS, data=data, headers=headers) as response:
            assert error((response.status, await response.json()))[0] == 400


async def test_an_api_key() -> None:
    async with serving(api_keys=("one", "two"), faults=True) as front:
        for path in (COMPLETIONS, "/fault"):
            assert await front.post(path, {}) == (401, {"error": "Unauthorized"})
            assert (await front.post(path, {}, Authorization="Bearer three"))[0] == 401
        assert (await front.get("/v1/models"))[0] == 401
        assert (await front.post(COMPLETIONS, {}, Authorization="bearer two"))[0] == 400
        assert (await front.get("/health"))[0] == 200
        assert (await front.post("/tokenize", {"prompt": "x"}))[0] == 200


# -- the other routes


async def test_the_settings_are_open_to_a_render_tier() -> None:
    async with serving(api_keys=("sesame",)) as front:
        assert (await front.get("/v1/models"))[0] == 401
        status, text = await front.get("/v1/sessions/settings")
    told = json.loads(text)
    assert (status, told["served_model_names"], told["max_model_len"]) == (200, ["toy", "other"], MAX_LEN)
    assert len(told["tokenizer"]) == 16 and told["tool_call_parser"] is None


async def test_models_and_version(front: Front) -> None:
    facts = json.loads((await front.get("/v1/models"))[1])
    assert [card["id"] for card in facts["data"]] == ["toy", "other"]
    assert {card["max_model_len"] for card in facts["data"]} == {MAX_LEN}
    assert json.loads((await front.get("/version"))[1])["version"]


async def test_tokens_and_back(front: Front) -> None:
    _, facts = await front.post("/tokenize", {"prompt": " ba é", "return_token_strs": True})
    ids = BUILTIN.encode(" ba é")
    assert facts["tokens"] == ids
    assert (facts["count"], facts["max_model_len"], facts["token_strs"][0]) == (len(ids), MAX_LEN, " ba")
    assert await front.post("/detokenize", {"tokens": ids}) == (200, {"prompt": " ba é"})
    _, facts = await front.post("/tokenize", {"messages": USER})
    assert BUILTIN.decode(facts["tokens"]) == "<|user|>\nhi\n<|assistant|>\n"


@pytest.mark.parametrize(
    ("path", "wanted", "expected"),
    [
        ("/abort_requests", ["cmpl-abc"], {0, 1}),
        ("/abort_requests", ["cmpl-abc-1"], {1}),
        ("/inference/v1/abort_requests", ["chatcmpl-abc"], {2}),
        ("/abort_requests", ["cmpl-ab", "abc", "cmpl"], set()),
        ("/abort_requests", None, {0, 1, 2}),
    ],
)
async def test_aborts_from_outside(front: Front, path: str, wanted: list[str] | None, expected: set[int]) -> None:
    replies = [
        front.post(COMPLETIONS, {"prompt": ["x", "y"]}, **{"X-Request-Id": "abc"}),
        front.post(CHAT, {"messages": USER}, **{"X-Request-Id": "abc"}),
    ]
    requests = [await front.engine.next() for _ in range(3)]
    by_name = {re.sub(r"-[0-9a-f]{8}$", "", request.request_id): request for request in requests}
    order = [by_name["cmpl-abc-0"], by_name["cmpl-abc-1"], by_name["chatcmpl-abc"]]
    status, facts = await front.post(path, {} if wanted is None else {"request_ids": wanted})
    assert status == 200
    assert facts in (None, {"status": "aborted", "aborted": len(expected)})
    assert set(front.engine.aborted) == {order[at].request_id for at in expected}
    for request in order:
        front.engine.say(request, end="abort")
    for reply in replies:
        assert (await reply)[1]["choices"][0]["finish_reason"] == "abort"


async def test_faults() -> None:
    async with serving(faults=True) as front:
        assert await front.post("/fault", {"kind": "freeze", "seconds": 1}) == (200, {"status": "ok"})
        assert front.engine.faults == [{"kind": "freeze", "seconds": 1}]
        status, facts = await front.post("/fault", {"kind": "freze"})
        assert (status, facts["error"]["message"]) == (400, "fault: unknown kind 'freze'")
        assert (await front.post("/fault", []))[0] == 400


async def test_a_dead_engine(front: Front) -> None:
    watch = asyncio.create_task(front.server.watch())
    waiting = front.post(COMPLETIONS, {"prompt": "x"})
    await front.engine.next()
    async with front.stream(COMPLETIONS, {"prompt": "x"}) as stream:
        front.engine.say(await front.engine.next(), " ba")
        assert await stream.text() == " ba"
        assert (await front.get("/health"))[0] == 200
        front.engine.death = RuntimeError("boom")
        assert (await front.get("/health"))[0] == 503
        status, facts = await asyncio.wait_for(waiting, SOON)
        event, done = await stream.rest()
    assert (status, facts["error"]["message"]) == (500, "the engine died: boom")
    assert (event["error"]["code"], done) == (500, "[DONE]")
    await asyncio.wait_for(watch, SOON)


async def test_metrics(front: Front) -> None:
    counts = Counts(2, 30, 20, 10, 7, prefix_queries=50, prefix_hits=20)
    front.engine.numbers = Stats(running=3, waiting=4, kv_usage=0.5, steps=9, late_s=1.5, counts=counts)
    reply = front.post(COMPLETIONS, {"prompt": "x"})
    request = await front.engine.next()
    for end in (None, None, "length"):
        front.engine.say(request, " ba", end)
    await reply
    status, text = await front.get("/metrics")
    assert status == 200
    seen = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    labels = 'engine="0",model_name="toy"'
    expected = {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 4,
        "vllm:kv_cache_usage_perc": 0.5,
        "vllm:prompt_tokens_total": 60,
        "vllm:generation_tokens_total": 7,
        "vllm:prefix_cache_queries_total": 50,
        "vllm:prefix_cache_hits_total": 20,
        "vllm:num_preemptions_total": 2,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:inter_token_latency_seconds_count": 2,
        "vllm:e2e_request_latency_seconds_count": 1,
        "kvferry_engine_late_seconds_total": 1.5,
    }
    assert {name: float(seen[f"{name}{{{labels}}}"]) for name in expected} == expected
    assert seen['vllm:cache_config_info{block_size="16",engine="0",model_name="toy",num_gpu_blocks="7"}'] == "1.0"
    by_source = {"local_compute": 30, "local_cache_hit": 20, "external_kv_transfer": 10}
    for source, tokens in by_source.items():
        assert float(seen[f'vllm:prompt_tokens_by_source_total{{{labels},source="{source}"}}']) == tokens
    for reason, number in {"length": 1, "stop": 0, "abort": 0, "error": 0}.items():
        name = f'vllm:request_success_total{{engine="0",finished_reason="{reason}",model_name="toy"}}'
        assert float(seen[name]) == number
    assert float(seen[f'vllm:time_to_first_token_seconds_bucket{{{labels[:11]}le="+Inf",model_name="toy"}}']) == 1
