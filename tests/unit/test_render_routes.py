"""The session routes over a scripted frontend: it asks a session for outputs as vLLM's handlers do, without vLLM."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kvferry.render.asgi import Receive, Scope, Send
from kvferry.render.leg import Item, Leg
from kvferry.render.routes import Front, Limits
from kvferry.render.session import CURRENT

HELD: weakref.WeakSet[Any] = weakref.WeakSet()
"""What legs process with: it holds a request."""


def processed(leg: Leg) -> Callable[[Item], list[int]]:
    """An output per choice with tokens; 7 is where a stop string ends."""

    def process(item: Item) -> list[int]:
        if item.choice is None:
            leg.put(RuntimeError((item.chunk.error or {})["message"]))
            return []
        tokens = item.choice.token_ids or []
        if tokens:
            leg.put((leg.index, item.choice.index, tokens, item.choice.finish_reason))
        return [item.choice.index] if 7 in tokens else []

    HELD.add(process)
    return process


async def generated(prompt: str) -> AsyncIterator[Any]:
    """As `RemoteEngine.generate`, a generator per prompt."""
    session = CURRENT.get()
    leg = session.ask()

    async def outputs() -> AsyncIterator[Any]:
        failed = True
        try:
            session.admitted(leg, json.dumps({"prompt": prompt}).encode(), processed(leg))
            async for output in leg.outputs():
                failed = False
                yield output
                if output[3]:
                    return
        finally:
            session.left(leg, failed=failed)

    return outputs()


class Frontend:
    """`prompts` in the body's JSON: one generation each. `fail`: a 400; `burn`: seconds of CPU before it asks. `key`:
    who has another one gets a 401, before the body is read.
    """

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.gate: asyncio.Event | None = None
        self.key = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.key and (b"authorization", b"Bearer " + self.key) not in scope["headers"]:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"who?"})
            return
        body = json.loads((await receive())["body"])
        if self.gate is not None:
            await self.gate.wait()
        if body.get("fail"):
            await send({"type": "http.response.start", "status": 400, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"no"})
            return
        until = time.thread_time() + body.get("burn", 0)
        while time.thread_time() < until:
            pass
        generators = [await generated(prompt) for prompt in body["prompts"]]
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:

            async def pull(generator: AsyncIterator[Any]) -> None:
                async for output in generator:
                    await say(output)

            async def say(output: Any) -> None:
                event = f'data: {json.dumps(output)} "created":{int(time.time())}\n\n'
                await send({"type": "http.response.body", "body": event.encode(), "more_body": True})

            await asyncio.gather(*(pull(generator) for generator in generators))
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
            self.ended.append("whole")
        except RuntimeError as error:
            await send({"type": "http.response.body", "body": f"data: {error}\n\n".encode(), "more_body": True})
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        await send({"type": "http.response.body", "body": b""})


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Asked:
    """One exchange with a `Front`."""

    def __init__(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        self.status = status
        self.headers = {name.decode(): value.decode() for name, value in headers}
        self.body = body

    @property
    def kind(self) -> str:
        return str(json.loads(self.body)["error"]["type"])


class House:
    def __init__(self, keys: tuple[str, ...] = (), **limits: Any) -> None:
        self.frontend = Frontend()
        self.clock = Clock()
        self.front = Front(self.frontend, Limits(**limits), 4711, b"{}", keys, self.clock)
        self.gone = asyncio.Event()
        """The clients leave that have asked since this was new."""

    async def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> Asked:
        named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": method, "path": path, "headers": named, "server": ("10.0.0.9", 8400)}
        said: list[Any] = []
        gone = self.gone
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            said.append(message)

        await self.front(scope, receive, send)
        return Asked(said[0]["status"], said[0]["headers"], b"".join(one.get("body", b"") for one in said[1:]))

    async def open(self, *prompts: str, path: str = "/v1/chat/completions", more: Any = None, **headers: str) -> Asked:
        body = json.dumps({"prompts": prompts, **(more or {})}).encode()
        return await self.ask("POST", "/v1/sessions", body, x_kvferry_path=path, **headers)

    async def name(self, *prompts: str, **headers: str) -> str:
        return str(json.loads((await self.open(*prompts, **headers)).body)["session"])

    async def feed(self, name: str, seq: int, *chunks: Any) -> Asked:
        return await self.ask(
            "POST", f"/v1/sessions/{name}/tokens", json.dumps(chunks).encode(), x_kvferry_seq=str(seq)
        )


def chunk(leg: int, *tokens: int, choice: int = 0, end: str | None = None) -> Any:
    return [leg, {"choices": [{"index": choice, "token_ids": list(tokens), "finish_reason": end}]}]


def said(asked: Asked) -> list[Any]:
    return [json.loads(event.partition(b" ")[2].split(b' "created"')[0]) for event in asked.body.split(b"\n\n")[:-1]]


async def test_a_session_from_its_opening_to_its_end() -> None:
    house = House()
    opened = await house.open("hi")
    assert (opened.status, opened.headers["x-kvferry-state"]) == (200, "open")
    told = json.loads(opened.body)
    assert (told["worker"], told["requests"]) == ("http://10.0.0.9:4711", [{"prompt": "hi"}])
    first = await house.feed(told["session"], 0, chunk(0, 1), chunk(0, 2))
    assert said(first) == [[0, 0, [1], None], [0, 0, [2], None]]
    assert first.headers["x-kvferry-events"] == "2"
    assert first.headers["x-kvferry-status"] == "200"
    assert first.headers["x-kvferry-content-type"] == "text/event-stream"
    assert int(first.headers["x-kvferry-created"]) > 1_600_000_000
    last = await house.feed(told["session"], 1, chunk(0, 3, end="stop"))
    assert (last.headers["x-kvferry-state"], last.headers["x-kvferry-events"]) == ("done", "4")
    assert "x-kvferry-status" not in last.headers
    assert house.frontend.ended == ["whole"]


async def test_what_the_frontend_answers_itself_is_the_reply() -> None:
    opened = await House().open(more={"fail": True})
    assert (opened.status, opened.body, opened.headers["x-kvferry-state"]) == (400, b"no", "done")


async def test_the_opening_waits_for_all_prompts_and_events_follow_the_order_of_chunks() -> None:
    house = House()
    told = json.loads((await house.open("a", "b", "c")).body)
    assert [request["prompt"] for request in told["requests"]] == ["a", "b", "c"]
    chunks = [chunk(2, 1), chunk(0, 2), chunk(1, 3, end="stop"), chunk(2, 4), chunk(1, 9), chunk(0, 5, end="stop")]
    fed = await house.feed(told["session"], 0, *chunks)
    assert [(leg, tokens) for leg, _, tokens, _ in said(fed)] == [(2, [1]), (0, [2]), (1, [3]), (2, [4]), (0, [5])]


async def test_no_reply_is_lost_and_none_is_made_twice() -> None:
    house = House()
    name = await house.name("hi")
    first = await house.feed(name, 0, chunk(0, 1))
    again = await house.feed(name, 0, chunk(0, 1))
    assert (again.body, again.headers) == (first.body, first.headers)
    for seq in (2, 7):
        wrong = await house.feed(name, seq, chunk(0, 1))
        assert (wrong.status, wrong.kind) == (409, "bad_seq")
    both = await asyncio.gather(house.feed(name, 1, chunk(0, 2)), house.feed(name, 1, chunk(0, 2)))
    assert both[0].body == both[1].body
    assert said(both[0]) == [[0, 0, [2], None]]


async def test_a_session_resumed_says_what_is_missing_with_the_time_it_was_begun() -> None:
    house = House()
    chunks = [chunk(0, number) for number in range(9)]
    name = await house.name("hi", x_kvferry_said="4", x_kvferry_created="1234567890")
    fed = await house.feed(name, 0, *chunks)
    assert [tokens for _, _, tokens, _ in said(fed)] == [[4], [5], [6], [7], [8]]
    assert fed.headers["x-kvferry-events"] == "9"
    assert fed.body.count(b'"created":1234567890\n') == 5
    assert b"kvferry_render_sessions_resumed_total 1.0" in (await house.ask("GET", "/metrics")).body


async def test_stop_strings_are_told_by_request_and_choice() -> None:
    house = House()
    name = await house.name("a", "b")
    fed = await house.feed(name, 0, chunk(1, 7, choice=2), chunk(0, 1), chunk(0, 7, choice=1))
    assert fed.headers["x-kvferry-stop"] == "1.2,0.1"
    assert "x-kvferry-stop" not in (await house.feed(name, 1, chunk(0, 1))).headers


async def test_the_error_of_a_stream_is_the_frontends_to_tell() -> None:
    house = House()
    name = await house.name("a")
    fed = await house.feed(name, 0, chunk(0, 1), [0, {"error": {"message": "gone"}}], chunk(0, 2))
    assert fed.body.endswith(b"data: gone\n\n")
    assert fed.headers["x-kvferry-state"] == "done"


async def test_a_client_that_leaves_ends_the_frontends_call() -> None:
    house = House()
    name = await house.name("a", "b")
    await house.feed(name, 0, chunk(1, 1))
    assert (await house.ask("DELETE", f"/v1/sessions/{name}")).status == 200
    await asyncio.sleep(0.01)
    assert house.frontend.ended == ["cancelled"]
    for asked in (await house.feed(name, 1, chunk(0, 1)), await house.ask("DELETE", f"/v1/sessions/{name}")):
        assert (asked.status, asked.kind) == (404, "session_unknown")


async def test_a_client_that_leaves_an_opening_leaves_no_session_and_frees_its_turn() -> None:
    house = House(small_at_once=1)
    house.frontend.gate = asyncio.Event()
    opened = [asyncio.create_task(house.open(prompt)) for prompt in ("renders", "waits")]
    await asyncio.sleep(0.01)
    left, house.gone = house.gone, asyncio.Event()
    stays = asyncio.create_task(house.open("stays"))
    await asyncio.sleep(0.01)
    assert b"kvferry_render_queue 2.0" in (await house.ask("GET", "/metrics")).body
    left.set()
    assert {(one.status, one.kind) for one in await asyncio.gather(*opened)} == {(400, "client_gone")}
    house.frontend.gate.set()
    assert (await stays).status == 200
    await asyncio.sleep(0.01)
    assert len(house.front.table) == 1
    metrics = (await house.ask("GET", "/metrics")).body
    assert b"kvferry_render_queue 0.0" in metrics
    assert b'kvferry_render_refused_total{reason="client_gone"} 2.0' in metrics


async def test_an_opening_whose_client_left_at_its_end_is_not_kept() -> None:
    house = House()
    house.gone.set()
    assert (await house.open("a")).kind == "client_gone"
    await asyncio.sleep(0.01)
    assert len(house.front.table) == 0


async def test_a_session_that_has_ended_keeps_its_last_reply_and_not_its_requests() -> None:
    gc.collect()
    before = len(HELD)
    house = House()
    name = await house.name("a", "b")
    assert len(HELD) == before + 2
    first = await house.feed(name, 0, chunk(0, 1, end="stop"))
    gc.collect()
    assert len(HELD) == before + 1
    last = await house.feed(name, 1, chunk(1, 1, end="stop"))
    gc.collect()
    assert len(HELD) == before
    assert (last.headers["x-kvferry-state"], len(house.front.table)) == ("done", 1)
    assert (await house.feed(name, 1, chunk(1, 1, end="stop"))).body == last.body != first.body


async def test_a_router_that_dies_leaves_nothing_behind() -> None:
    house = House(session_ttl_s=60)
    name = await house.name("a")
    assert json.loads((await house.ask("GET", f"/v1/sessions/{name}")).body)["state"] == "open"
    house.clock.now = 61
    house.front.sweep()
    await asyncio.sleep(0.01)
    assert house.frontend.ended == ["cancelled"]
    assert (await house.ask("GET", f"/v1/sessions/{name}")).kind == "session_unknown"
    metrics = (await house.ask("GET", "/metrics")).body
    assert b"kvferry_render_sessions_expired_total 1.0" in metrics
    assert b"kvferry_render_sessions_open 0.0" in metrics


async def test_keys_are_asked_for_where_the_frontend_asks_for_them() -> None:
    house = House(keys=("one", "two"))
    name = await house.name("a", authorization="Bearer one")
    for given in ({}, {"authorization": "Bearer three"}, {"authorization": "one"}):
        for path in ("settings", name):
            refused = await house.ask("GET", f"/v1/sessions/{path}", **given)
            assert (refused.status, refused.kind) == (401, "unauthorized")
    for key in ("one", "two"):
        assert (await house.ask("GET", f"/v1/sessions/{name}", authorization=f"Bearer {key}")).status == 200


async def test_an_opening_without_a_key_takes_no_place_and_is_the_frontends_to_refuse() -> None:
    house = House(keys=("one",), small_at_once=1, max_queue=0, max_sessions=1)
    house.frontend.key = b"one"
    house.frontend.gate = asyncio.Event()
    first = asyncio.create_task(house.open("a", authorization="Bearer one"))
    await asyncio.sleep(0.01)
    for more in ({}, {"background": True}):
        refused = await house.open("b", more=more, authorization="Bearer two")
        assert (refused.status, refused.body, refused.headers["x-kvferry-state"]) == (401, b"who?", "done")
    house.frontend.gate.set()
    assert (await first).status == 200
    house.frontend.key = b""
    refused = await house.open("b")
    assert (refused.status, refused.kind, refused.headers["x-kvferry-state"]) == (401, "unauthorized", "done")
    assert len(house.front.table) == 1


async def test_a_full_table_and_a_full_queue_say_when_to_come_again() -> None:
    house = House(max_sessions=1)
    await house.open("a")
    full = await house.open("b")
    assert (full.status, full.kind, full.headers["retry-after"]) == (429, "render_busy", "1")

    house = House(small_at_once=1, max_queue=0)
    house.frontend.gate = asyncio.Event()
    first = asyncio.create_task(house.open("a"))
    await asyncio.sleep(0.01)
    busy = await house.open("b")
    assert (busy.status, busy.kind, busy.headers["retry-after"]) == (429, "render_busy", "1")
    house.frontend.gate.set()
    assert (await first).status == 200


async def test_sizes_and_times_are_bounded() -> None:
    house = House(max_body_bytes=200, session_cpu_s=0.05)
    large = await house.open("a" * 300)
    assert (large.status, large.kind) == (413, "request_too_large")
    slow = await house.open("a", more={"burn": 0.1})
    assert (slow.status, slow.kind) == (400, "render_too_slow")
    assert len(house.front.table) == 0
    assert (await house.open("a", more={"burn": 0.01})).status == 200


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status", "kind"),
    [
        ("POST", "/v1/sessions", {}, b"{}", 400, "bad_header"),
        ("POST", "/v1/sessions", {"x_kvferry_path": "/v1/embeddings"}, b"{}", 400, "bad_header"),
        ("POST", "/v1/sessions", {"x_kvferry_path": "/v1/completions", "x_kvferry_said": "-1"}, b"", 400, "bad_header"),
        ("PUT", "/v1/sessions", {}, b"", 405, "method_not_allowed"),
        ("GET", "/v1/sessions/abc", {}, b"", 404, "session_unknown"),
        ("POST", "/v1/sessions/abc/tokens", {}, b"[]", 404, "session_unknown"),
        ("POST", "/v1/chat/completions", {}, b"{}", 404, "not_served_here"),
        ("POST", "/inference/v1/generate", {}, b"{}", 404, "not_served_here"),
    ],
)
async def test_bad_questions_get_one_clear_answer(
    method: str, path: str, headers: dict[str, str], body: bytes, status: int, kind: str
) -> None:
    asked = await House().ask(method, path, body, **headers)
    assert (asked.status, asked.kind) == (status, kind)


@pytest.mark.parametrize("field", ["use_beam_search", "background"])
async def test_requests_that_no_session_can_serve_are_refused(field: str) -> None:
    house = House()
    for true in (True, 1, 1.0, "1", "true", "T", "on", "Yes", "y", [], 2, "perhaps"):
        refused = await house.open("a", more={field: true})
        assert refused.status == 400
        assert field in json.loads(refused.body)["error"]["message"]
    for false in (None, False, 0, 0.0, "0", "false", "F", "off", "No", "n"):
        assert (await house.open("a", more={field: false})).status == 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"b\\u0061ckground": 1, "prompts": ["a"]}',
        b'{"background": 1, "temperature": NaN, "prompts": ["a"]}',
        '{"background": 1, "prompts": ["a"]}'.encode("utf-16"),
    ],
)
async def test_a_flag_is_found_however_the_body_is_written(body: bytes) -> None:
    asked = await House().ask("POST", "/v1/sessions", body, x_kvferry_path="/v1/responses")
    assert (asked.status, asked.kind) == (400, "BadRequestError")


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"[[0]]",
        b'[[1, {"choices": []}]]',
        b'[[0, {"choices": [{"index": 0, "token_ids": ["a"]}]}]]',
        b'[[0, {"choices": [{"index": 0, "token_ids": [1, 2], "logprobs": {"content": [{"token_id": 1,'
        b' "logprob": -1.0}]}}]}]]',
    ],
)
async def test_chunks_that_are_none_change_nothing(body: bytes) -> None:
    house = House()
    name = await house.name("a")
    bad = await house.ask("POST", f"/v1/sessions/{name}/tokens", body, x_kvferry_seq="0")
    assert (bad.status, bad.kind) == (400, "bad_chunks")
    assert said(await house.feed(name, 0, chunk(0, 1))) == [[0, 0, [1], None]]


async def test_other_sessions_have_their_turn_while_a_long_history_is_fed() -> None:
    house = House()
    long, short = await house.name("a"), await house.name("b")
    order: list[str] = []

    async def feed(name: str, label: str, *chunks: Any) -> None:
        await house.feed(name, 0, *chunks)
        order.append(label)

    history = [chunk(0, number + 10) for number in range(2000)]
    await asyncio.gather(feed(long, "long", *history), feed(short, "short", chunk(0, 1)))
    assert order == ["short", "long"]
