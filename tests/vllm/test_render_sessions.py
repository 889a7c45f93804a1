"""Sessions of a real render worker: the real tokenizer and template, scripted tokens, no engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from render_tier import Session, Tier, ask, chunk, events, stream, tier

EOS = 2
TEXT = "Grüße, 世界! \U0001f44d\U0001f3fd naïve café \U0001f468‍\U0001f469‍\U0001f467 end."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = 'Let me see.<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tier]:
    log = tmp_path_factory.mktemp("render") / "log"
    with tier("--workers", "2", "--enable-auto-tool-choice", "--tool-call-parser", "hermes", log=log) as started:
        yield started


def test_a_stream_of_chat(worker: Tier) -> None:
    session = worker.chat({"stream_options": {"include_usage": True}})
    (asked,) = session.requests
    assert asked["token_ids"][-4:] == worker.ids("<|im_start|>assistant\n")
    assert (asked["stream"], asked["stream_options"]) == (True, {"include_usage": True})
    assert asked["sampling_params"]["detokenize"] is False
    assert asked["sampling_params"]["max_tokens"] == 8192 - len(asked["token_ids"])
    ids = worker.ids(TEXT)
    replies = [session.feed(one) for one in stream([*ids, EOS])]
    assert session.texts() == {0: TEXT}
    assert b"\\ufffd" not in session.said and "�".encode() not in session.said
    assert session.events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert session.events[-1]["usage"] == {
        "prompt_tokens": len(asked["token_ids"]),
        "completion_tokens": len(ids) + 1,
        "total_tokens": len(asked["token_ids"]) + len(ids) + 1,
    }
    assert session.said.endswith(b"data: [DONE]\n\n")
    assert {reply.state for reply in replies[:-1]} == {"open"}
    assert replies[-1].state == "done"
    assert int(replies[-1].headers["x-kvferry-events"]) == session.said.count(b"\n\n")
    assert replies[0].headers["x-kvferry-status"] == "200"
    assert replies[0].headers["x-kvferry-content-type"].startswith("text/event-stream")
    assert int(replies[0].headers["x-kvferry-created"]) == session.events[0]["created"]


def test_events_are_a_function_of_the_chunks_however_they_come(worker: Tier) -> None:
    chunks = [*stream([*worker.ids(TEXT), EOS])]
    same = {"x_request_id": "the-same", "x_kvferry_created": "1700000000"}
    one_by_one = worker.chat(**same)
    for one in chunks:
        one_by_one.feed(one)
    at_once = worker.chat(**same)
    at_once.feed(*chunks)
    assert at_once.said == one_by_one.said
    assert at_once.events[0]["id"] == "chatcmpl-the-same"


def test_a_chunk_of_several_tokens_is_one_event(worker: Tier) -> None:
    ids = worker.ids("one two three four")
    session = worker.chat()
    session.feed(chunk(*ids[:3]), chunk(*ids[3:]))
    assert session.texts() == {0: "one two three four"}
    assert len(session.events) == 3


def test_choices_of_one_prompt(worker: Tier) -> None:
    session = worker.chat({"n": 2, "stream_options": {"include_usage": True}})
    assert [asked["sampling_params"]["n"] for asked in session.requests] == [2]
    left, right = worker.ids("left side"), worker.ids("right side")
    session.feed(chunk(*left, choice=0), chunk(*right, choice=1), chunk(EOS, choice=1, end="stop"))
    assert session.replies[-1].state == "open"
    session.feed(chunk(EOS, choice=0, end="stop"))
    assert session.texts() == {0: "left side", 1: "right side"}
    assert session.replies[-1].state == "done"
    assert session.events[-1]["usage"]["completion_tokens"] == len(left) + len(right) + 2


@pytest.mark.parametrize("streamed", [True, False])
def test_several_prompts(worker: Tier, streamed: bool) -> None:
    session = worker.session("/v1/completions", {"prompt": ["a b c", "x"], "max_tokens": 9, "stream": streamed})
    assert [asked["token_ids"] for asked in session.requests] == [worker.ids("a b c"), worker.ids("x")]
    assert len({asked["request_id"] for asked in session.requests}) == 2
    session.feed(chunk(*worker.ids(" d"), leg=0), chunk(*worker.ids(" y"), leg=1))
    session.feed(chunk(*worker.ids(" z"), leg=1, end="length"), chunk(*worker.ids(" e"), leg=0, end="length"))
    assert session.replies[-1].state == "done"
    if streamed:
        assert session.texts() == {0: " d e", 1: " y z"}
    else:
        answer = json.loads(session.said)
        assert [choice["text"] for choice in answer["choices"]] == [" d e", " y z"]
        assert answer["usage"]["completion_tokens"] == 4


def test_an_answer_that_is_not_streamed(worker: Tier) -> None:
    session = worker.chat({"stream": False})
    for one in stream(worker.ids("Hello there"))[:-1]:
        assert session.feed(one).body == b""
    last = session.feed(chunk(worker.ids("Hello there")[-1]), chunk(EOS, end="stop"))
    assert (last.state, last.headers["x-kvferry-content-type"]) == ("done", "application/json")
    answer = json.loads(session.said)
    assert answer["choices"][0]["message"]["content"] == "Hello there"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert str(answer["created"]) == last.headers["x-kvferry-created"]


@pytest.mark.parametrize("included", [False, True])
def test_a_stop_string_that_spans_tokens_and_chunks(worker: Tier, included: bool) -> None:
    session = worker.chat({"stop": ["END of it"], "include_stop_str_in_output": included})
    assert "stop" not in session.requests[0]["sampling_params"]
    ids = worker.ids("Before the END of it and after")
    told = [session.feed(one) for one in stream(ids, end="length")]
    stopped = [reply.headers.get("x-kvferry-stop") for reply in told if "x-kvferry-stop" in reply.headers]
    assert stopped == ["0.0"]
    assert session.texts() == {0: "Before the END of it" if included else "Before the "}
    last = [event["choices"][0] for event in session.events if event["choices"][0]["finish_reason"]]
    assert [(one["finish_reason"], one["stop_reason"]) for one in last] == [("stop", "END of it")]


def test_a_stop_string_ends_one_choice_of_two(worker: Tier) -> None:
    session = worker.chat({"n": 2, "stop": "###"})
    reply = session.feed(chunk(*worker.ids("a###b"), choice=1), chunk(*worker.ids("c"), choice=0))
    assert (reply.headers["x-kvferry-stop"], reply.state) == ("0.1", "open")
    session.feed(chunk(*worker.ids("d"), choice=1), chunk(EOS, choice=0, end="stop"))
    assert session.texts() == {0: "c", 1: "a"}
    assert session.replies[-1].state == "done"


def test_a_stop_token_is_the_engines_to_see_and_not_said(worker: Tier) -> None:
    (stop,) = worker.ids("\n")
    session = worker.chat({"stop_token_ids": [stop]})
    assert session.requests[0]["sampling_params"]["stop_token_ids"] == [stop, *worker.ids("<|im_end|>")]
    one = chunk(*worker.ids("line"), stop, end="stop")
    one[1]["choices"][0]["stop_reason"] = stop
    session.feed(one)
    assert session.texts() == {0: "line"}
    assert session.events[-1]["choices"][0]["stop_reason"] == stop


def test_special_tokens_are_said_when_asked_for(worker: Tier) -> None:
    for skip, wanted in ((True, "ab"), (False, "a<|im_start|>b<|im_end|>")):
        session = worker.chat({"skip_special_tokens": skip, "ignore_eos": True})
        ids = [*worker.ids("a"), 1, *worker.ids("b"), EOS]
        session.feed(*stream(ids, end="length"))
        assert session.texts() == {0: wanted}


def logprobs_of(token: int, logprob: float, rank: int, top: list[tuple[int, float, int]]) -> dict[str, Any]:
    entries = [{"token_id": one, "logprob": score, "rank": at} for one, score, at in top]
    first = {"token_id": token, "logprob": logprob, "rank": rank}
    return {"content": [{**first, "top_logprobs": [first, *(one for one in entries if one["token_id"] != token)]}]}


def test_logprobs_of_chat(worker: Tier) -> None:
    session = worker.chat({"logprobs": True, "top_logprobs": 2})
    assert session.requests[0]["sampling_params"]["logprobs"] == 3
    one, two, other = (worker.ids(text)[0] for text in (" one", " two", " other"))
    ranked = [(one, -0.25, 1), (two, -1.5, 2), (other, -3.0, 3)]
    session.feed(chunk(one, logprobs=logprobs_of(*ranked[0], ranked)))
    session.feed(chunk(other, logprobs=logprobs_of(*ranked[2], ranked)))
    said = [event["choices"][0]["logprobs"]["content"][0] for event in session.events[1:]]
    assert [(entry["token"], entry["logprob"]) for entry in said] == [(" one", -0.25), (" other", -3.0)]
    tops = [[(top["token"], top["logprob"]) for top in entry["top_logprobs"]] for entry in said]
    assert tops == [[(" one", -0.25), (" two", -1.5)], [(" other", -3.0), (" one", -0.25)]]


def test_logprobs_and_echo_of_completions(worker: Tier) -> None:
    ids = worker.ids("one two three")
    request = {"prompt": "one two three", "echo": True, "max_tokens": 0, "logprobs": 1}
    session = worker.session("/v1/completions", request)
    params = session.requests[0]["sampling_params"]
    assert (params["max_tokens"], params["prompt_logprobs"]) == (1, 1)
    told: list[Any] = [None]
    for token in ids[1:]:
        told.append({str(token): {"logprob": -2.5, "rank": 7}, str(ids[0]): {"logprob": -0.5, "rank": 1}})
    made = worker.ids(" four")[0]
    one = chunk(made, end="length", logprobs=logprobs_of(made, -0.1, 1, []), prompt_logprobs=told)
    session.feed(one)
    (choice,) = json.loads(session.said)["choices"]
    assert choice["text"] == "one two three"
    assert choice["logprobs"]["token_logprobs"] == [None, -2.5, -2.5]
    assert choice["logprobs"]["tokens"] == ["one", " two", " three"]
    assert choice["logprobs"]["top_logprobs"][1:] == [{" two": -2.5, "one": -0.5}, {" three": -2.5, "one": -0.5}]


def test_prompt_logprobs_are_passed_on_by_id(worker: Tier) -> None:
    session = worker.session("/v1/completions", {"prompt": "one two", "prompt_logprobs": 0, "max_tokens": 1})
    (_, second) = worker.ids("one two")
    told = [None, {str(second): {"logprob": -1.25, "rank": 3}}]
    session.feed(chunk(*worker.ids(" x"), end="length", prompt_logprobs=told))
    (choice,) = json.loads(session.said)["choices"]
    wanted = {str(second): {"logprob": -1.25, "rank": 3, "decoded_token": " two"}}
    assert choice["prompt_logprobs"] == [None, wanted]


def derendered(worker: Tier, request: dict[str, Any], ids: list[int]) -> dict[str, Any]:
    """What vLLM's own stateless endpoint says of the same tokens."""
    generated = {"request_id": "r", "choices": [{"index": 0, "finish_reason": "stop", "token_ids": ids}]}
    body = json.dumps({"chat_request": request, "generate_response": generated}).encode()
    reply = ask(worker.url, "POST", "/v1/chat/completions/derender", body)
    assert reply.status == 200, reply.body
    return dict(reply.json()["choices"][0]["message"])


