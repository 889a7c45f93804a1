"""Derendering one scripted stream, one token per call: by a session of ours, and by vLLM's stateless endpoint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from kvferry.bench.render_http import Answer, Line
from kvferry.bench.render_said import Piece, joined, piece_of, pieces_of
from kvferry.bench.render_servers import Server
from kvferry.errors import EngineError

CHAT = "/v1/chat/completions"


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Per token, of one pass. `calls`: how many were made, of how many a stream has. `most_us`: CPU time of the dearest
    call of a sample. `pieces`: one list per call made, keyed by the call's number."""

    cpu_us: float
    wall_us: float
    nbytes: float
    calls: int
    tokens: int
    most_us: float = 0.0
    pieces: dict[int, list[Piece]]


def chunk(ids: Sequence[int], last: bool) -> dict[str, Any]:
    """An event of an engine's token stream."""
    choice = {"index": 0, "token_ids": list(ids), "logprobs": None, "finish_reason": "length" if last else None}
    return {"request_id": "bench", "choices": [choice]}


def usage(prompt: int, completion: int) -> dict[str, Any]:
    """Its last event."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {"request_id": "bench", "choices": [], "usage": counts}


def by_session(server: Server, body: dict[str, Any], ids: Sequence[int]) -> tuple[Cost, list[int]]:
    """A session's cost, and the prompt's ids as it was told them. Opening it counts; raises `EngineError`."""
    encode = msgspec.json.encode
    pieces: dict[int, list[Piece]] = {}
    raw = encode(body)
    with Line(server.port) as line:
        cpu, begun = server.cpu_s(), time.perf_counter()
        opened = _fine(line.ask("POST", "/v1/sessions", raw, {"x-kvferry-path": CHAT}))
        facts = msgspec.json.decode(opened.body)
        (request,) = facts["requests"]
        prompt = request["token_ids"]
        at_open = line.moved
        where = f"/v1/sessions/{facts['session']}/tokens"
        replies: list[bytes] = []
        for number, token in enumerate(ids):
            feed = encode([[0, chunk([token], number == len(ids) - 1)]])
            replies.append(_fine(line.ask("POST", where, feed, {"x-kvferry-seq": str(number)})).body)
        end = encode([[0, usage(len(prompt), len(ids))]])
        ended = _fine(line.ask("POST", where, end, {"x-kvferry-seq": str(len(ids))}))
        wall, cpu = time.perf_counter() - begun, server.cpu_s() - cpu
        moved = line.moved - at_open
        if ended.headers.get("x-kvferry-state") != "done":
            raise EngineError(f"a session is not done after its last token: {ended.headers}")
    for number, reply in enumerate([*replies, ended.body]):
        pieces[number] = pieces_of(reply)
    count = len(ids)
    return (
        Cost(
            cpu_us=cpu * 1e6 / count,
            wall_us=wall * 1e6 / count,
            nbytes=moved / count,
            calls=count,
            tokens=count,
            pieces=pieces,
        ),
        prompt,
    )


class Stateless:
    """vLLM's endpoint, as its client: one call per token, all that it must be told with each."""

    def __init__(self, server: Server, body: dict[str, Any], prompt: Sequence[int], ids: Sequence[int]) -> None:
        self.server, self.ids = server, list(ids)
        self._fixed = {
            "stream": True,
            "model": body["model"],
            "prompt_tokens": len(prompt),
            "prompt_token_ids": list(prompt),
            "chat_request": body,
        }

    def whole(self) -> Cost:
        """Every call, its state carried from the one before."""
        state: Any = None
        pieces: dict[int, list[Piece]] = {}
        with Line(self.server.port) as line:
            cpu, begun = self.server.cpu_s(), time.perf_counter()
            for number in range(len(self.ids)):
                answered = self._call(line, number, state)
                state = answered["stream_state"]
                pieces[number] = [piece_of(answered["chunk"])]
            wall, cpu = time.perf_counter() - begun, self.server.cpu_s() - cpu
            moved = line.moved
        count = len(self.ids)
        return Cost(
            cpu_us=cpu * 1e6 / count,
            wall_us=wall * 1e6 / count,
            nbytes=moved / count,
            calls=count,
            tokens=count,
            pieces=pieces,
        )

    def sampled(self, calls: int, ours: dict[int, list[Piece]]) -> Cost:
        """`calls` of them, each in the middle of an equal part of the stream, so that their mean is the stream's. What
        each is told of the tokens before it is what `whole` would have carried there; whether calls of tools had
        begun by then is taken from `ours`.
        """
        count = len(self.ids)
        pieces: dict[int, list[Piece]] = {}
        used: list[float] = []
        with Line(self.server.port) as line:
            begun = time.perf_counter()
            for part in range(calls):
                number = int((part + 0.5) * count / calls)
                cpu = self.server.cpu_s()
                answered = self._call(line, number, self._state_at(number, ours))
                used.append(self.server.cpu_s() - cpu)
                pieces[number] = [piece_of(answered["chunk"])]
            wall = time.perf_counter() - begun
            moved = line.moved
        return Cost(
            cpu_us=sum(used) * 1e6 / calls,
            wall_us=wall * 1e6 / calls,
            nbytes=moved / calls,
            calls=calls,
            tokens=count,
            most_us=max(used) * 1e6,
            pieces=pieces,
        )

    def _state_at(self, number: int, ours: dict[int, list[Piece]]) -> dict[str, Any]:
        begun = joined(piece for before in range(number) for piece in ours[before]).calls
        return {
            "role_sent": number > 0,
            "output_token_ids": self.ids[:number],
            "output_chunk_lens": [1] * number,
            "tools_streamed": bool(begun),
            "last_tool_call_ids": [f"call-{index}" for index in range(len(begun))],
        }

    def _call(self, line: Line, number: int, state: Any) -> Any:
        last = number == len(self.ids) - 1
        body = self._fixed | {"generate_chunk": chunk([self.ids[number]], last), "stream_state": state}
        return msgspec.json.decode(_fine(line.ask("POST", f"{CHAT}/derender", msgspec.json.encode(body))).body)


def _fine(answer: Answer) -> Answer:
    if answer.status != 200:
        raise EngineError(f"a render server answered {answer.status}: {answer.body[:300].decode(errors='replace')}")
    return answer
