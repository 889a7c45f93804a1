"""What the router and a render worker say to each other: headers, chunks of D's streams, errors. Nothing here imports
vllm.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

PREFIX = "/v1/sessions"
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Routes of vLLM's that a session can be opened for."""
ANOTHER_TIER = ("use_beam_search", "background")
"""Members of a request that, unless false, ask for more than one generation, or for one that outlives its reply."""

PATH_HEADER = b"x-kvferry-path"
SAID_HEADER = b"x-kvferry-said"
CREATED_HEADER = b"x-kvferry-created"
SEED_HEADER = b"x-kvferry-seed"
SEQ_HEADER = b"x-kvferry-seq"
OURS = b"x-kvferry-"

CREATED = re.compile(rb'"(created|created_at)":(\s*)(\d+)(\.\d+)?')
"""Quotes inside of a JSON string are escaped, so this is a key of the event, never the model's text."""

Headers = list[tuple[bytes, bytes]]


class LogProb(msgspec.Struct, gc=False):
    token_id: int
    logprob: float
    rank: int | None = None


class Position(LogProb, gc=False):
    """The sampled token of one position, and the likeliest, the sampled one among them."""

    top_logprobs: list[LogProb] = []


class LogProbs(msgspec.Struct):
    content: list[Position] | None = None


class PromptLogProb(msgspec.Struct):
    logprob: float
    rank: int | None = None


class Choice(msgspec.Struct):
    index: int = 0
    token_ids: list[int] | None = None
    logprobs: LogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Chunk(msgspec.Struct):
    """One event of D's stream. The last three are P's, put in by the router, once. `error`: D's stream failed."""

    choices: list[Choice] = []
    error: dict[str, Any] | None = None
    prompt_logprobs: list[dict[str, PromptLogProb] | None] | None = None
    num_cached_tokens: int | None = None
    num_cache_creation_tokens: int | None = None


class _AnotherTier(msgspec.Struct):
    """Of a request. `ANOTHER_TIER` by name."""

    use_beam_search: Any = None
    background: Any = None


_FALSE = (None, False, 0, "0", "off", "f", "false", "n", "no")
"""What vLLM's models take for false, or for not said."""
_another_tier = msgspec.json.Decoder(_AnotherTier)
_chunks = msgspec.json.Decoder(list[tuple[int, Chunk]])
_encode = msgspec.json.Encoder().encode


class Refused(Exception):
    """Ends one exchange with an error in vLLM's form. `retry_after` in seconds."""

    def __init__(self, status: int, kind: str, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.retry_after = retry_after

    def body(self) -> bytes:
        return _encode({"error": {"message": str(self), "type": self.kind, "param": None, "code": self.status}})


def decode_chunks(body: bytes, requests: int) -> list[tuple[int, Chunk]]:
    """The body of a `tokens` request. Raises `Refused`."""
    try:
        chunks = _chunks.decode(body)
    except msgspec.DecodeError as error:
        raise Refused(400, "bad_chunks", f"tokens: expected [[request, chunk], ...]: {error}") from None
    for index, chunk in chunks:
        if not 0 <= index < requests:
            raise Refused(400, "bad_chunks", f"tokens: this session has requests 0 to {requests - 1}, got {index}")
        for choice in chunk.choices:
            sampled = choice.logprobs and choice.logprobs.content
            if sampled and len(sampled) != len(choice.token_ids or ()):
                said = f"{len(sampled)} logprobs for {len(choice.token_ids or ())} tokens"
                raise Refused(400, "bad_chunks", f"tokens: request {index}, choice {choice.index}: {said}")
    return chunks


def opened(session: str, worker: str, requests: Sequence[bytes]) -> bytes:
    return _encode({"session": session, "worker": worker, "requests": [msgspec.Raw(body) for body in requests]})


def encode(value: Any) -> bytes:
    return _encode(value)


def number(headers: dict[bytes, bytes], name: bytes, default: int | None) -> int | None:
    """A header that is a whole number from 0 up. Raises `Refused`."""
    raw = headers.get(name)
    if raw is None:
        return default
    if not raw.isdigit() or len(raw) > 18:
        raise Refused(400, "bad_header", f"{name.decode()}: {raw.decode('latin-1')!r} is no whole number from 0 up")
    return int(raw)


def refuse_other_tiers(body: bytes) -> None:
    """Requests that no session can serve. Raises `Refused`; bodies that are no JSON object are vLLM's to judge."""
    try:
        asked = msgspec.structs.asdict(_another_tier.decode(body))
    except (msgspec.DecodeError, RecursionError):
        # What vLLM reads of a body is more than JSON: NaN, other encodings.
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError):
            return
        if not isinstance(asked, dict):
            return
    for name in ANOTHER_TIER:
        value = asked.get(name)
        if (value.lower() if isinstance(value, str) else value) not in _FALSE:
            raise Refused(400, "BadRequestError", f"{name}: not served through the render tier")
