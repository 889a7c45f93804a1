"""One render worker as the router sees it. Owner: the event loop."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit, urlunsplit

UNSPECIFIED = ("0.0.0.0", "::", "")


class Worker:
    """`door`: the shared address behind which it was found; "" for one that was named."""

    def __init__(self, url: str, door: str = "") -> None:
        self.url, self.door = url, door
        self.ready = False
        self.reason = "not probed yet"
        self.unusable = False
        """Its settings are not those of the others."""
        self.sessions = 0
        """Open from this router."""
        self.settings: object | None = None
        self.silent_since: float | None = None

    @property
    def takes(self) -> bool:
        """Of new sessions: what it renders with is known then, and compared."""
        return self.ready and not self.unusable

    def well(self) -> None:
        self.ready, self.reason, self.silent_since = True, "", None

    def refused(self, reason: str) -> None:
        """It answers, with settings that aren't those of the others: what it told before counts no more."""
        self.ready, self.unusable, self.reason = False, True, reason
        self.settings = self.silent_since = None

    def ill(self, reason: str, now: float) -> None:
        self.ready, self.reason = False, reason
        self.silent_since = now if self.silent_since is None else self.silent_since


def own_address(told: str, base: str) -> str:
    """What a worker asked at `base` says of itself; where it listens on every address, the host is that of `base`."""
    parts, asked = urlsplit(told), urlsplit(base)
    if (parts.hostname or "") not in UNSPECIFIED:
        return told.rstrip("/")
    host = asked.hostname or ""
    host = f"[{host}]" if ":" in host else host
    return urlunsplit((asked.scheme, f"{host}:{parts.port}" if parts.port else host, "", "", ""))


def by_load(workers: Iterable[Worker], doors: frozenset[str], turn: int) -> list[Worker]:
    """Those that may take a session, the least loaded first, equal ones in turn. A shared address is asked only while
    nobody behind it is known: whom it leads to is the kernel's choice."""
    able = [one for one in workers if one.takes]
    behind = {one.door for one in able}
    able = [one for one in able if not (one.url in doors and one.url in behind)]
    start = turn % len(able) if able else 0
    return sorted(able[start:] + able[:start], key=lambda one: one.sessions)
