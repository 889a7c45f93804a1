"""Watches a stream of server-sent events go by: where the first data is, whether it ended. Never changes a byte."""

from __future__ import annotations

import json
import re

_MAX_FIRST_LINE = 1024 * 1024
_TAIL = 32
_OPENING = re.compile(rb"event:\s*response\.(created|queued|in_progress)\s*$")
"""What `/v1/responses` says before there is a token: no proof of anything."""


class Watcher:
    """Fed with the bytes of one stream in any cuts. Keeps at most the first data line and the last few bytes."""

    def __init__(self) -> None:
        self.first_data: bytes | None = None
        """The payload of the first `data:` line that a token made, once it is complete, else None."""
        self._head = b""
        self._before = self._last = b""
        self._opening = False

    def feed(self, chunk: bytes) -> bool:
        """True when this chunk completed the first data line."""
        self._before, self._last = (self._last, chunk) if len(chunk) >= _TAIL else (self._tail, chunk)
        if self.first_data is not None:
            return False
        lines = (self._head + chunk).replace(b"\r\n", b"\n").split(b"\n")
        self._head = lines.pop()
        for line in lines:
            if line.startswith(b"event:"):
                self._opening = _OPENING.match(line) is not None
            elif line.startswith(b"data:") and not self._opening:
                return self._found(line)
        if self._opening:
            return False
        if self._head.startswith(b"data:") and len(self._head) > _MAX_FIRST_LINE:
            return self._found(self._head)
        return False

    def _found(self, line: bytes) -> bool:
        self.first_data = line[5:].strip()
        self._head = b""
        return True

    @property
    def _tail(self) -> bytes:
        return (self._before[-_TAIL:] + self._last[-_TAIL:])[-_TAIL:]

    @property
    def done(self) -> bool:
        """The stream's last event was `[DONE]`."""
        return self._tail.rstrip().endswith(b"data: [DONE]")

    @property
    def between_events(self) -> bool:
        """Nothing of a further event has been seen yet."""
        return not self._tail or self._tail.endswith((b"\n\n", b"\r\n\r\n"))

    @property
    def first_is_error(self) -> bool:
        """The first event is an engine's error, not a token."""
        if self.first_data is None or not self.first_data.startswith(b"{") or b'"error"' not in self.first_data:
            return False
        try:
            event = json.loads(self.first_data)
        except (ValueError, RecursionError):
            return False
        return isinstance(event, dict) and "error" in event and "choices" not in event
