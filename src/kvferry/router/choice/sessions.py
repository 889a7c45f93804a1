"""Sessions: which engine each was sent to last. Owner: the event loop."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

HEADER = "X-Session-ID"
FIELDS = ("session_id", "user_id", "user")
TTL_S = 2 * 3600.0
"""Of a session that nobody uses; each request starts it anew."""
MOST = 100_000
"""Sessions that are remembered; the one unused for longest goes first."""
MOST_LENGTH = 512
"""Characters of a name; a longer one is no session, or one client could fill the memory."""


def session_of(headers: Mapping[str, str], body: Mapping[str, Any]) -> str:
    """The header, then `session_params.session_id`, then `session_id`, `user_id`, `user`; "" where none is a name."""
    params = body.get("session_params")
    inner = params.get("session_id") if isinstance(params, dict) else None
    for value in (headers.get(HEADER), inner, *(body.get(field) for field in FIELDS)):
        if isinstance(value, str) and 0 < len(value) <= MOST_LENGTH:
            return value
    return ""


class Sessions:
    """Session -> role -> URL."""

    def __init__(self, ttl_s: float = TTL_S, most: int = MOST, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s, self._most, self._clock = ttl_s, most, clock
        self._known: OrderedDict[str, tuple[float, dict[str, str]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def last(self, session: str, role: str) -> str:
        """The URL, "" if none is known."""
        until, places = self._known.get(session, (0.0, {}))
        return places.get(role, "") if self._clock() < until else ""

    def keep(self, session: str, role: str, url: str) -> None:
        if not session:
            return
        now = self._clock()
        until, places = self._known.pop(session, (0.0, {}))
        self._known[session] = (now + self._ttl_s, {**(places if now < until else {}), role: url})
        while len(self._known) > self._most or next(iter(self._known.values()))[0] <= now:
            self._known.popitem(last=False)

    def finish(self, session: str) -> bool:
        """Forget it; whether it was known."""
        until, _ = self._known.pop(session, (0.0, {}))
        return self._clock() < until