def tool_calls(session: Session) -> tuple[list[dict[str, Any]], set[str]]:
    """The calls put together from their pieces, and all ids that were said."""
    calls: list[dict[str, Any]] = []
    ids = set()
    for event in session.events:
        for piece in event["choices"][0]["delta"].get("tool_calls") or [] if event["choices"] else []:
            if piece["index"] == len(calls):
                calls.append({"name": "", "arguments": ""})
            ids |= {piece["id"]} if piece.get("id") else set()
            for name in ("name", "arguments"):
                calls[piece["index"]][name] += piece["function"].get(name) or ""
    return calls, ids


def test_tool_calls_are_told_apart_and_keep_their_ids_on_another_worker(worker: Tier) -> None:
    request = {"tools": TOOLS}
    ids = [*worker.ids(CALL), EOS]
    chunks = stream(ids)
    first, second = (url for _, url in worker.workers)
    session = worker.chat(request, at=first, x_request_id="calls")
    assert session.worker == first
    for one in chunks:
        session.feed(one)
    calls, named = tool_calls(session)
    assert session.texts() == {0: "Let me see."}
    assert [(one["name"], json.loads(one["arguments"])) for one in calls] == [("get_weather", {"city": "Zürich"})]
    assert len(named) == 1
    assert session.events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    created = session.replies[0].headers["x-kvferry-created"]
    for said in (1, 5, session.said.count(b"\n\n") - 1):
        other = worker.chat(
            request, at=second, x_request_id="calls", x_kvferry_said=str(said), x_kvferry_created=created
        )
        assert other.worker == second
        other.feed(*chunks[:9])
        other.feed(*chunks[9:])
        assert other.said == b"".join(one + b"\n\n" for one in session.said.split(b"\n\n")[said:-1])


