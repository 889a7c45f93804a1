"""Engines that have no tokenizer (`--tokens-only`): the tier makes text of theirs, and knows where an answer ends."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
from contract_case import CHAT, TOOL, USAGE, Case, completion, respond, talk
from contract_check import check, resolved, send
from vllm_tier import asking, deployed

from kvferry.launch.deployment import Deployment

missing = [name for name in ("vllm", "torch") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing), reason=f"{' and '.join(missing)} not installed: run `make setup`"),
]
QUESTION = "What is the capital of France? Answer in one sentence."
END = "<|im_end|>"


ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
ENGINE: dict[str, Any] = {"dtype": "float32", "env": ENV}
ARGS = ("--enable-auto-tool-choice", "--tool-call-parser=hermes", "--max-logprobs=5")
MORE = {"stream": True, "stream_options": USAGE}
CASES = [
    completion("a completion", logprobs=2),
    completion("a stop string", stop=["<text 4>"], include_stop_str_in_output=True, **MORE),
    completion("two choices of two prompts", prompt=["alpha", "beta"], n=2, temperature=0.8, seed=7, **MORE),
    completion("scored prompt", prompt_logprobs=1, echo=True),
    talk("a chat", content=QUESTION, max_tokens=48),
    talk("a chat, streamed", content=QUESTION, max_tokens=48, logprobs=True, top_logprobs=1, **MORE),
    talk("past its end", content=QUESTION, max_tokens=32, ignore_eos=True),
    talk("not before so many tokens", content=QUESTION, max_tokens=48, min_tokens=20, **MORE),
    talk("special tokens shown", content=QUESTION, max_tokens=48, skip_special_tokens=False),
    talk("a tool", tools=[TOOL], max_tokens=24, **MORE),
    respond("a response", stream=True),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder, args = tmp_path_factory.mktemp("tokens-only"), (*ARGS, "--enable-scale-out", "--tokens-only")
    with deployed(folder, mode="push", router=True, render=1, vllm_args=args, **ENGINE) as pair:
        yield pair


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An engine with its tokenizer."""
    folder = tmp_path_factory.mktemp("with-tokenizer")
    with deployed(folder, mode="colocated", vllm_args=ARGS, **ENGINE) as one:
        yield one.engines[0].url


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_they_answer_as_one_that_has_it(case: Case, one: str, pair: Deployment) -> None:
    model = pair.model_name()
    async with asking() as session:
        asked = await resolved(session, one, pair.router_url, case, model)
        alone = await send(session, one, asked, model)
        check(asked, alone, await send(session, pair.router_url, asked, model), 1e-3)


async def test_what_needs_the_engines_tokenizer_is_refused(pair: Deployment) -> None:
    """In vLLM's words: it makes the grammar of a required call where the model runs."""
    asked = talk("a required tool", tools=[TOOL], tool_choice="required")
    async with asking() as session:
        reply = await send(session, pair.router_url, asked, pair.model_name())
    assert reply.status == 400 and b"requires a tokenizer" in reply.raw


async def test_an_answer_ends_where_its_tokenizer_says(pair: Deployment) -> None:
    async def answer(**more: Any) -> tuple[dict[str, Any], int]:
        asked = {
            "model": pair.model_name(),
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": 48,
            "temperature": 0,
        }
        async with asking() as session, session.post(pair.router_url + CHAT, json=asked | more) as response:
            body = await response.json()
            assert response.status == 200, body
        [choice] = body["choices"]
        return choice, body["usage"]["completion_tokens"]

    choice, length = await answer()
    assert "Paris" in choice["message"]["content"] and END not in choice["message"]["content"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None) and 1 < length < 44
    on, count = await answer(ignore_eos=True)
    assert (on["finish_reason"], on["stop_reason"], count) == ("length", None, 48)
    late, count = await answer(min_tokens=length + 4)
    assert late["stop_reason"] is None and count >= length + 4
