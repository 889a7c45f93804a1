"""Harmony, whose answers are parsed from tokens and not from text: an engine directly, and through router and tier."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from contract_case import CHAT, FLAT_TOOL, RESPONSES, TOOL, USAGE, Case
from contract_check import check, send
from vllm_tier import asking, deployed

missing = [name for name in ("vllm", "torch", "openai_harmony") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing), reason=f"{' and '.join(missing)} not installed: run `make setup`"),
]
ARGS = (
    "--load-format=dummy",
    "--max-model-len=2048",
    "--logits-processors=harmony_model:Scripted",
    "--enable-auto-tool-choice",
    "--tool-call-parser=openai",
    "--reasoning-parser=openai_gptoss",
)
SUPPORT = str(Path(__file__).parent.parent / "support")
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": SUPPORT}

THOUGHT = "<|channel|>analysis<|message|>Na\u00efve \U0001f6a2?<|end|><|start|>assistant"
ANSWER = "<|channel|>final<|message|>It leaves at n\u00f6\u00f6n \U0001f6a2.<|return|>"
CALL = '<|channel|>commentary to=functions.depart <|constrain|>json<|message|>{"bank": "east"}<|call|>'
PREAMBLE = "<|channel|>commentary<|message|>I shall look.<|end|><|start|>assistant"


@dataclass(frozen=True)
class Sides:
    one: str
    tier: str
    model: str


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    import harmony_model

    folder = tmp_path_factory.mktemp("harmony")
    spec: dict[str, Any] = {"model": str(harmony_model.make(folder / "model")), "dtype": "float32", "env": ENV}
    with deployed(folder / "state", mode="colocated", vllm_args=ARGS, router=True, render=1, **spec) as deployment:
        yield Sides(deployment.engines[0].url, deployment.router_url, deployment.model_name())


STREAM = {"stream": True, "stream_options": USAGE}
TOOLS = {"tools": [TOOL]}
REASONED, CALLED, SAID = "Na\u00efve \U0001f6a2", r'"name":\s*"depart"', " leaves"
CASES: list[tuple[str, str, dict[str, Any], tuple[str, ...]]] = [
    ("an answer", THOUGHT + ANSWER, {}, (REASONED, SAID)),
    ("an answer, streamed", THOUGHT + ANSWER, STREAM, (SAID,)),
    ("no reasoning", ANSWER, STREAM, (SAID,)),
    ("reasoning unasked for", THOUGHT + ANSWER, {"include_reasoning": False}, (SAID,)),
    ("a call", THOUGHT + CALL, TOOLS, (REASONED, CALLED)),
    ("a call, streamed", THOUGHT + CALL, TOOLS | STREAM, (CALLED,)),
    ("a call after a preamble, streamed", THOUGHT + PREAMBLE + CALL, TOOLS | STREAM, (CALLED,)),
    ("cut in its reasoning", THOUGHT + ANSWER, {"max_tokens": 6}, ('"length"',)),
    ("cut in a call, streamed", THOUGHT + CALL, TOOLS | STREAM | {"max_tokens": 24}, ('"length"',)),
    (
        "two choices, streamed",
        THOUGHT + CALL,
        TOOLS | STREAM | {"n": 2, "temperature": 1.0, "seed": 7},
        (CALLED, r'"index":\s*1'),
    ),
]


@pytest.mark.parametrize(("name", "said", "more", "shows"), CASES, ids=[one[0] for one in CASES])
async def test_engine_and_tier_part_it_alike(
    name: str, said: str, more: dict[str, Any], shows: tuple[str, ...], sides: Sides
) -> None:
    await alike(sides, CHAT, {"messages": [{"role": "user", "content": name}], "max_tokens": 100} | more, said, shows)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", [THOUGHT + ANSWER, THOUGHT + CALL], ids=["answer", "call"])
async def test_responses(said: str, stream: bool, sides: Sides) -> None:
    body = {"input": f"respond {stream}", "max_output_tokens": 100, "stream": stream, "tools": [FLAT_TOOL]}
    shows = (CALLED,) if said.endswith(CALL) else (SAID,)
    await alike(sides, RESPONSES, body, said, shows)


async def alike(sides: Sides, route: str, body: dict[str, Any], said: str, shows: tuple[str, ...]) -> None:
    """`shows`: patterns that the engine's answer must have, else the comparison would compare nothing."""
    import harmony_model

    asked = Case(name="harmony", route=route, body=body | {"vllm_xargs": {"script": harmony_model.script(said)}})
    async with asking() as session:
        one = await send(session, sides.one, asked, sides.model)
        for pattern in shows:
            assert re.search(pattern, one.raw.decode()), one.raw
        check(asked, one, await send(session, sides.tier, asked, sides.model))