def test_whole_answers_equal_what_vllms_stateless_endpoint_says(worker: Tier) -> None:
    request = {"messages": [{"role": "user", "content": "hi"}], "model": "smollm2", "tools": TOOLS}
    ids = [*worker.ids(CALL), EOS]
    session = worker.chat({"stream": False, "tools": TOOLS})
    session.feed(*stream(ids))
    message = json.loads(session.said)["choices"][0]["message"]
    theirs = derendered(worker, request, ids)
    for one in (message, theirs):
        for call in one["tool_calls"]:
            call.pop("id")
    assert message["tool_calls"] == theirs["tool_calls"]
    assert message["content"] == theirs["content"]


def test_the_responses_api(worker: Tier) -> None:
    session = worker.session("/v1/responses", {"input": "hi", "stream": True}, x_request_id="r1")
    session.feed(*stream([*worker.ids("Hello there"), EOS]))
    assert session.replies[-1].state == "done"
    kinds = [event["type"] for event in session.events]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    deltas = [event["delta"] for event in session.events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "Hello there"
    whole = worker.session("/v1/responses", {"input": "hi"})
    whole.feed(*stream([*worker.ids("Hello there"), EOS]))
    assert json.loads(whole.said)["output"][-1]["content"][0]["text"] == "Hello there"


def test_responses_that_are_resumed_have_the_same_ids(worker: Tier) -> None:
    chunks = stream([*worker.ids("Hello there, how are you"), EOS])
    first, second = (url for _, url in worker.workers)
    asked = {"input": "hi", "stream": True}
    session = worker.session("/v1/responses", asked, at=first, x_request_id="r2")
    session.feed(*chunks)
    created = session.replies[0].headers["x-kvferry-created"]
    other = worker.session(
        "/v1/responses", asked, at=second, x_request_id="r2", x_kvferry_said="3", x_kvferry_created=created
    )
    other.feed(*chunks)
    assert other.said == b"".join(one + b"\n\n" for one in session.said.split(b"\n\n")[3:-1])


@pytest.mark.parametrize(
    ("request_body", "status", "word"),
    [
        ({"messages": "x"}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "hi"}], "model": "other"}, 404, "other"),
        ({"messages": [{"role": "user", "content": "hi"}], "max_tokens": -1}, 400, "max_tokens"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, 400, "8192"),
    ],
)
def test_vllm_refuses_what_it_refuses(worker: Tier, request_body: dict[str, Any], status: int, word: str) -> None:
    reply = worker.open("/v1/chat/completions", request_body)
    assert (reply.status, reply.state) == (status, "done")
    assert word in reply.error["message"]


