"""One request, sent to one engine and to the pair; their replies in a form that can be compared.

What two runs of one engine may differ in is taken out: ids, times, and where a stream is cut into events. Of a stream
the events of one choice are folded into one (texts, ids and scores joined), the kinds of its events, their fields and
its end are kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import pytest
from contract_case import CHAT, COMPLETIONS, GENERATE, RESPONSES, Case

OWN = ("created", "created_at", "request_id", "system_fingerprint", "item_id", "permission")
"""Another one each time, or each engine's."""
IDS = ("cmpl-", "chatcmpl-", "resp_", "msg_", "fc_", "call_", "rs_")
RENDERED_ROUTES = (COMPLETIONS, CHAT, RESPONSES)
HEADERS = ("content-type", "allow", "www-authenticate")


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    raw: bytes

    @property
    def streamed(self) -> bool:
        return self.headers.get("Content-Type", "").startswith("text/event-stream")


async def send(session: aiohttp.ClientSession, url: str, case: Case, model: str) -> Reply:
    raw, headers = case.payload(model)
    async with session.request(case.method, url + case.route, data=raw, headers=headers) as response:
        return Reply(response.status, response.headers.copy(), await response.read())


def seen(reply: Reply) -> Any:
    """All that is to be equal."""
    said = {name: reply.headers.get(name) for name in HEADERS}
    if "Content-Length" in reply.headers and not reply.streamed:
        assert int(reply.headers["Content-Length"]) == len(reply.raw)
    return {"status": reply.status, "headers": said, "body": stream(reply.raw) if reply.streamed else body(reply.raw)}


def body(raw: bytes) -> Any:
    try:
        return anonymous(json.loads(raw))
    except ValueError:
        return raw.decode("utf-8", "replace")


def anonymous(facts: Any) -> Any:
    if isinstance(facts, list):
        return [anonymous(item) for item in facts]
    if not isinstance(facts, dict):
        return facts
    return {key: "*" if own(key, value) else anonymous(value) for key, value in facts.items()}


def own(key: str, value: Any) -> bool:
    return (key in OWN and value is not None) or (
        key in ("id", "call_id") and isinstance(value, str) and value.startswith(IDS)
    )


def stream(raw: bytes) -> Any:
    """Kinds of events in their order, choices folded, the rest as it came."""
    assert raw.endswith(b"\n\n")
    names, choices, fields, rest = [], dict[Any, Any](), set[str](), []
    for event in raw.decode().strip().split("\n\n"):
        lines = event.split("\n")
        data = next((line.removeprefix("data: ") for line in lines if line.startswith("data: ")), None)
        kind = next((line.removeprefix("event: ") for line in lines if line.startswith("event: ")), "")
        if data is None or data == "[DONE]":
            names.append(event)
            continue
        facts = anonymous(json.loads(data))
        if kind:
            facts["sequence_number"] = "*"
        if kind == "response.output_text.delta":
            fold(choices, kind, {"choices": [facts]})
        elif facts.get("choices"):
            (choice,) = facts["choices"]
            kind = f"choice {choice['index']}"
            fold(choices, choice["index"], facts)
        else:
            rest.append(facts)
            kind = kind or "no choice"
        fields |= facts.keys()
        if kind.startswith("choice"):
            kind = "choice"
        if not names or names[-1] != kind or kind == "no choice":
            names.append(kind)
    return {"events": names, "fields": sorted(fields), "choices": choices, "rest": rest}


def fold(choices: dict[Any, Any], key: Any, facts: dict[str, Any]) -> None:
    """Join an event to those of its choice before it. Of the counts that come with each the last ones stay."""
    event = {name: value for name, value in facts.items() if name != "choices"} | {"choice": facts["choices"][0]}
    choices[key] = joined(choices[key], event) if key in choices else event


ADDED = ("text", "content", "reasoning", "arguments", "delta")


def joined(old: Any, new: Any, name: str = "") -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {key: joined(old[key], value, key) if key in old else value for key, value in new.items()}
    if isinstance(old, str) and isinstance(new, str) and name in ADDED:
        return old + new
    if isinstance(old, list) and isinstance(new, list):
        if name != "tool_calls":
            return old + new
        calls = {call["index"]: call for call in old}
        for call in new:
            calls[call["index"]] = joined(calls[call["index"]], call) if call["index"] in calls else call
        return list(calls.values())
    if new is None and old is not None:
        return old
    return new


