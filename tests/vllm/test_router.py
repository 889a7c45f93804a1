"""Router in front of two real engines: the answer is what one engine gives. P, asked directly, is that one engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
from vllm_tier import asking, deployed

from kvferry.launch.deployment import Deployment

PASSAGE = "The ferry left the east bank at dawn with bread, milk and letters. " * 12
SAME = ("choices", "usage", "model", "object")
OWN = ("prompt_tokens_details",)  # cached tokens: P's cache has seen the prompt before, in one of the two orders


@pytest.fixture(scope="module", params=["push", "pull"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    args = ("--block-size", "32", "--no-enable-prefix-caching")
    tmp = tmp_path_factory.mktemp(request.param)
    with deployed(tmp, mode=request.param, router=True, dtype="float32", vllm_args=args) as deployment:
        yield deployment


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with asking() as session:
        yield session


async def post(session: aiohttp.ClientSession, url: str, route: str, body: dict[str, Any]) -> tuple[int, Any, Any]:
    async with session.post(url + route, json=body) as response:
        return response.status, await response.json(), response.headers


async def both(
    session: aiohttp.ClientSession, pair: Deployment, route: str, body: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(through the pair, by one engine alone), both 200, without what must differ."""
    out = []
    for url in (pair.router_url, pair.engine("prefill-0").url):
        status, reply, _ = await post(session, url, route, {"model": pair.model_name(), "temperature": 0, **body})
        assert status == 200, reply
        kept = {key: reply[key] for key in SAME}
        kept["usage"] = {key: value for key, value in kept["usage"].items() if key not in OWN}
        out.append(kept)
    return out[0], out[1]


CHAT = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": f"{PASSAGE} What left at dawn?"}]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", {"prompt": PASSAGE, "max_tokens": 24}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 1}),
        ("/v1/completions", {"prompt": PASSAGE, "max_tokens": 12, "logprobs": 2}),
        ("/v1/completions", {"prompt": [PASSAGE, "Two towns lie on"], "max_tokens": 8}),
        ("/v1/completions", {"prompt": PASSAGE, "max_tokens": 16, "stop": ["."]}),
        ("/v1/completions", {"prompt": PASSAGE, "max_tokens": 8, "min_tokens": 8, "ignore_eos": True}),
        ("/v1/chat/completions", {"messages": CHAT, "max_completion_tokens": 20}),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 12, "n": 3, "seed": 7, "temperature": 0.8}),
    ],
    ids=["plain", "tiny", "logprobs", "two-prompts", "stop", "min-tokens", "chat", "n-3"],
)
async def test_same_answer(route: str, body: dict[str, Any], session: aiohttp.ClientSession, pair: Deployment) -> None:
    """C02, C05, C06: whole replies."""
    ours, solo = await both(session, pair, route, body)
    if "logprobs" in body:
        mine, theirs = (one["choices"][0].pop("logprobs") for one in (ours, solo))
        assert mine["tokens"] == theirs["tokens"]
        assert mine["token_logprobs"] == pytest.approx(theirs["token_logprobs"], abs=1e-3)
    assert ours == solo


async def test_streamed_chat_with_usage(session: aiohttp.ClientSession, pair: Deployment) -> None:
    """C02: deltas add up to the whole answer; the last event before [DONE] has usage and no choices."""
    body = {"model": pair.model_name(), "messages": CHAT, "max_tokens": 20, "temperature": 0}
    _, whole, _ = await post(session, pair.engine("prefill-0").url, "/v1/chat/completions", body)
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with session.post(f"{pair.router_url}/v1/chat/completions", json=streamed) as response:
        assert response.status == 200 and response.headers["x-kvferry-transfer-id"]
        lines = [line.strip()[6:] async for line in response.content if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 20


async def test_first_token_ends_it(session: aiohttp.ClientSession, pair: Deployment) -> None:
    """C44."""
    body = {"model": pair.model_name(), "prompt": PASSAGE, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    _, reply, _ = await post(session, pair.engine("prefill-0").url, "/v1/completions", body)
    first = reply["choices"][0]["token_ids"][0]
    ours, solo = await both(
        session, pair, "/v1/completions", {"prompt": PASSAGE, "max_tokens": 16, "stop_token_ids": [first]}
    )
    assert ours == solo and ours["choices"][0]["finish_reason"] == "stop"


async def test_errors_are_those_of_one_engine(session: aiohttp.ClientSession, pair: Deployment) -> None:
    """C20, and an unknown model, which the engine refuses itself."""
    long = {"model": pair.model_name(), "prompt": [9] * 5000, "max_tokens": 4}
    ours = await post(session, pair.router_url, "/v1/completions", long)
    solo = await post(session, pair.engine("prefill-0").url, "/v1/completions", long)
    assert ours[0] == solo[0] == 400 and ours[1] == solo[1]
    status, reply, _ = await post(session, pair.router_url, "/v1/completions", {"model": "nope", "prompt": "x"})
    assert status == 404 and pair.model_name() in reply["error"]["message"]


async def test_client_id_used_twice_at_once(session: aiohttp.ClientSession, pair: Deployment) -> None:
    """C34: the client's id pairs nothing."""

    async def one(prompt: str) -> tuple[str, str]:
        body = {"model": pair.model_name(), "prompt": prompt, "max_tokens": 10, "temperature": 0}
        headers = {"X-Request-Id": "dup"}
        async with session.post(f"{pair.router_url}/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200
            return (await response.json())["choices"][0]["text"], response.headers["x-kvferry-transfer-id"]

    prompts = ("The capital of France is", "Once upon a time there was a ferry")
    got = await asyncio.gather(*map(one, prompts))
    assert got[0][1] != got[1][1]
    for prompt, (text, _) in zip(prompts, got, strict=True):
        body = {"model": pair.model_name(), "prompt": prompt, "max_tokens": 10, "temperature": 0}
        _, solo, _ = await post(session, pair.engine("prefill-0").url, "/v1/completions", body)
        assert text == solo["choices"][0]["text"]


async def test_many_clients_leave_at_random_moments(session: aiohttp.ClientSession, pair: Deployment) -> None:
    """C30, C32: 30 requests, each closed after its own while; the 31st equals solo, nothing is held, no restart."""
    pids = [engine.pids() for engine in pair.engines]

    async def leave(after_s: float, prompt: list[int]) -> None:
        body = {"model": pair.model_name(), "prompt": prompt, "max_tokens": 50, "stream": True}
        try:
            async with (
                asyncio.timeout(after_s),
                session.post(f"{pair.router_url}/v1/completions", json=body) as response,
            ):
                await response.read()
        except TimeoutError:
            return

    await asyncio.gather(*(leave(0.03 + 0.05 * i, list(range(100 + i, 400 + i))) for i in range(30)))
    ours, solo = await both(session, pair, "/v1/completions", {"prompt": PASSAGE, "max_tokens": 16})
    assert ours == solo
    assert [engine.pids() for engine in pair.engines] == pids
    async with asyncio.timeout(5):
        for engine in pair.engines:
            while await kv_usage(session, engine.url) > 0:
                await asyncio.sleep(0.1)


async def kv_usage(session: aiohttp.ClientSession, url: str) -> float:
    async with session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:kv_cache_usage_perc"))