def test_a_refusal_that_comes_once_a_stream_has_begun(worker: Tier) -> None:
    """The input processor refuses it: vLLM has sent its status by then."""
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "logit_bias": {"999999": 1}}
    reply = worker.open("/v1/chat/completions", body)
    assert (reply.status, reply.state) == (200, "done")
    assert b"999999" in reply.body
    assert reply.body.endswith(b"data: [DONE]\n\n")


def test_one_request_id_twice_at_once(worker: Tier) -> None:
    url = worker.workers[0][1]
    one, two = (worker.chat(at=url, x_request_id="twice") for _ in range(2))
    one.feed(chunk(*worker.ids("first")))
    two.feed(chunk(*worker.ids("second")))
    one.feed(chunk(EOS, end="stop"))
    two.feed(chunk(EOS, end="stop"))
    assert (one.texts(), two.texts()) == ({0: "first"}, {0: "second"})
    assert {session.events[0]["id"] for session in (one, two)} == {"chatcmpl-twice"}


def test_an_engine_that_fails(worker: Tier) -> None:
    session = worker.chat()
    session.feed(chunk(*worker.ids("begun")))
    session.feed([0, {"error": {"message": "KV was lost", "type": "x", "code": 500}}])
    assert session.replies[-1].state == "done"
    assert "KV was lost" in session.events[-1]["error"]["message"]
    for reason in ("error", "abort"):
        session = worker.chat()
        session.feed(chunk(*worker.ids("begun"), end=reason))
        assert session.replies[-1].state == "done"
        last = session.events[-1]
        assert "error" in last if reason == "error" else last["choices"][0]["finish_reason"] == "abort"


