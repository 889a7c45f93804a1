"""Prefill's token as the answer's first: when it may be, what both legs are asked, what the client sees."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry.errors import ConfigError
from kvferry.router.config import RouterConfig
from kvferry.router.requests import first_token, openai
from kvferry.router.spec import parse_spec

IDS = [5, 6, 7]
PARAMS = {"transfer_id": "t"}


def plan_of(sampling: Any = None, /, **body: Any) -> openai.Plan:
    asked = {"token_ids": IDS, "sampling_params": {"max_tokens": 8} if sampling is None else sampling} | body
    return first_token.planned(openai.read(openai.GENERATE, asked))


def sampled(**more: Any) -> openai.Plan:
    return plan_of({"max_tokens": 8} | more)


def reply(ids: Any = (9,), finish: Any = "length", prompt: int = 3, **choice: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt, "completion_tokens": 1, "total_tokens": prompt + 1}
    usage["prompt_tokens_details"] = {"cached_tokens": 2, "created_cache_tokens": None}
    one = {"index": 0, "token_ids": list(ids), "finish_reason": finish, "stop_reason": None, "logprobs": None}
    one |= {"routed_experts": None} | choice
    return {"request_id": "r", "choices": [one], "usage": usage, "kv_transfer_params": PARAMS}


def begun(plan: openai.Plan, *args: Any, **more: Any) -> first_token.Opening:
    found = first_token.opening(plan, plan.parts[0], reply(*args, **more))
    assert found is not None
    return found


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
        {"temperature": 0, "seed": 4},
        {"seed": None, "stop": [], "bad_words": [], "structured_outputs": None},
        {"presence_penalty": 0.0, "frequency_penalty": 0, "repetition_penalty": 1.0, "n": 1},
        {"min_tokens": 1, "stop_token_ids": [3], "ignore_eos": True},
        {"logprobs": 3, "logit_bias": {"3": 1}, "allowed_token_ids": [3, 4]},
        {"prompt_logprobs": 1},
    ],
    ids=str,
)
def test_it_may(more: dict[str, Any]) -> None:
    plan = sampled(**more)
    assert plan.begins and not plan.alone


@pytest.mark.parametrize(
    "more",
    [
        {"seed": 4},
        {"seed": 4, "temperature": 0.5},
        {"n": 2},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"stop": "x"},
        {"stop": ["x"]},
        {"bad_words": ["x"]},
        {"min_tokens": 2},
        {"structured_outputs": {"json": {}}},
        {"thinking_token_budget": 9},
        {"extra_args": {"x": 1}},
        {"something_new": 1},
        {"max_tokens": None},
        {"max_tokens": 0},
        {"max_tokens": True},
        {"max_tokens": "8"},
    ],
    ids=str,
)
def test_it_may_not(more: dict[str, Any]) -> None:
    plan = sampled(**more)
    assert not plan.begins and not plan.alone


@pytest.mark.parametrize(
    "body",
    [
        {"output_mode": "text"},
        {"features": {"mm_hashes": {}}},
        {"content_parts": [{}]},
        {"token_ids": "abc"},
        {"reasoning_ended": False},
        {"something_new": 1},
    ],
    ids=str,
)
def test_a_request_it_does_not_know(body: dict[str, Any]) -> None:
    assert not plan_of(**body).begins


def test_nor_without_a_limit_of_its_own_nor_with_scores_that_a_stream_has_no_place_for() -> None:
    assert not plan_of({"temperature": 0}).begins
    assert plan_of({"max_tokens": 3, "prompt_logprobs": 1}).begins
    assert not plan_of({"max_tokens": 3, "prompt_logprobs": 1}, stream=True).begins


def test_of_text_it_never_is() -> None:
    for route, body in (
        (openai.COMPLETIONS, {"prompt": IDS, "max_tokens": 8}),
        (openai.CHAT, {"messages": [], "max_tokens": 1}),
        (openai.RESPONSES, {"input": "x", "max_output_tokens": 1}),
    ):
        plan = openai.read(route, body)
        assert first_token.planned(plan) is plan and not plan.begins


def test_one_token_is_all_of_prefill() -> None:
    for more in ({}, {"n": 2, "seed": 3}, {"stop": ["x"], "logprobs": 1}):
        plan = sampled(max_tokens=1, **more)
        assert plan.alone and plan.begins


def test_prefill_samples_as_decode_would_have() -> None:
    sampling = {"temperature": 0, "seed": 4, "stop_token_ids": [3], "min_tokens": 1, "logprobs": 1, "max_tokens": 8}
    plan = plan_of(
        sampling | {"prompt_logprobs": 2}, stream=True, stream_options={"include_usage": True}, return_token_ids=True
    )
    assert not plan.begins, "a stream has no place for them"
    plan = plan_of(sampling | {"prompt_logprobs": 2}, stream_options=None, return_token_ids=True, cache_salt="s")
    body = first_token.prefill_body(plan, plan.parts[0], PARAMS)
    kept = {key: value for key, value in sampling.items() if key != "seed"}
    assert body == {
        "token_ids": IDS,
        "sampling_params": kept | {"max_tokens": 1, "prompt_logprobs": 2},
        "return_token_ids": True,
        "cache_salt": "s",
        "stream": False,
        "kv_transfer_params": PARAMS,
    }


def test_decode_is_asked_for_the_rest() -> None:
    plan = plan_of({"max_tokens": 8, "min_tokens": 1, "logprobs": 1}, stream=True, return_token_ids=True)
    assert first_token.decode_part(plan.parts[0], 9) == {
        "token_ids": [5, 6, 7, 9],
        "sampling_params": {"max_tokens": 7, "logprobs": 1},
        "stream": True,
    }
    assert plan.parts[0]["token_ids"] == IDS and plan.parts[0]["sampling_params"]["max_tokens"] == 8


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"choices": None},
        {"choices": []},
        {"choices": ["x"]},
        reply(ids=()),
        reply(ids=(1, 2)),
        reply(ids=("x",)),
        reply(finish="abort"),
        reply(finish=None),
        reply(prompt=4),
        reply(routed_experts="x"),
        reply(sampling_mask=[[1]]),
        reply(weight_versions=[1]),
        reply() | {"usage": None},
    ],
    ids=str,
)
def test_a_reply_that_is_no_beginning(answer: dict[str, Any]) -> None:
    plan = sampled()
    assert first_token.opening(plan, plan.parts[0], answer) is None


def test_logprobs_that_are_wanted_must_be_there() -> None:
    plan = sampled(logprobs=1)
    assert first_token.opening(plan, plan.parts[0], reply()) is None
    assert begun(plan, logprobs={"content": [{"token_id": 9}]}).token == 9


def test_a_stop_ends_it_whatever_else_the_choice_says() -> None:
    found = begun(sampled(), finish="stop", weight_versions=[1], prompt=9)
    assert found.last


@pytest.mark.parametrize(("limit", "does"), [(None, False), (10, False), (11, True), (12, True)])
def test_the_rest_must_fit_the_models_length(limit: int | None, does: bool) -> None:
    assert first_token.fits(sampled().parts[0], limit) is does


def events(raw: bytes) -> list[Any]:
    pieces = raw.decode().split("\n\n")
    assert pieces.pop() == ""
    return [json.loads(piece[6:]) if piece != "data: [DONE]" else "end" for piece in pieces]


def test_the_first_event() -> None:
    plan = plan_of(stream=True)
    (event,) = events(first_token.events(plan.parts[0], begun(plan)))
    choice = reply()["choices"][0] | {"finish_reason": None}
    assert event == {"request_id": "r", "usage": None, "output_mode": "tokens", "choices": [choice]}


def test_the_first_event_with_counts_and_ids() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    plan = plan_of(stream=True, stream_options=options, return_token_ids=True)
    opening = first_token.opening(plan, plan.parts[0], reply() | {"prompt_token_ids": IDS, "mm_placeholders": None})
    assert opening is not None
    (event,) = events(first_token.events(plan.parts[0], opening))
    assert event["prompt_token_ids"] == IDS and "mm_placeholders" not in event
    counts = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    assert event["usage"] == counts | {"prompt_tokens_details": None, "completion_tokens_details": None}


@pytest.mark.parametrize("include", [False, True])
def test_a_stream_that_ends_with_it(include: bool) -> None:
    plan = plan_of(stream=True, stream_options={"include_usage": include})
    first, *rest = events(first_token.events(plan.parts[0], begun(plan, finish="stop", stop_reason=9)))
    assert (first["choices"][0]["finish_reason"], first["choices"][0]["stop_reason"]) == ("stop", 9)
    assert rest.pop() == "end"
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    usage["prompt_tokens_details"] = {"cached_tokens": 2}
    whole = {"request_id": "r", "usage": usage, "output_mode": "tokens", "choices": []}
    assert rest == ([whole] if include else [])


def test_counts_of_decode() -> None:
    usage = {"prompt_tokens": 4, "completion_tokens": 7, "total_tokens": 11}
    event: dict[str, Any] = {"choices": [], "usage": dict(usage)}
    assert first_token.recount(event)
    assert event["usage"] == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
    assert not first_token.recount({"usage": None}) and not first_token.recount({})
    assert first_token.recounted((4, 7)) == (3, 8) and first_token.recounted((None, None)) == (None, None)


SPAN = {"version": "a", "start": 0, "end": 1}


@pytest.mark.parametrize(
    ("theirs", "joined"),
    [
        ([{"version": "a", "start": 0, "end": 2}], [{"version": "a", "start": 0, "end": 3}]),
        ([{"version": "b", "start": 0, "end": 2}], [SPAN, {"version": "b", "start": 1, "end": 3}]),
    ],
)
def test_which_weights_made_which_token(theirs: list[Any], joined: list[Any]) -> None:
    plan = sampled()
    opening = begun(plan, weight_versions=[SPAN])
    (event,) = events(first_token.events(plan.parts[0], opening))
    assert event["choices"][0]["weight_versions"] is None, "told at the end, of all"
    last: dict[str, Any] = {"choices": [{"index": 0, "token_ids": [2], "weight_versions": theirs}]}
    assert first_token.respan(last, opening) and last["choices"][0]["weight_versions"] == joined
    whole = json.dumps(reply(ids=(1, 2), prompt=4, weight_versions=theirs)).encode()
    assert json.loads(first_token.joined(plan.parts[0], opening, whole))["choices"][0]["weight_versions"] == joined
    for untold in ({"choices": []}, {"choices": [{"weight_versions": None}]}, {"choices": ["x"]}, {"usage": {}}):
        assert not first_token.respan(untold, opening)


def test_a_whole_answer_of_both() -> None:
    plan = plan_of({"max_tokens": 3, "logprobs": 0}, return_token_ids=True)
    opening = first_token.opening(
        plan, plan.parts[0], reply(logprobs={"content": [{"token_id": 9}]}) | {"prompt_token_ids": IDS}
    )
    assert opening is not None
    rest = reply(ids=(1, 2), prompt=4, logprobs={"content": [{"token_id": 1}, {"token_id": 2}]})
    rest["usage"] |= {"completion_tokens": 2, "total_tokens": 6}
    body = json.loads(first_token.joined(plan.parts[0], opening, json.dumps(rest).encode()))
    (choice,) = body["choices"]
    assert choice["token_ids"] == [9, 1, 2] and body["prompt_token_ids"] == IDS
    assert [one["token_id"] for one in choice["logprobs"]["content"]] == [9, 1, 2]
    assert [body["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")] == [3, 3, 6]


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"choices": []}', b"not json", b'{"choices": [{}]}'])
def test_what_is_no_reply_stays_as_it_came(raw: bytes) -> None:
    plan = sampled()
    assert first_token.joined(plan.parts[0], begun(plan), raw) == raw


def config(**more: Any) -> RouterConfig:
    pair = {"prefill": (parse_spec("http://p:1"),), "decode": (parse_spec("http://d:1"),)}
    return RouterConfig(**pair, first_token="prefill", **more)


@pytest.mark.parametrize(
    "more", [{"mode": "pull"}, {"mode": "stream", "bind": "late"}, {"mode": "stream", "bind": "at=90"}]
)
def test_modes_that_can(more: dict[str, Any]) -> None:
    config(**more).check()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "mode push"),
        ({"mode": "stream"}, "mode stream and --bind early"),
        ({"connector": "upstream-pull"}, "connector upstream-pull"),
    ],
)
def test_modes_that_can_not(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"--first-token: 'prefill' with {said}") as raised:
        config(**more).check()
    assert "--mode pull" in raised.value.hint
