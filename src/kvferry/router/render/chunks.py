"""D's stream of tokens, cut into the chunks that a render session is fed with. Pure; parses what it must.

An event's payload goes on as the bytes that came. The first chunk of each request carries what P's reply says.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from kvferry.errors import EngineError
from kvferry.router.render.answers import facts
from kvferry.router.replies import LegFailed
from kvferry.router.requests.edits import dump
from kvferry.router.requests.openai import Body

MAX_EVENT = 64 * 1024 * 1024
"""Bytes of one event that are held until it is whole: a token with all of its logprobs is far below."""
_CRLF = re.compile(rb"\r\n?")
_UNENDED = b'"finish_reason":null'


_encode = msgspec.json.Encoder().encode


class _Whole(msgspec.Struct):
    choices: msgspec.Raw
    usage: Body | None = None
    prompt_logprobs: list[Any] | None = None


class Chunks:
    """Of one request, the one of this index. `facts`: of P; see `answers.facts`. `n`: its choices."""

    def __init__(self, index: int, n: int, url: str) -> None:
        self._index, self._n, self._url = index, n, url
        self._held = b""
        self._facts = b""
        self._ended: set[int] = set()
        self.done = False
        """The stream said that it is at its end."""
        self.error: LegFailed | None = None
        """What it said went wrong. The session is told, which ends its answer as an engine would."""

    def tell(self, facts: Body) -> None:
        """To go with the next chunk."""
        self._facts = dump(facts)[1:-1] if facts else b""

    @property
    def over(self) -> bool:
        """All of its choices have ended, by their own or by a stop string: what D still makes nobody reads."""
        return len(self._ended) >= self._n

    def stop(self, choice: int) -> None:
        self._ended.add(choice)

    def take(self, piece: bytes) -> list[bytes]:
        """Entries of the session's next request. Raises `LegFailed` for what are none."""
        data = self._held + piece
        if b"\r" in data:
            data = _CRLF.sub(b"\n", data)
        *events, self._held = data.split(b"\n\n")
        if len(self._held) > MAX_EVENT:
            raise self._failed(f"sent an event above {MAX_EVENT} bytes")
        entries: list[bytes] = []
        for event in events:
            if event.startswith(b"data: ") and b"\n" not in event:
                payload = event[6:]
            else:
                lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
                payload = b"\n".join(lines)
            if payload == b"[DONE]":
                self.done = True
            elif payload:
                entries.append(self._entry(payload))
        return entries

    def whole(self, body: bytes, *, alone: bool) -> list[bytes]:
        """The answer of a D that was not asked for a stream, as one chunk. What only P knows stands in it as null,
        unless D was alone: then it is D's."""
        self.done = True
        try:
            answer = msgspec.json.decode(body, type=_Whole)
        except msgspec.DecodeError:
            raise self._failed("answered 200 with what is no answer to a generate request") from None
        if alone:
            told = {"usage": answer.usage, "prompt_logprobs": answer.prompt_logprobs}
            self.tell(facts(told, scores=answer.prompt_logprobs is not None))
        return [self._entry(_encode({"choices": answer.choices, "usage": answer.usage}))]

    def _entry(self, payload: bytes) -> bytes:
        if not payload.startswith(b"{"):
            raise self._failed("sent an event that is no JSON object")
        if b'"error"' in payload:
            self._check(payload)
        if self._n > 1 and _UNENDED not in payload:
            self._mark(payload)
        if self._facts:
            facts, self._facts = self._facts, b""
            rest = payload[1:]
            payload = b"{" + facts + (b"," if rest.lstrip() != b"}" else b"") + rest
        return b"[%d,%b]" % (self._index, payload)

    def _check(self, payload: bytes) -> None:
        event = self._parsed(payload)
        error = event.get("error")
        if error is None or "choices" in event:
            return
        code = error.get("code") if isinstance(error, dict) else None
        status = code if isinstance(code, int) and 400 <= code <= 599 else 502
        self.error = LegFailed(
            f"decode engine {self._url} answered with an error event",
            side="decode",
            peer=self._url,
            status=status,
            body=payload,
        )

    def _mark(self, payload: bytes) -> None:
        choices = self._parsed(payload).get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict) and choice.get("finish_reason") is not None:
                self._ended.add(choice.get("index", 0))

    def _parsed(self, payload: bytes) -> dict[str, Any]:
        try:
            return msgspec.json.decode(payload, type=dict[str, Any])
        except msgspec.DecodeError:
            raise self._failed("sent an event that is no JSON object") from None

    def _failed(self, what: str) -> LegFailed:
        message = f"decode engine {self._url} {what}"
        return LegFailed(message, side="decode", peer=self._url, cause=EngineError(message))
