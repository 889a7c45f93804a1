"""Engines that have no tokenizer (`--tokens-only`): the tier makes text of theirs, and knows where an answer ends."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
from contract_case import CHAT
from vllm_tier import asking, deployed

from kvferry.launch.deployment import Deployment

missing = [name for name in ("vllm", "torch") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing), reason=f"{' and '.join(missing)} not installed: run `make setup`"),
]
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
END = "<|im_end|>"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder, env = tmp_path_factory.mktemp("tokens-only"), {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    arguments = ("--enable-scale-out", "--tokens-only")
    with deployed(folder, mode="push", router=True, render=1, dtype="float32", vllm_args=arguments, env=env) as pair:
        yield pair


async def test_an_answer_ends_where_its_tokenizer_says(pair: Deployment) -> None:
    async def answer(**more: Any) -> tuple[dict[str, Any], int]:
        asked = {"model": pair.model_name(), "messages": QUESTION, "max_tokens": 48, "temperature": 0}
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
