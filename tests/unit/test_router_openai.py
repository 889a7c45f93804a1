"""The legs' bodies and the merged reply, pure: C01, C02, C05 to C09, C62, C67."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry.router.replies import Refusal
from kvferry.router.requests import merge, openai
from kvferry.router.requests.openai import CHAT, COMPLETIONS, Plan

PARAMS = {"transfer_id": "T"}


def legs(route: openai.Route, body: dict[str, Any]) -> tuple[Plan, dict[str, Any], dict[str, Any]]:
    plan = openai.read(route, body)
    return plan, openai.prefill_body(plan, plan.parts[0], PARAMS), openai.decode_body(plan, plan.parts[0], PARAMS)


def test_c01_limits_per_route() -> None:
    _, p, d = legs(CHAT, {"messages": [], "max_completion_tokens": 64})
    assert (p["max_tokens"], p["max_completion_tokens"]) == (1, 1)
    assert d == {"messages": [], "max_completion_tokens": 64, "kv_transfer_params": PARAMS}
    _, p, d = legs(COMPLETIONS, {"prompt": "a"})
    assert p["max_tokens"] == 1 and "max_completion_tokens" not in p
    assert d == {"prompt": "a", "kv_transfer_params": PARAMS}


@pytest.mark.parametrize("field", openai.NOT_FOR_PREFILL)
def test_c02_what_prefill_is_not_asked(field: str) -> None:
    _, p, d = legs(COMPLETIONS, {"prompt": "a", field: 7})
    assert field not in p and d[field] == 7


def test_what_a_chat_template_may_see_stays() -> None:
    seen = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "documents": [{"title": "t"}],
        "reasoning_effort": "low",
        "chat_template": "{{ x }}",
        "chat_template_kwargs": {"enable_thinking": False},
        "add_generation_prompt": False,
        "continue_final_message": True,
        "add_special_tokens": True,
        "response_format": {"type": "json_object"},
        "truncate_prompt_tokens": 5,
        "truncation_side": "left",
        "cache_salt": "s",
        "mm_processor_kwargs": {"a": 1},
    }
    _, p, _ = legs(CHAT, dict(seen))
    assert seen.items() <= p.items()


@pytest.mark.parametrize(("sent", "expected"), [("required", None), ("auto", None), ("none", "none"), (..., None)])
def test_c09_tool_choice(sent: object, expected: object) -> None:
    body: dict[str, Any] = {"messages": [], "tools": [{"type": "function"}]}
    if sent is not ...:
        body["tool_choice"] = sent
    _, p, _ = legs(CHAT, body)
    assert p["tool_choice"] == expected


def test_no_tools_no_tool_choice() -> None:
    _, p, _ = legs(CHAT, {"messages": []})
    assert "tool_choice" not in p


@pytest.mark.parametrize(("n", "fan_out"), [(None, 1), (1, 1), (4, 4), (0, 1), (-3, 1), (True, 1), ("4", 1)])
def test_c05_fan_out(n: object, fan_out: int) -> None:
    plan, p, d = legs(CHAT, {"messages": [], "n": n})
    assert plan.n == fan_out and p["n"] == 1 and d["n"] == n


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ("a", ["a"]),
        (["a"], [["a"]]),
        (["a", "b"], [["a"], ["b"]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[[1, 2]], [[3]]]),
        ([[1, 2]], [[[1, 2]]]),
        ([], [[]]),
        (["a", 1], [["a", 1]]),
    ],
)
def test_c06_prompts(prompt: object, parts: list[Any]) -> None:
    assert [part["prompt"] for part in openai.read(COMPLETIONS, {"prompt": prompt}).parts] == parts


def test_c67_the_clients_body_is_not_changed() -> None:
    body = {"prompt": "a", "kv_transfer_params": {"remote_host": "h"}, "vllm_xargs": {"kv_transfer_params": 1, "k": 2}}
    before = json.dumps(body)
    plan, p, d = legs(COMPLETIONS, body)
    assert json.dumps(body) == before
    assert p["kv_transfer_params"] == d["kv_transfer_params"] == PARAMS
    assert p["vllm_xargs"] == d["vllm_xargs"] == {"k": 2}
    assert "kv_transfer_params" not in openai.untouched(COMPLETIONS, body).parts[0]
    assert plan.prompt_logprobs is None


def test_c67_nor_inside_of_sampling_params() -> None:
    """C67: vLLM reads them in `extra_args` too."""
    extra = {"kv_transfer_params": {"remote_host": "h"}, "ec_transfer_params": 1, "mine": 2}
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 3, "extra_args": extra}}
    before = json.dumps(body)
    _, p, d = legs(openai.GENERATE, body)
    assert p["sampling_params"]["extra_args"] == d["sampling_params"]["extra_args"] == {"mine": 2}
    assert openai.untouched(openai.GENERATE, body).parts[0]["sampling_params"]["extra_args"] == {"mine": 2}
    assert json.dumps(body) == before


def test_c07_prompt_logprobs_only_for_prefill() -> None:
    plan, p, d = legs(CHAT, {"messages": [], "prompt_logprobs": 0})
    assert plan.prompt_logprobs == 0 and p["prompt_logprobs"] == 0 and "prompt_logprobs" not in d
    plan, p, d = legs(CHAT, {"messages": [], "prompt_logprobs": 0, "stream": True})
    assert plan.prompt_logprobs is None and "prompt_logprobs" not in p and "prompt_logprobs" not in d


def test_a_decode_engine_that_is_alone_tells_all() -> None:
    """With local prefill nobody else could."""
    plan = openai.read(CHAT, {"messages": [], "prompt_logprobs": 2})
    assert openai.decode_body(plan, plan.parts[0], None) == {"messages": [], "prompt_logprobs": 2}
    sampling = {"max_tokens": 3, "prompt_logprobs": 1}
    plan = openai.read(openai.GENERATE, {"token_ids": [1], "sampling_params": sampling})
    assert openai.decode_body(plan, plan.parts[0], None) == {"token_ids": [1], "sampling_params": sampling}
    assert openai.decode_body(plan, plan.parts[0], PARAMS)["sampling_params"] == {"max_tokens": 3}
    assert openai.prefill_body(plan, plan.parts[0], PARAMS)["sampling_params"]["prompt_logprobs"] == 1
    body = {"prompt": "a", "echo": True, "logprobs": 1}
    plan = openai.read(COMPLETIONS, body)
    assert openai.decode_body(plan, plan.parts[0], None) == body


def test_echo_alone_is_decodes() -> None:
    _, p, d = legs(COMPLETIONS, {"prompt": "a", "echo": True})
    assert "echo" not in p and d["echo"] is True


@pytest.mark.parametrize("body", [None, [], "x", 3])
def test_no_object(body: object) -> None:
    with pytest.raises(Refusal) as caught:
        openai.read(CHAT, body)
    assert caught.value.http_status == 400


# -- merge


def reply(cached: int | None, **more: Any) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached}
    usage = {"prompt_tokens": 100, "completion_tokens": 4, "total_tokens": 104, "prompt_tokens_details": details}
    return {"choices": [{"index": 0, "text": "é"}], "usage": usage} | more


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        (96, 99, {"cached_tokens": 96}),
        (0, 99, {"cached_tokens": 0}),
        (None, 99, None),
        (96, None, {"cached_tokens": 96}),
    ],
)
def test_c62_cached_tokens_are_prefills(prefill: int | None, decode: int | None, expected: object) -> None:
    plan = openai.read(COMPLETIONS, {"prompt": "a"})
    raw = merge.finish(plan, [json.dumps(reply(decode)).encode()], [reply(prefill)])
    assert json.loads(raw)["usage"]["prompt_tokens_details"] == expected
    assert json.loads(raw)["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("raw", [b'{"a" : 1.0 , "usage": {}}', b"not json", b"[1]", b'{"kv_transfer_params": null}'])
def test_where_nothing_differs_the_bytes_stay(raw: bytes) -> None:
    plan = openai.read(COMPLETIONS, {"prompt": "a"})
    assert merge.finish(plan, [raw], [reply(None)]) is raw
    assert merge.finish(plan, [raw], [None]) is raw


def test_addresses_of_engines_do_not_reach_the_client() -> None:
    plan = openai.untouched(COMPLETIONS, {"prompt": "a"})
    raw = json.dumps(reply(None, kv_transfer_params={"remote_host": "10.0.0.9"})).encode()
    assert b"10.0.0.9" not in merge.finish(plan, [raw], [None])


def test_c06_join_sums_usage_of_all_parts() -> None:
    plan = openai.read(COMPLETIONS, {"prompt": ["a", "b"]})
    raw = json.dumps(reply(None)).encode()
    joined = json.loads(merge.finish(plan, [raw, raw], [reply(3), reply(4)]))
    assert joined["usage"] == {
        "prompt_tokens": 200,
        "completion_tokens": 8,
        "total_tokens": 208,
        "prompt_tokens_details": {"cached_tokens": 7},
    }
    assert [choice["index"] for choice in joined["choices"]] == [0, 1]
