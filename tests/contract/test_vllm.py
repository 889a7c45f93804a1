"""One vLLM engine and a pair of them answer alike: the core of the table, greedy, float32, on CPU.

The pair is asked twice: through a router whose engines render, and through one with a render tier in front of the same
engines, which makes the text from the tokens with the model's own tokenizer and template.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace

import adapter
import aiohttp
import pytest
from contract_case import ADAPTER, CHAT, GENERATE, LONG, TOOL, Case, chat, text
from contract_cases import CASES
from contract_check import check, resolved, send
from vllm_tier import asking, deployed, router_without_tier

from kvferry.launch.deployment import Deployment
from kvferry.launch.model import prepare

MINE = [case for case in CASES if "vllm" in case.tiers]
TOLERANCE = 1e-3
"""Of a logprob: the two sides may batch differently."""
ARGS = (
    "--block-size=32",
    "--enable-prefix-caching",
    "--enable-prompt-tokens-details",
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
    "--max-logprobs=5",
    "--enable-scale-out",
    "--enable-lora",
    "--max-lora-rank=8",
)
# uncompiled: the ranks of logprobs alone would cost a minute of compiling on each engine
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
ENGINE = {"dtype": "float32", "env": ENV}
missing = [name for name in ("vllm", "torch") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing), reason=f"{' and '.join(missing)} not installed: run `make setup`"),
]


@dataclass(frozen=True)
class Sides:
    one: str
    pair: str
    model: str
    rendering: str


@pytest.fixture(scope="module")
def deployments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, Deployment]]:
    folder = tmp_path_factory.mktemp("contract")
    args = (*ARGS, "--lora-modules", f"{ADAPTER}={adapter.make(folder / ADAPTER, prepare('smollm2', 'float32'))}")
    with (
        deployed(folder / "one", mode="colocated", vllm_args=args, **ENGINE) as one,
        deployed(folder / "pair", mode="push", router=True, render=1, vllm_args=args, **ENGINE) as pair,
    ):
        yield one, pair


@pytest.fixture(scope="module", params=["by engines", "by tier"])
def sides(request: pytest.FixtureRequest, deployments: tuple[Deployment, Deployment]) -> Iterator[Sides]:
    one, pair = deployments
    url, model = one.engines[0].url, pair.model_name()
    if request.param == "by tier":
        yield Sides(url, pair.router_url, model, request.param)
        return
    with router_without_tier(pair) as plain:
        yield Sides(url, plain, model, request.param)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with asking() as session:
        yield session


@pytest.mark.parametrize("case", MINE, ids=lambda case: case.name)
async def test_one_and_pair_answer_alike(case: Case, sides: Sides, session: aiohttp.ClientSession) -> None:
    """C02, C05 to C09, C12, C20, C44, C62: as the case says."""
    if "n and a cache" in (body := json.dumps(case.body)):  # the engines are the same: this prompt must be new to them
        case = replace(case, body=json.loads(body.replace("n and a cache", f"n and a cache, {sides.rendering}")))
    asked = await resolved(session, sides.one, sides.pair, case, sides.model)
    for _ in range(case.times):
        one = await send(session, sides.one, asked, sides.model)
        check(asked, one, await send(session, sides.pair, asked, sides.model), TOLERANCE)


async def test_an_adapter_says_something_else(sides: Sides, session: aiohttp.ClientSession) -> None:
    """Else the cases that name it would compare the model with itself."""
    said = set()
    for name in (sides.model, ADAPTER):
        reply = await send(session, sides.pair, Case(name=name, body=text("adapted", model=name)), sides.model)
        assert reply.status == 200, reply.raw
        said.add(json.loads(reply.raw)["choices"][0]["text"])
    assert len(said) == 2


async def test_c62_the_second_time_most_is_cached(sides: Sides, session: aiohttp.ClientSession) -> None:
    """C62: P's number, a multiple of the block, streamed and not; D would say all but one token."""
    body = chat(f"C62 on real engines, rendered {sides.rendering}")
    counts = []
    for more in ({}, {}, {"stream": True, "stream_options": {"include_usage": True}}):
        case = Case(name="C62", route=CHAT, body=body | more)
        raw = (await send(session, sides.pair, case, sides.model)).raw
        if more:
            raw = raw.decode().split("\n\n")[-3].removeprefix("data: ").encode()
        counts.append(json.loads(raw)["usage"])
    prompt = counts[0]["prompt_tokens"]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in counts]
    # the beginning of the chat may be that of an earlier case
    assert cached[0] < cached[1] == cached[2] == (prompt - 1) // 32 * 32
    assert [usage["completion_tokens"] for usage in counts] == [counts[0]["completion_tokens"]] * 3


async def test_cached_tokens_of_several_prompts_are_summed(sides: Sides, session: aiohttp.ClientSession) -> None:
    """A documented difference: one engine gives the number of its last prompt. So does a tier, being its frontend."""
    prompts = [f"sum {sides.rendering}, {name} " + LONG for name in ("first", "second")]
    case = Case(name="sum", body=text("", prompt=prompts, max_tokens=2))
    for url in (sides.one, sides.pair):
        await send(session, url, case, sides.model)
    one, pair = [json.loads((await send(session, url, case, sides.model)).raw) for url in (sides.one, sides.pair)]
    assert pair["choices"] == one["choices"]
    cached = [side["usage"].pop("prompt_tokens_details")["cached_tokens"] for side in (one, pair)]
    times = 1 if sides.rendering == "by tier" else 2
    assert pair["usage"] == one["usage"] and cached[1] == times * cached[0] > 0


async def test_c71_rendered_by_one_and_generated_by_the_pair(sides: Sides, session: aiohttp.ClientSession) -> None:
    """C71: a chat with a system message and tools, rendered to ids, generated from them, and made a chat again, gives
    what one engine makes of it; the ids are those that the engine makes itself."""
    body = chat("C71", tools=[TOOL], tool_choice="required", max_tokens=48, temperature=0)

    async def ask(url: str, route: str, asked: dict) -> dict:
        reply = await send(session, url, Case(name="C71", route=route, body=asked), sides.model)
        assert reply.status == 200, reply.raw
        facts: dict = json.loads(reply.raw)
        return facts

    whole = await ask(sides.one, CHAT, body | {"return_token_ids": True})
    rendered = await ask(sides.pair, CHAT + "/render", body)
    assert rendered["token_ids"] == whole["prompt_token_ids"]
    made = await ask(sides.pair, GENERATE, rendered)
    assert made["choices"][0]["token_ids"] == whole["choices"][0]["token_ids"]
    assert made["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    back = {"generate_response": made, "chat_request": {"model": sides.model} | body}
    message = (await ask(sides.pair, CHAT + "/derender", back))["choices"][0]["message"]
    assert [call["function"] for call in message["tool_calls"]] == [
        call["function"] for call in whole["choices"][0]["message"]["tool_calls"]
    ]
    assert message["tool_calls"] and message["content"] == whole["choices"][0]["message"]["content"]
