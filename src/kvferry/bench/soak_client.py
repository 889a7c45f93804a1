"""One request of a soak, and what its end was: right, one typed error, given up by us, or a violation."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from kvferry.bench.client import TRANSFER_ID

Kind = Literal["right", "error", "left", "wrong", "untyped", "late", "broken"]
GOOD: tuple[Kind, ...] = ("right", "error", "left")
GRACE_S = 1.0
"""Beyond its bound a request may be open for this long."""
_GIVE_UP_S = 10.0


@dataclass(frozen=True)
class Ask:
    """`expected`: the token ids of a faultless answer to `prompt`."""

    prompt: Sequence[int]
    expected: Sequence[int]


@dataclass(frozen=True)
class How:
    """`leave_s`: the client goes away after so long; 0: it stays."""

    mode: str
    url: str
    model: str
    stream: bool
    leave_s: float
    bound_s: float


@dataclass
class Ending:
    kind: Kind = "broken"
    mode: str = ""
    seconds: float = 0.0
    status: int = 0
    code: str = ""
    transfer_id: str = ""
    detail: str = ""
    tokens: list[int] = field(default_factory=list)


async def ask(session: aiohttp.ClientSession, what: Ask, how: How) -> Ending:
    """Never raises for what the other side does."""
    ending, begun = Ending(mode=how.mode), time.monotonic()
    try:
        async with asyncio.timeout(how.leave_s or how.bound_s + _GIVE_UP_S):
            await _converse(session, what, how, ending)
    except TimeoutError:
        ending.kind = "left" if how.leave_s else "late"
    except (aiohttp.ClientError, OSError) as error:
        ending.kind, ending.detail = "broken", f"{type(error).__name__}: {error}"
    ending.seconds = time.monotonic() - begun
    if ending.kind in ("right", "error") and ending.seconds > how.bound_s + GRACE_S:
        ending.kind = "late"
    if ending.kind == "left" and not _begins(what.expected, ending.tokens):
        ending.kind = "wrong"
    return ending


async def _converse(session: aiohttp.ClientSession, what: Ask, how: How, ending: Ending) -> None:
    body = {"model": how.model, "prompt": list(what.prompt), "max_tokens": len(what.expected), "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, "stream": how.stream}
    async with session.post(f"{how.url}/v1/completions", json=body) as response:
        ending.status = response.status
        ending.transfer_id = response.headers.get(TRANSFER_ID, "")
        if response.status != 200:
            _error(await response.read(), ending)
        elif how.stream:
            await _read_stream(response, what, ending)
        else:
            facts = _object(await response.read())
            ending.tokens = _tokens(facts)
            _judge(what, ending)


async def _read_stream(response: aiohttp.ClientResponse, what: Ask, ending: Ending) -> None:
    ended = False
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            ended = True
            continue
        facts = _object(data)
        if "error" in facts:
            if ending.kind == "error":
                ending.kind, ending.detail = "untyped", "a second error event"
                return
            _error(data, ending)
        elif ending.kind != "error":
            ending.tokens += _tokens(facts)
    if ending.kind == "error" and not _begins(what.expected, ending.tokens):
        ending.kind, ending.detail = "wrong", f"before the error came {ending.tokens}"
    elif ending.kind == "broken" and not ended:
        ending.detail = f"the stream ended after {len(ending.tokens)} tokens without a word"
    elif ending.kind == "broken":
        _judge(what, ending)


def _judge(what: Ask, ending: Ending) -> None:
    if ending.tokens == list(what.expected):
        ending.kind = "right"
    else:
        ending.kind = "wrong"
        ending.detail = f"{len(what.prompt)} prompt tokens: {ending.tokens} instead of {list(what.expected)}"


def _error(raw: bytes, ending: Ending) -> None:
    """Typed: OpenAI's shape, with a code that is a word and a message."""
    error = _object(raw).get("error")
    code = error.get("code") if isinstance(error, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    ending.code = str(code)
    ending.detail = str(message)[:400] if message else raw[:400].decode(errors="replace")
    typed = isinstance(code, str) and code not in ("", "internal_error") and bool(message)
    ending.kind = "error" if typed else "untyped"


def _tokens(facts: dict[str, Any]) -> list[int]:
    choices = facts.get("choices") or [{}]
    return list(choices[0].get("token_ids") or [])


def _object(raw: bytes) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _begins(whole: Sequence[int], part: Sequence[int]) -> bool:
    return list(whole[: len(part)]) == list(part)
