"""Edits of a stream's events in passing. An event that no edit is for leaves as the bytes that came."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable

from kvferry.router.requests.openai import Body

DONE = b"data: [DONE]"
MAX_HELD = 16 * 1024 * 1024
"""Bytes of one event that are held until it is whole. What is longer goes out as it came: only the whole text of an
answer, at the end of `/v1/responses`, comes near this."""
_BOUNDARY = re.compile(rb"\r?\n\r?\n")

Edit = Callable[[Body], bool | None]
"""Changes an event in place. True: changed; False: not; None: the client doesn't get it."""


class Edits:
    """Of one stream. `marker`: bytes that stand in every event that is to be edited, and in few others; b"": all are.
    `also`: another such mark, b"" if there is none.

    `prepare` is awaited once, before the first edit, and gives the edit; None: there is nothing to edit after all.
    `hold`: an event whose end hasn't come yet is kept until it has.
    """

    def __init__(
        self,
        marker: bytes,
        prepare: Callable[[], Awaitable[Edit | None]],
        *,
        hold: bool,
        drop_done: bool = False,
        also: bytes = b"",
    ) -> None:
        self._marker = marker
        self._also = also
        self._prepare = prepare
        self._hold = hold
        self._drop_done = drop_done
        self._edit: Edit | None = None
        self._ready = False
        self._held = b""

    def plain(self, chunk: bytes) -> bool:
        """Nothing waits and nothing in it is to be edited: it may go out as it is. For the hot path."""
        return not (self._held or self._marked(chunk)) and (not self._hold or chunk.endswith(b"\n\n"))

    def _marked(self, chunk: bytes) -> bool:
        return self._marker in chunk or (self._also != b"" and self._also in chunk)

    async def take(self, chunk: bytes) -> bytes:
        """What may go out now."""
        data, self._held = self._held + chunk, b""
        out, start = [], 0
        for found in _BOUNDARY.finditer(data):
            out.append(await self._event(data[start : found.start()], data[found.start() : found.end()]))
            start = found.end()
        rest = data[start:]
        if self._hold and len(rest) <= MAX_HELD and not rest.startswith(b":"):
            self._held = rest
        else:
            out.append(rest)
        return b"".join(out)

    def rest(self) -> bytes:
        """At the end of the stream: what was held, an event that never became whole."""
        held, self._held = self._held, b""
        return held

    async def _event(self, event: bytes, end: bytes) -> bytes:
        if self._drop_done and event.strip() == DONE:
            return b""
        if not self._marked(event):
            return event + end
        head, mark, payload = event.rpartition(b"data: ")
        if not mark or (head and not head.endswith(b"\n")):
            return event + end
        try:
            facts = json.loads(payload)
        except (ValueError, RecursionError):
            return event + end
        if not self._ready:
            self._edit, self._ready = await self._prepare(), True
        changed = self._edit(facts) if self._edit is not None and isinstance(facts, dict) else False
        if changed is None:
            return b""
        return head + mark + dump(facts) + end if changed else event + end


def dump(body: Body) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
