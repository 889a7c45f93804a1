"""Reasoning and tool calls through sessions: the small model's tokenizer, two of whose special tokens are called
<think> and </think>.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from render_tier import Session, Tier, ask, chunk, stream, tier

from kvferry.launch.model import prepare

EOS = 2
RENAMED = {"<file_sep>": "<think>", "<filename>": "</think>"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
THOUGHT = "The user greets. \U0001f914 I greet back."
ANSWER = "Grüße!"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, 3]}}\n</tool_call>'
WHOLE = f"<think>{THOUGHT}</think>{ANSWER}{CALL}"


def thinking_model(folder: Path) -> Path:
    source = prepare("smollm2")
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    path = folder / "tokenizer.json"
    facts = json.loads(path.read_text())
    vocabulary = facts["model"]["vocab"]
    for old, new in RENAMED.items():
        vocabulary[new] = vocabulary.pop(old)
        (entry,) = (one for one in facts["added_tokens"] if one["content"] == old)
        entry |= {"content": new, "special": False}
    path.write_text(json.dumps(facts))
    return folder


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tier]:
    folder = tmp_path_factory.mktemp("thinking")
    model = thinking_model(folder / "model")
    args = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]
    with tier(*args, model=str(model), log=folder / "log") as started:
        yield started


def told(session: Session) -> dict[str, Any]:
    """What the events come to."""
    message: dict[str, Any] = {"reasoning": "", "content": "", "calls": []}
    for event in session.events:
        for choice in event["choices"]:
            delta = choice["delta"]
            for name in ("reasoning", "content"):
                message[name] += delta.get(name) or ""
            for piece in delta.get("tool_calls") or []:
                if piece["index"] == len(message["calls"]):
                    message["calls"].append(["", ""])
                call = message["calls"][piece["index"]]
                call[0] += piece["function"].get("name") or ""
                call[1] += piece["function"].get("arguments") or ""
    message["calls"] = [(name, json.loads(arguments)) for name, arguments in message["calls"]]
    return message


def derendered(worker: Tier, ids: list[int]) -> dict[str, Any]:
    request = {"messages": [{"role": "user", "content": "hi"}], "model": "smollm2", "tools": TOOLS}
    generated = {"request_id": "r", "choices": [{"index": 0, "finish_reason": "stop", "token_ids": ids}]}
    body = json.dumps({"chat_request": request, "generate_response": generated}).encode()
    reply = ask(worker.url, "POST", "/v1/chat/completions/derender", body)
    assert reply.status == 200, reply.body
    message = reply.json()["choices"][0]["message"]
    calls = [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in message["tool_calls"]]
    return {"reasoning": message["reasoning"], "content": message["content"], "calls": calls}


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_reasoning_content_and_calls_are_told_apart(worker: Tier, size: int) -> None:
    ids = [*worker.ids(WHOLE), EOS]
    chunks = [
        chunk(*ids[at : at + size], end="stop" if at + size >= len(ids) else None) for at in range(0, len(ids), size)
    ]
    session = worker.chat({"tools": TOOLS})
    for one in chunks:
        session.feed(one)
    wanted = {"reasoning": THOUGHT, "content": ANSWER, "calls": [("add", {"a": 1, "b": [2, 3]})]}
    assert told(session) == wanted
    assert session.events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert "�" not in session.said.decode()


def test_a_whole_answer_equals_what_vllms_stateless_endpoint_says(worker: Tier) -> None:
    ids = [*worker.ids(WHOLE), EOS]
    session = worker.chat({"tools": TOOLS, "stream": False})
    session.feed(*stream(ids))
    message = json.loads(session.said)["choices"][0]["message"]
    calls = [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in message["tool_calls"]]
    ours = {"reasoning": message["reasoning"], "content": message["content"], "calls": calls}
    assert ours == derendered(worker, ids)
    assert (ours["reasoning"], ours["calls"]) == (THOUGHT, [("add", {"a": 1, "b": [2, 3]})])


def test_logprobs_with_a_parser_lose_no_token(worker: Tier) -> None:
    ids = [*worker.ids(f"<think>{THOUGHT}</think>{ANSWER}"), EOS]
    session = worker.chat({"logprobs": True, "top_logprobs": 1})
    for at, token in enumerate(ids):
        first = {"token_id": token, "logprob": -at / 8, "rank": 1}
        logprobs = {"content": [{**first, "top_logprobs": [first]}]}
        session.feed(chunk(token, end="stop" if token == EOS else None, logprobs=logprobs))
    choices = [choice for event in session.events for choice in event["choices"]]
    said = [one["logprob"] for choice in choices if choice["logprobs"] for one in choice["logprobs"]["content"]]
    assert said == sorted(said, reverse=True)
    assert set(said) <= {-at / 8 for at in range(len(ids))}
    assert told(session)["reasoning"] == THOUGHT


def test_a_stop_string_counts_while_it_thinks(worker: Tier) -> None:
    session = worker.chat({"stop": ["greets"]})
    replies = [session.feed(one) for one in stream([*worker.ids(WHOLE), EOS])]
    assert [reply.headers["x-kvferry-stop"] for reply in replies if "x-kvferry-stop" in reply.headers] == ["0.0"]
    assert told(session) == {"reasoning": "The user ", "content": "", "calls": []}


def test_engines_get_what_vllms_own_render_endpoint_gives_them(worker: Tier) -> None:
    request = {"messages": [{"role": "user", "content": "hi"}], "model": "smollm2", "tools": TOOLS, "temperature": 0.5}
    rendered = ask(worker.url, "POST", "/v1/chat/completions/render", json.dumps(request).encode()).json()
    (ours,) = worker.chat(request | {"stream": False}).requests
    for name in ("token_ids", "model", "reasoning_ended", "reasoning_parser_kwargs", "cache_salt"):
        assert ours.get(name) == rendered[name], name
    theirs, params = rendered["sampling_params"], ours["sampling_params"]
    assert params.pop("stop_token_ids") == worker.ids("<|im_end|>"), "for engines that don't know it"
    del params["detokenize"]
    assert {name: theirs[name] for name in params} == params


def test_a_thinking_budget_is_the_engines_to_keep(worker: Tier) -> None:
    session = worker.chat({"thinking_token_budget": 5})
    assert session.requests[0]["sampling_params"]["thinking_token_budget"] == 5


def test_the_settings_name_the_parsers(worker: Tier) -> None:
    settings = ask(worker.url, "GET", "/v1/sessions/settings").json()
    assert (settings["tool_call_parser"], settings["reasoning_parser"]) == ("hermes", "qwen3")