def without(facts: Any, path: str) -> Any:
    """`facts` with what is at the path taken out: 'usage' of the body; '': all of it, and its headers."""
    names = ["body", *path.split(".")] if path else ["body"]
    if len(names) == 1:
        return {key: value for key, value in facts.items() if key not in ("body", "headers")}
    copy = json.loads(json.dumps(facts))
    place = copy
    for step in names[:-1]:
        place = place[step]
    place.pop(names[-1], None)
    return copy


def near(facts: Any, abs_: float) -> Any:
    """For comparison: numbers with a fraction may be off by so much."""
    if isinstance(facts, float):
        return pytest.approx(facts, abs=abs_)
    if isinstance(facts, list):
        return [near(item, abs_) for item in facts]
    if isinstance(facts, dict):
        return {key: near(value, abs_) for key, value in facts.items()}
    return facts


def check(case: Case, one: Reply, pair: Reply, tolerance: float = 0.0) -> None:
    """Equal, or different as the table says."""
    assert one.status == case.status, one.raw[:2000]
    ours, theirs = seen(pair), seen(one)
    if case.differs is None:
        compare(ours, theirs, tolerance)
        return
    if case.differs.status:
        assert pair.status == case.differs.status
        error = json.loads(pair.raw)["error"]
        assert error["param"] == case.differs.param and error["message"]
    for path in case.differs.fields:
        assert ours != theirs
        ours, theirs = without(ours, path), without(theirs, path)
    if case.differs.fields:
        compare(ours, theirs, tolerance)


def check_rendered(case: Case, one: Reply, pair: Reply) -> None:
    """As `check`, of a pair behind a render tier: refusals are in vLLM's words, which a simulated engine's aren't."""
    assert one.status == case.status, one.raw[:2000]
    if case.rendered is not None:
        assert pair.status == case.rendered.status and seen(pair) != seen(one)
    elif case.differs is None and case.status >= 400 and case.route in RENDERED_ROUTES and case.method == "POST":
        assert pair.status == one.status
        error = json.loads(pair.raw)["error"]
        assert error.keys() == json.loads(one.raw)["error"].keys()
        assert error["message"] and error["code"] == one.status
    elif case.differs is not None:
        check(case, one, pair)
    else:
        compare(seen(pair), seen(one), 0.0)


def compare(ours: Any, theirs: Any, tolerance: float) -> None:
    if ours != theirs:
        assert ours == (near(theirs, tolerance) if tolerance else theirs)


async def resolved(session: aiohttp.ClientSession, url: str, pair: str, case: Case, model: str) -> Case:
    """With `<token N>` and `<text N>` put in: those of the answer that one engine gives without a stop. The pair is
    asked too, so that both have the prompt in their caches."""
    text = json.dumps(case.body)
    if "<token " not in text and "<text " not in text:
        return case
    free = {key: value for key, value in case.body.items() if key not in ("stop", "stop_token_ids", "stream_options")}
    free |= {"stream": False, "return_token_ids": True}
    if case.route == GENERATE:
        sampling = {k: v for k, v in case.body["sampling_params"].items() if k not in ("stop", "stop_token_ids")}
        free = {"token_ids": case.body["token_ids"], "sampling_params": sampling}
    reply = await send(session, url, replace(case, body=free), model)
    assert reply.status == 200, reply.raw
    assert seen(await send(session, pair, replace(case, body=free), model))["status"] == 200
    made = json.loads(reply.raw)["choices"][0]["token_ids"]
    for at, token in enumerate(made):
        text = text.replace(f'"<token {at}>"', str(token))
        if f"<text {at}>" in text:
            asked = replace(case, route="/detokenize", body={"tokens": [token]})
            shown = json.loads((await send(session, url, asked, model)).raw)["prompt"]
            text = text.replace(f'"<text {at}>"', json.dumps(shown))
    assert "<token " not in text and "<text " not in text
    return replace(case, body=json.loads(text))
