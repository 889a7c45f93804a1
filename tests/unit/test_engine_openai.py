"""Request bodies into what the engine does, results into replies: vLLM's rules and shapes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry.engine import openai
from kvferry.engine.openai import BadRequest, ChatCompletion, Completion
from kvferry.engine.replies import Piece, Prompt, Replies, Result, Usage
from kvferry.engine.request import Sampling
from kvferry.engine.text import Builtin

BUILTIN = Builtin(1000)
USER = [{"role": "user", "content": "hi"}]
PUSH = {"do_remote_prefill": True, "transfer_id": "t" * 32, "remote_host": "h", "remote_port": 5600}


def completion(**fields: Any) -> Completion:
    return openai.read_completion(json.dumps({"prompt": "x"} | fields).encode())


def chat(**fields: Any) -> ChatCompletion:
    return openai.read_chat(json.dumps({"messages": USER} | fields).encode())


def refused(kind: Any, **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        kind(**fields)
    return caught.value


# -- reading


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"max_tokens": "many"}, "body.max_tokens", "max_tokens: Expected `int | null`, got `str`"),
        ({"n": 1.5}, "body.n", "n: Expected `int | null`, got `float`"),
        ({"n": 0}, "n", "n must be at least 1, got 0."),
        ({"n": 20000}, "n", "n must be at most 16384, got 20000."),
        ({"n": 2, "temperature": 0}, "n", "n must be 1 when using greedy sampling, got 2."),
        ({"stop": ["a", 3]}, "body.stop[1]", "stop[1]: Expected `str`, got `int`"),
        ({"stop": ""}, "stop", "stop cannot contain an empty string."),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only be defined when `stream=True`"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "not available when `stream=True`"),
        ({"prompt_logprobs": -2}, "prompt_logprobs", "must be a positive value or -1"),
        ({"temperature": 3}, "temperature", "temperature must be in [0, 2], got 3.0."),
        ({"top_p": 0}, "top_p", "top_p must be in (0, 1], got 0.0."),
        ({"top_k": -2}, "top_k", "got -2"),
        ({"min_tokens": -1}, "min_tokens", "got -1"),
        ({"stream_interval": 0}, "stream_interval", "at least 1, got 0"),
        ({"kv_transfer_params": []}, "body.kv_transfer_params", "Expected `object | null`, got `array`"),
        ({"kv_transfer_params": PUSH | {"transfer_id": ""}}, "kv_transfer_params", "transfer_id is missing"),
        ({"kv_transfer_params": PUSH | {"remote_port": 0}}, "kv_transfer_params", "remote_port"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params", "transfer_id is missing"),
    ],
)
@pytest.mark.parametrize("kind", [completion, chat])
def test_what_is_wrong_is_named(kind: Any, fields: dict[str, Any], param: str, said: str) -> None:
    error = refused(kind, **fields)
    assert (error.http_status, error.param) == (400, param)
    assert said in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (completion, {"suffix": "x"}, "suffix"),
        (completion, {"prompt_embeds": "x"}, "prompt_embeds"),
        (completion, {"logprobs": -2}, "logprobs"),
        (chat, {"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
        (chat, {"top_logprobs": 2}, "top_logprobs"),
        (chat, {"messages": "hi"}, "body.messages"),
        (chat, {"messages": None}, "body.messages"),
    ],
)
def test_what_one_route_refuses(kind: Any, fields: dict[str, Any], param: str) -> None:
    assert refused(kind, **fields).param == param


def test_a_missing_field_and_no_json() -> None:
    with pytest.raises(BadRequest) as caught:
        openai.read_chat(b"{}")
    assert caught.value.param == "body.messages"
    for raw in (b"", b"{", b"[]", b"\xff", b'"x"'):
        with pytest.raises(BadRequest) as caught:
            openai.read_completion(raw)
        assert caught.value.param == "body"


def test_beam_search_is_not_there() -> None:
    assert refused(completion, use_beam_search=True).http_status == 501


def test_unknown_fields_nulls_and_numbers_as_text_pass() -> None:
    body = completion(best_of=3, logit_bias={"1": 2}, n=None, stop=None, max_tokens="7", stream_options=None, seed=-1)
    assert body.max_tokens == 7
    assert openai.ask_of(body).n == 1


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a b", ["a b"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([], []),
    ],
)
def test_prompts(prompt: Any, prompts: list[Any]) -> None:
    assert openai.prompts_of(completion(prompt=prompt)) == prompts


@pytest.mark.parametrize("prompt", ["", None, ["a", 1], ["a", [1]], ["x"] * 2000])
def test_prompts_that_are_none(prompt: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        openai.prompts_of(completion(prompt=prompt))
    assert "prompt" in (caught.value.param or "")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": {"text": "x"}}]}, "messages[0].content"),
        ({"chat_template": "x"}, "chat_template"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
def test_chats_that_are_none(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        openai.chat_of(chat(**fields))
    assert caught.value.param == param


def test_what_a_template_gets() -> None:
    made = openai.chat_of(chat(chat_template_kwargs={"a": 1}, reasoning_effort="low", tools=[{"b": 2}]))
    assert made.variables == {"a": 1, "reasoning_effort": "low"}
    assert made.tools == [{"b": 2}]
    assert made.generation_prompt


# -- lengths


def fit(ids: list[int], *, of_text: bool = False, **fields: Any) -> list[int]:
    return openai.fit_prompt(completion(**fields), ids, of_text=of_text, max_model_len=10, vocab_size=1000)


@pytest.mark.parametrize(
    ("ids", "param", "said"),
    [
        ([], "prompt", "The decoder prompt cannot be empty"),
        (
            [1] * 11,
            "input_tokens",
            "maximum context length is 10 tokens. However, your prompt contains 11 input tokens",
        ),
        ([1] * 10, "input_tokens", "(length 10) plus the number of requested output tokens (at least 1)"),
        ([1, 1000], "prompt", "Token id 1000 is out of vocabulary"),
        ([-1], "prompt", "Token id -1 is out of vocabulary"),
    ],
)
def test_prompts_that_do_not_fit(ids: list[int], param: str, said: str) -> None:
    with pytest.raises(BadRequest) as caught:
        fit(ids)
    assert caught.value.param == param
    assert said in str(caught.value)


def test_truncation_keeps_the_end_unless_told_otherwise() -> None:
    ids = list(range(1, 21))
    assert fit(ids, truncate_prompt_tokens=3) == [18, 19, 20]
    assert fit(ids, truncate_prompt_tokens=3, truncation_side="right") == [1, 2, 3]
    assert fit(ids, truncate_prompt_tokens=-1) == ids[-9:]
    assert fit([5], truncate_prompt_tokens=3) == [5]
    with pytest.raises(BadRequest, match="truncate_prompt_tokens=11"):
        fit(ids, truncate_prompt_tokens=11)


def sampling(body: Completion | ChatCompletion, prompt_len: int = 4) -> Sampling:
    return openai.sampling_of(body, openai.ask_of(body), prompt_len, 100, 0)


def test_how_many_tokens_are_made() -> None:
    assert sampling(completion()).max_tokens == 16
    assert sampling(completion(max_tokens=None)).max_tokens == 16
    assert sampling(completion(max_tokens=50), 98).max_tokens == 2
    assert sampling(completion(max_tokens=0, echo=True)).max_tokens == 1
    assert sampling(chat()).max_tokens == 96
    assert sampling(chat(max_tokens=5)).max_tokens == 5
    assert sampling(chat(max_tokens=5, max_completion_tokens=6)).max_tokens == 6


def test_what_ends_a_request() -> None:
    made = sampling(completion(min_tokens=2, ignore_eos=True, stop_token_ids=[7, 7, 8]))
    assert made == Sampling(max_tokens=16, min_tokens=2, ignore_eos=True, stop_token_ids=frozenset((7, 8)))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (completion(max_tokens=0), "max_tokens"),
        (completion(max_tokens=101), "max_tokens"),
        (completion(min_tokens=17), "min_tokens"),
        (chat(max_completion_tokens=0), "max_completion_tokens"),
    ],
)
def test_limits_that_contradict(body: Completion | ChatCompletion, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        sampling(body)
    assert caught.value.param == param


# -- replies


def replies(body: Completion | ChatCompletion, **more: str) -> Replies:
    return Replies(openai.ask_of(body), BUILTIN, reply_id="id", model="m", created=1, **more)


PROMPT = Prompt(token_ids=[300, 301], text=" ba")


def piece(index: int, prompt: Prompt, text: str, token_ids: list[int], **more: Any) -> Piece:
    return Piece(index=index, prompt=prompt, text=text, token_ids=token_ids, **more)


RESULT = Result(prompt=PROMPT, text=" bu", token_ids=[304], finish_reason="length", stop_reason=None)
USAGE = Usage(prompt_tokens=2, completion_tokens=1, cached_tokens=1)


def facts_of(event: bytes) -> Any:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    return json.loads(event[6:])


def test_a_whole_completion() -> None:
    reply = json.loads(replies(completion(return_token_ids=True)).whole([RESULT], USAGE, {"a": 1}))
    assert (reply["id"], reply["object"], reply["model"]) == ("id", "text_completion", "m")
    assert reply["kv_transfer_params"] == {"a": 1}
    assert reply["usage"]["total_tokens"] == 3
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
    (choice,) = reply["choices"]
    assert choice["text"] == " bu"
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("length", None, None)
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([300, 301], [304])


def test_a_whole_chat() -> None:
    body = chat(logprobs=True, top_logprobs=1, return_prompt_text=True)
    reply = json.loads(replies(body, role="assistant", echoed="so").whole([RESULT], USAGE, None))
    assert (reply["object"], reply["prompt_text"], reply["prompt_token_ids"]) == ("chat.completion", " ba", None)
    (choice,) = reply["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == "so bu"
    name = BUILTIN.token_text(304)
    scored = {"token": name, "logprob": 0.0, "bytes": list(name.encode())}
    assert choice["logprobs"]["content"] == [scored | {"top_logprobs": [scored]}]


def test_echo_and_its_logprobs() -> None:
    reply = json.loads(replies(completion(echo=True, logprobs=0)).whole([RESULT], USAGE, None))
    (choice,) = reply["choices"]
    assert choice["text"] == " ba bu"
    names = [BUILTIN.token_text(token_id) for token_id in (300, 301, 304)]
    assert choice["logprobs"]["tokens"] == names
    assert choice["logprobs"]["token_logprobs"] == [None, 0.0, 0.0]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, len(names[0]), len(names[0] + names[1])]
    only = json.loads(replies(completion(echo=True, max_tokens=0)).whole([RESULT], USAGE, None))
    assert only["choices"][0]["text"] == " ba"


def test_prompt_logprobs() -> None:
    reply = json.loads(replies(completion(prompt_logprobs=1)).whole([RESULT], USAGE, None))
    scored = {"logprob": 0.0, "rank": 1, "decoded_token": BUILTIN.token_text(301)}
    assert reply["choices"][0]["prompt_logprobs"] == [None, {"301": scored}]


def test_events_of_a_completion() -> None:
    made = replies(completion(stream=True))
    assert made.opening(0, PROMPT) == b""
    assert facts_of(made.delta(piece(0, PROMPT, ' "é\n', [304]))[0]) == {
        "id": "id",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "text": ' "é\n',
                "logprobs": None,
                "finish_reason": None,
                "stop_reason": None,
                "prompt_token_ids": None,
                "token_ids": None,
            }
        ],
    }
    assert made.closing(USAGE) == b"data: [DONE]\n\n"


def test_events_of_a_chat() -> None:
    body = chat(stream=True, return_token_ids=True, stream_options={"include_usage": True})
    made = replies(body, role="assistant")
    opening = facts_of(made.opening(1, PROMPT))
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert opening["prompt_token_ids"] == [300, 301]
    (choice,) = facts_of(made.delta(piece(1, PROMPT, " bu", [304]))[0])["choices"]
    expected = {"index": 1, "delta": {"content": " bu"}, "logprobs": None, "finish_reason": None, "token_ids": [304]}
    assert choice == expected
    (last,) = facts_of(made.delta(piece(1, PROMPT, "", [], finish_reason="stop", stop_reason="x"))[0])["choices"]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "x")
    usage, done = made.closing(USAGE).split(b"data: [DONE]\n\n")
    assert done == b""
    assert facts_of(usage)["choices"] == []
    assert facts_of(usage)["usage"]["prompt_tokens_details"] == {"cached_tokens": 1, "created_cache_tokens": 0}


def test_continuous_usage_and_the_first_event() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    made = replies(completion(stream=True, stream_options=options, return_token_ids=True, logprobs=1))
    event, offset = made.delta(piece(0, PROMPT, " bu", [304], first=True, made=1))
    facts = facts_of(event)
    assert facts["usage"] == {"prompt_tokens": 2, "total_tokens": 3, "completion_tokens": 1}
    assert facts["choices"][0]["prompt_token_ids"] == [300, 301]
    assert offset == len(BUILTIN.token_text(304))
    later = facts_of(made.delta(piece(0, PROMPT, " bu", [304], made=2, offset=offset))[0])
    assert later["choices"][0]["prompt_token_ids"] is None
    assert later["choices"][0]["logprobs"]["text_offset"] == [offset]


@pytest.mark.parametrize("body", [completion(stream=True), chat(stream=True)])
def test_the_short_cut_gives_the_same_bytes(body: Completion | ChatCompletion) -> None:
    made = replies(body, role="assistant")
    plain = made.plain(3, PROMPT)
    assert plain is not None
    for text in (" ba", 'é"\\\n\x01', ""):
        encoded = json.dumps(text, ensure_ascii=False).encode()
        assert made.delta(piece(3, PROMPT, text, [304]))[0] == plain[0] + encoded + plain[1]


def test_no_short_cut_where_more_than_the_text_changes() -> None:
    usage = {"include_usage": True, "continuous_usage_stats": True}
    for fields in ({"logprobs": 1}, {"return_token_ids": True}, {"stream_options": usage}):
        assert replies(completion(stream=True, **fields)).plain(0, PROMPT) is None
