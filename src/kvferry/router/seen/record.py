"""What became of one request: the facts that its log line, the dashboard, the metrics and the spans are made of."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

_PLAIN = re.compile(r"[!#-~]+")
_LONG = 300
CLIENT_LEFT = "client_left"
"""The code of a request whose client didn't wait for its end."""


class Event(msgspec.Struct, frozen=True, array_like=True):
    """`t`: wall-clock seconds. `side`: who told it."""

    event: str
    side: str
    t: float


class Leg(msgspec.Struct, frozen=True, kw_only=True):
    """One transfer. `prefill` "": decode did all; `decode` "": was never chosen. `nbytes`: KV that engines said they
    posted, 0 where they didn't say.
    """

    transfer_id: str
    prefill: str = ""
    decode: str = ""
    events: list[Event]
    nbytes: int = 0


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """`t`: wall-clock seconds at the first byte in. `code` "": it went well. `ttft_ms` None: no token went out.
    `render`: the render worker that had it last, "" for none; `render_ms`: until it had given the token ids."""

    number: int
    t: float
    route: str
    mode: str
    status: int
    model: str | None = None
    stream: bool = False
    first_token: str = ""
    """Who made it: 'prefill', 'decode', "" where it took no pair."""
    request_id: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float
    retries: int = 0
    render: str = ""
    render_ms: float | None = None
    code: str = ""
    side: str = ""
    reason: str = ""
    legs: list[Leg] = []

    @property
    def failed(self) -> bool:
        """A client that left is no failure."""
        return self.code not in ("", CLIENT_LEFT)

    @property
    def transfer_ids(self) -> str:
        return ",".join(leg.transfer_id for leg in self.legs)

    def facts(self) -> dict[str, Any]:
        """For a structured log: numbers stay numbers, what isn't known is left out."""
        leg = self.legs[0] if self.legs else None
        facts = {
            "route": self.route,
            "status": self.status,
            "model": self.model,
            "stream": self.stream,
            "first_token": self.first_token,
            "prefill": leg.prefill if leg else "",
            "decode": leg.decode if leg else "",
            "transfer_id": self.transfer_ids,
            "request_id": self.request_id,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "ttft_ms": self.ttft_ms,
            "e2e_ms": self.e2e_ms,
            "retries": self.retries,
            "render": self.render,
            "render_ms": self.render_ms,
            "error": self.code,
            "side": self.side,
            "reason": self.reason,
        }
        return {key: value for key, value in facts.items() if value is not None and value != ""}

    def __str__(self) -> str:
        """The line of the text log."""
        parts = [self.route, f"status={self.status}"]
        if self.model:
            parts.append(f"model={_word(self.model)}")
        if self.stream:
            parts.append("stream=True")
        if self.legs:
            leg = self.legs[0]
            parts.append(f"prefill={leg.prefill or '-'} decode={leg.decode or '-'} transfer_id={self.transfer_ids}")
        if self.render:
            parts.append(f"render={self.render} render_ms={self.render_ms}")
        if self.request_id:
            parts.append(f"request_id={_word(self.request_id)}")
        if self.first_token == "prefill":
            parts.append("first_token=prefill")
        if self.ttft_ms is not None:
            parts.append(f"ttft_ms={self.ttft_ms}")
        parts.append(f"e2e_ms={self.e2e_ms}")
        prompt, output = self.prompt_tokens, self.completion_tokens
        if prompt is not None or output is not None:
            parts.append(f"tokens={'?' if prompt is None else prompt}+{'?' if output is None else output}")
        if self.retries:
            parts.append(f"retries={self.retries}")
        if self.code:
            side = f" side={self.side}" if self.side else ""
            parts.append(f"error={self.code}{side}" + (f" reason={_word(self.reason)}" if self.reason else ""))
        return " ".join(parts)


def _word(text: str) -> str:
    """One word, whatever a client put into it: the next field can't be forged."""
    if len(text) > _LONG:
        text = text[:_LONG] + "..."
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
