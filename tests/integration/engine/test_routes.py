"""Token-in-token-out and responses of the engine's server over a scripted loop, in vLLM's shapes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest
from scripted_loop import BUILTIN, MAX_LEN, Front, serving

GENERATE, RESPONSES = "/inference/v1/generate", "/v1/responses"
DETAILS = {"cached_tokens": 1}


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    async with serving() as running:
        yield running


async def test_generate(front: Front) -> None:
    body = {"token_ids": [300, 301], "sampling_params": {"logprobs": 1, "min_tokens": 1, "prompt_logprobs": 0}}
    reply = front.post(GENERATE, body | {"return_token_ids": True}, **{"X-Request-Id": "abc"})
    request = await front.engine.next()
    assert list(request.prompt) == [300, 301]
    assert request.sampling.max_tokens == MAX_LEN - 2  # without a limit of its own: the model's length
    front.engine.say(request, " ba", num_cached_tokens=1)
    front.engine.say(request, " bi", "length")
    status, facts = await reply
    assert (status, facts["request_id"], facts["output_mode"]) == (200, "generate-tokens-abc", "tokens")
    assert facts["prompt_token_ids"] == [300, 301] and len(facts["prompt_logprobs"]) == 2
    assert facts["usage"]["prompt_tokens_details"] == DETAILS
    (choice,) = facts["choices"]
    assert choice["token_ids"] == BUILTIN.encode(" ba bi") and "text" not in choice
    assert [score["token_id"] for score in choice["logprobs"]["content"]] == choice["token_ids"]


async def test_generate_streamed(front: Front) -> None:
    body = {"token_ids": [300], "sampling_params": {"max_tokens": 2}, "output_mode": "text"}
    async with front.stream(GENERATE, body | {"stream_options": {"include_usage": True}}) as stream:
        request = await front.engine.next()
        front.engine.say(request, " ba")
        front.engine.say(request, " bi", "length")
        events = await stream.rest()
    assert events.pop() == "[DONE]"
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    ids = [token for event in events for choice in event["choices"] for token in choice["token_ids"]]
    assert (text, ids) == (" ba bi", BUILTIN.encode(" ba bi"))
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 2
    assert {event["output_mode"] for event in events} == {"text"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"token_ids": [], "sampling_params": {}}, "body.token_ids"),
        ({"token_ids": [-1], "sampling_params": {}}, "body.token_ids"),
        ({"token_ids": [300], "sampling_params": {"max_tokens": "x"}}, "body.sampling_params"),
        ({"token_ids": [300]}, "body.sampling_params"),
        ({"token_ids": [300], "sampling_params": {"n": 0}}, "n"),
    ],
)
async def test_generate_refuses_by_name(front: Front, body: dict, param: str) -> None:
    status, facts = await front.post(GENERATE, body)
    assert (status, facts["error"]["param"]) == (400, param)


async def test_a_response(front: Front) -> None:
    parts = [{"type": "input_text", "text": "hi"}]
    body = {"input": [{"role": "user", "content": parts}], "instructions": "short", "max_output_tokens": 2}
    reply = front.post(RESPONSES, body | {"request_id": "resp_1"})
    request = await front.engine.next()
    assert BUILTIN.decode(request.prompt) == "<|system|>\nshort\n<|user|>\nhi\n<|assistant|>\n"
    front.engine.say(request, " ba", num_cached_tokens=1)
    front.engine.say(request, " bi", "length")
    status, facts = await reply
    assert (status, facts["id"], facts["object"], facts["status"]) == (200, "resp_1", "response", "incomplete")
    assert facts["output"][0]["content"][0]["text"] == " ba bi"
    assert facts["usage"]["input_tokens_details"]["cached_tokens"] == 1
    assert (facts["usage"]["output_tokens"], facts["max_output_tokens"]) == (2, 2)


async def test_a_response_is_opened_before_there_is_a_token(front: Front) -> None:
    body = {"input": "hi", "stream": True}
    async with aiohttp.ClientSession() as session, session.post(front.url + RESPONSES, json=body) as response:
        head = await response.content.readany()
        assert b"event: response.created\n" in head and b"response.output_text" not in head
        request = await front.engine.next()
        front.engine.say(request, " ba")
        front.engine.say(request, " bi", "length")
        raw = head + await response.read()
    kinds = [line.removeprefix("event: ") for line in raw.decode().splitlines() if line.startswith("event: ")]
    assert [kind.removeprefix("response.") for kind in kinds if kind != "response.output_text.delta"] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    events = [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == " ba bi"
    assert events[-1]["response"]["usage"]["output_tokens"] == 2 and b"[DONE]" not in raw


async def test_a_token_that_completes_no_character_does_not_end_a_response(front: Front) -> None:
    """It has no event of its own; an empty chunk would be the end of the body."""
    body = {"input": "hi", "stream": True}
    async with aiohttp.ClientSession() as session, session.post(front.url + RESPONSES, json=body) as response:
        request = await front.engine.next()
        raw = await response.content.readuntil(b"response.in_progress")
        front.engine.say(request, " ba")
        raw += await response.content.readuntil(b"output_text.delta")
        for byte in "é".encode():
            front.engine.say(request, ids=[byte])
            await asyncio.sleep(0)
        front.engine.say(request, " bi", "length")
        raw += await response.read()
    events = [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: ")]
    assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == " baé bi"
    assert events[-1]["type"] == "response.completed"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"input": "x", "previous_response_id": "resp_0"}, 404, "response_id"),
        ({"input": "x", "background": True}, 400, "background"),
        ({"input": "x", "background": True, "store": False}, 400, "background"),
        ({}, 400, "body.input"),
    ],
)
async def test_nothing_is_stored(front: Front, body: dict, status: int, param: str) -> None:
    got, facts = await front.post(RESPONSES, body)
    assert (got, facts["error"]["param"]) == (status, param)
