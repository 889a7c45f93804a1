"""Reasoning and tool calls through a render tier: one vLLM engine, asked directly and through router and tier.

The model is forced to say a text that has reasoning and tool calls in it, so that both sides parse the same tokens:
the one with the engine's own parsers, the other with the tier's.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from contract_case import CHAT, RESPONSES, TOOL, USAGE, Case
from contract_check import check, send
from vllm_tier import asking, deployed

ARGS = (
    "--block-size=32",
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
    "--reasoning-parser=qwen3",
    "--max-logprobs=5",
    '--structured-outputs-config={"enable_in_reasoning": true}',
)
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
missing = [name for name in ("vllm", "torch") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing), reason=f"{' and '.join(missing)} not installed: run `make setup`"),
]

THOUGHT = "<think>\nNaïve \U0001f6a2?\n</think>\n\n"
ANSWER = "It leaves at noon."


def call(bank: str) -> str:
    return f'<tool_call>\n{{"name": "depart", "arguments": {{"bank": "{bank}"}}}}\n</tool_call>'


@dataclass(frozen=True)
class Sides:
    one: str
    tier: str
    model: str


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    spec = {"dtype": "float32", "vllm_args": ARGS, "env": ENV, "router": True, "render": 1}
    with deployed(tmp_path_factory.mktemp("parsers"), mode="colocated", **spec) as deployment:
        yield Sides(deployment.engines[0].url, deployment.router_url, deployment.model_name())


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with asking() as session:
        yield session


@dataclass(frozen=True)
class Forced:
    """`shows`: patterns that the engine's answer must have, else the comparison would compare nothing."""

    case: Case
    shows: tuple[str, ...]


def forced(name: str, said: str, *, greedy: bool = True, **more: Any) -> Case:
    body = {
        "messages": [{"role": "user", "content": name}],
        "structured_outputs": {"choice": [said]},
        "max_tokens": 200,
        **more,
    }
    return Case(name=name, route=CHAT, greedy=greedy, body=body)


STREAM = {"stream": True, "stream_options": USAGE}
TOOLS = {"tools": [TOOL], "tool_choice": "auto"}
CALLS = f"{THOUGHT}Both.\n{call('west')}\n{call('east')}"
REASONED, CALLED, CONTENT = r'"reasoning":\s*"\\n', r'"tool_calls":\s*\[\{', r'"content":\s*"."'
CASES = [
    Forced(forced("an answer", THOUGHT + ANSWER, logprobs=True), (REASONED, '"bytes"')),
    Forced(forced("an answer, streamed", THOUGHT + ANSWER, logprobs=True, **STREAM), (REASONED, '"bytes"')),
    Forced(forced("two calls", CALLS, **TOOLS), (REASONED, CALLED, "Both.", "east")),
    Forced(forced("two calls, streamed", CALLS, **TOOLS, **STREAM), (REASONED, CALLED)),
    Forced(
        forced("a call without reasoning", call("east"), **TOOLS, chat_template_kwargs={"enable_thinking": False}),
        (CALLED,),
    ),
    Forced(forced("a call cut short", THOUGHT + call("west"), **TOOLS, **STREAM, max_tokens=40), (REASONED,)),
    Forced(
        forced("two choices", THOUGHT + call("west"), n=2, greedy=False, temperature=1.0, seed=7, **TOOLS, **STREAM),
        (REASONED, CALLED, r'"index":\s*1'),
    ),
    Forced(forced("reasoning unasked for", THOUGHT + ANSWER, include_reasoning=False, **STREAM), (CONTENT,)),
    Forced(forced("a stop string", THOUGHT + ANSWER, stop=["s at no"], **STREAM), (REASONED, "s at no")),
    Forced(
        forced("a stop string that is kept", THOUGHT + ANSWER, stop=["s at no"], include_stop_str_in_output=True),
        (REASONED, "leaves at no"),
    ),
]


@pytest.mark.parametrize("said", CASES, ids=lambda said: said.case.name)
async def test_engine_and_tier_part_it_alike(said: Forced, sides: Sides, session: aiohttp.ClientSession) -> None:
    one = await send(session, sides.one, said.case, sides.model)
    for pattern in said.shows:
        assert re.search(pattern, one.raw.decode()), one.raw
    tier = await send(session, sides.tier, said.case, sides.model)
    check(said.case, one, tier, 1e-3)
    if tier.streamed and CALLED in said.shows:
        assert all(len(ids) == 1 for ids in ids_of_calls(tier.raw).values())


def ids_of_calls(raw: bytes) -> dict[tuple[int, int], set[str]]:
    """By choice and number of the call: the ids that its events bear."""
    found: dict[tuple[int, int], set[str]] = {}
    for line in raw.decode().split("\n"):
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else []:
            for made in choice["delta"].get("tool_calls") or []:
                ids = found.setdefault((choice["index"], made["index"]), set())
                ids |= {made["id"]} if made.get("id") else set()
    return found


async def test_a_response_with_reasoning(sides: Sides, session: aiohttp.ClientSession) -> None:
    body = {
        "input": "respond",
        "structured_outputs": {"choice": [THOUGHT + ANSWER]},
        "max_output_tokens": 160,
        "stream": True,
    }
    case = Case(name="respond", route=RESPONSES, body=body)
    one = await send(session, sides.one, case, sides.model)
    assert b"response.reasoning_text.delta" in one.raw
    check(case, one, await send(session, sides.tier, case, sides.model))
