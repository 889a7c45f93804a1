"""What a render worker answers, and the failures that are its own. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from multidict import CIMultiDict

from kvferry.errors import KVFerryError
from kvferry.router.replies import LegFailed, Refusal
from kvferry.router.requests.openai import Body

PREFIX = "x-kvferry-"
"""Of the session protocol's own headers: they are the router's, both ways."""
SIDE = "render"


class RenderUnavailable(KVFerryError):
    http_status = 503
    code = "render_unavailable"


class WorkerLost(Exception):
    """It gave no answer that can be used; the text says what happened. Another one may.

    `again`: the answer may only have been lost on its way. `lives`: it is the session that is gone, not the worker.
    `reached`: it had the request. `late`: it may only be busy.
    """

    def __init__(
        self,
        message: str,
        *,
        again: bool = False,
        lives: bool = False,
        reached: bool = True,
        late: bool = False,
    ) -> None:
        super().__init__(message)
        self.again, self.lives, self.reached, self.late = again, lives, reached, late


class Final(msgspec.Struct, frozen=True, kw_only=True):
    """An answer for which no engine is asked. `headers`: the protocol's own are left out."""

    status: int
    headers: CIMultiDict[str]
    body: bytes


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """`worker`: the address of the one process that has the session. `requests`: bodies of `/inference/v1/generate`."""

    session: str
    worker: str
    requests: list[Body]


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """`body`: bytes for the client. `done`: there are no more. `stopped`: (request, choice) that a stop string ended.
    `events`: said since the beginning. `status` 0: no bytes have come yet."""

    body: bytes
    done: bool
    stopped: list[tuple[int, int]]
    events: int
    status: int = 0
    content_type: str = ""
    created: str = ""


class Full(Refusal):
    """A worker's table has no room for another session."""

    def __init__(self, worker: str, retry_after: str) -> None:
        super().__init__(429, "render_overloaded", f"render worker {worker} has no room for a session")
        self.retry_after_s = int(retry_after) if retry_after.isdecimal() else 1


def refused(worker: str, status: int, body: bytes, content_type: str) -> LegFailed:
    """The worker's own word on a session that goes on no longer (too much CPU time, and the like)."""
    said = _message(body)
    message = f"render worker {worker} answered {status}" + (f": {said}" if said else "")
    return LegFailed(message, side=SIDE, peer=worker, status=status, body=body, content_type=content_type)


def _message(body: bytes) -> str:
    try:
        facts = msgspec.json.decode(body)
        said = facts["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return ""
    return said[:300] if isinstance(said, str) else ""


def opened_of(raw: bytes, base: str) -> Opened:
    """Raises `WorkerLost`. `base`: where it was asked; an address of its own that names no host gets that one's."""
    try:
        opened = msgspec.json.decode(raw, type=Opened)
    except msgspec.DecodeError as error:
        raise WorkerLost(f"opened a session in words that aren't understood: {error}") from None
    if not opened.session.isascii() or not opened.session.replace("-", "").replace("_", "").isalnum():
        raise WorkerLost(f"named its session {opened.session[:100]!r}")
    if not opened.requests:
        raise WorkerLost("opened a session without a request")
    return msgspec.structs.replace(opened, worker=opened.worker.rstrip("/") or base)


def said_of(headers: Mapping[str, str], body: bytes) -> Said:
    """Raises `WorkerLost` for an answer that is none of the protocol."""
    state = headers.get("X-Kvferry-State", "")
    events, status = headers.get("X-Kvferry-Events", "0"), headers.get("X-Kvferry-Status", "0")
    if state not in ("open", "done") or not events.isdecimal() or not status.isdecimal():
        raise WorkerLost(f"answered with state {state[:20]!r}, events {events[:20]!r}, status {status[:20]!r}")
    return Said(
        body=body,
        done=state == "done",
        stopped=_stopped(headers.get("X-Kvferry-Stop", "")),
        events=int(events),
        status=int(status),
        content_type=headers.get("X-Kvferry-Content-Type", ""),
        created=headers.get("X-Kvferry-Created", ""),
    )


def joined(parts: Sequence[Said]) -> Said:
    """Of requests of one session, at least one, in their order."""
    first = next((one for one in parts if one.status), parts[0])
    return msgspec.structs.replace(
        parts[-1],
        body=b"".join(one.body for one in parts),
        stopped=[pair for one in parts for pair in one.stopped],
        status=first.status,
        content_type=first.content_type,
        created=first.created,
    )


def _stopped(text: str) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    for one in filter(None, (part.strip() for part in text.split(","))):
        request, _, choice = one.partition(".")
        if not (request.isdecimal() and choice.isdecimal()):
            raise WorkerLost(f"named a stopped choice {one[:20]!r}")
        pairs.append((int(request), int(choice)))
    return pairs


def facts(prefill: Mapping[str, Any] | None, *, scores: bool, block: int = 0) -> Body:
    """What P's reply says that D cannot know, by a chunk's names. `scores`: of the prompt, asked for. `block`: tokens
    of one of P's, where it caches prompts: whole ones stay in its cache, which no reply about token ids says.
    """
    if prefill is None:
        return {}
    out: Body = {}
    usage = prefill.get("usage")
    prompt = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    if isinstance(cached, int):
        out["num_cached_tokens"] = cached
        if block and isinstance(prompt, int):
            out["num_cache_creation_tokens"] = max(0, prompt // block * block - cached)
    if scores:
        out["prompt_logprobs"] = prefill.get("prompt_logprobs")
    return out