def test_a_client_that_leaves_leaves_nothing(worker: Tier) -> None:
    _, url = worker.workers[0]

    def held() -> list[float]:
        """Sessions that are open, and choices in vLLM's own books."""
        lines = [line.split() for line in ask(url, "GET", "/metrics").body.decode().splitlines()]
        names = ("kvferry_render_sessions_open", "kvferry_render_choices")
        return [float(value) for wanted in names for name, *_, value in lines if name == wanted]

    before = held()
    sessions = [worker.chat({"stream": streamed, "n": 2}, at=url) for streamed in (True, False)]
    sessions[0].feed(chunk(*worker.ids("begun")))
    assert held() == [before[0] + 2, before[1] + 2], "the other one has no token yet"
    for session in sessions:
        assert ask(url, "DELETE", f"/v1/sessions/{session.name}").status == 200
        again = ask(url, "POST", f"/v1/sessions/{session.name}/tokens", b"[]", x_kvferry_seq="1")
        assert (again.status, again.error["type"]) == (404, "session_unknown")
    assert held() == before


def test_vllms_own_endpoints_are_there_and_generation_is_not(worker: Tier) -> None:
    request = {"messages": [{"role": "user", "content": "hi"}], "model": "smollm2"}
    rendered = ask(worker.url, "POST", "/v1/chat/completions/render", json.dumps(request).encode()).json()
    assert rendered["token_ids"] == worker.chat().requests[0]["token_ids"]
    tokens = ask(worker.url, "POST", "/tokenize", b'{"model": "smollm2", "prompt": "a b"}').json()["tokens"]
    assert tokens == worker.ids("a b")
    assert ask(worker.url, "GET", "/health").status == 200
    assert [one["id"] for one in ask(worker.url, "GET", "/v1/models").json()["data"]] == ["smollm2"]
    settings = ask(worker.url, "GET", "/v1/sessions/settings").json()
    assert settings["worker"] in [url for _, url in worker.workers]
    assert (settings["tool_call_parser"], settings["served_model_names"]) == ("hermes", ["smollm2"])
    for path in ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate"):
        assert ask(worker.url, "POST", path, b"{}").error["type"] == "not_served_here"


def test_a_worker_that_dies_is_replaced_and_its_sessions_go_on_elsewhere(worker: Tier) -> None:
    (pid, first), (_, second) = worker.workers
    chunks = stream([*worker.ids(TEXT), EOS])
    session = worker.chat(at=first, x_request_id="moved")
    for one in chunks[:7]:
        session.feed(one)
    os.kill(pid, signal.SIGKILL)
    last = session.replies[-1].headers
    created = session.replies[0].headers["x-kvferry-created"]
    other = worker.chat(
        at=second, x_request_id="moved", x_kvferry_said=last["x-kvferry-events"], x_kvferry_created=created
    )
    other.feed(*chunks)
    session.said += other.said
    assert session.texts() == {0: TEXT}
    assert [event["created"] for event in session.events] == [int(created)] * len(session.events)
    assert events(session.said)[0]["id"] == "chatcmpl-moved"
    assert worker.process.stdout is not None
    started = worker.process.stdout.readline().split()
    assert started[:2] == [b"worker", b"0"]
    worker.workers[0] = (int(started[3]), f"http://127.0.0.1:{int(started[5])}")
    assert ask(worker.workers[0][1], "GET", "/health").status == 200


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["smollm3"], ["smollm3", "smollm2"]),
        (["smollm2", "--uds", "x.sock"], ["--uds", "--port"]),
        (["smollm2", "--tool-call-parser", "hermess", "--enable-auto-tool-choice"], ["hermess"]),
    ],
)
def test_a_tier_that_can_not_start_says_why(args: list[str], words: list[str]) -> None:
    line = [sys.executable, "-m", "kvferry.cli", "render", *args, "--port", "0"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode != 0
    assert last.startswith("kvferry: error: ")
    assert all(word in last for word in words), last
