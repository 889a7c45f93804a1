"""The sessions of one worker: bounded, and gone when nobody asks for them any more."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

KEEP_DONE_S = 30.0
"""A session that has ended stays this long, so that a reply that was lost can be had again."""


class Kept(Protocol):
    @property
    def done(self) -> bool: ...

    def cancel(self) -> None:
        """End it; nobody will ask for it again. Idempotent."""


T = TypeVar("T", bound=Kept)


class TableFull(Exception):
    """As many sessions are open as may be."""


class SessionTable(Generic[T]):
    """Ordered by when each was last asked for. `clock` in seconds. Loop thread only."""

    def __init__(self, *, most: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self._most = most
        self._ttl_s = ttl_s
        self._clock = clock
        self._kept: OrderedDict[str, tuple[T, float]] = OrderedDict()
        self.expired = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[T]:
        return (session for session, _ in self._kept.values())

    def check_room(self) -> None:
        """Raises `TableFull`. One that has ended makes room."""
        if len(self._kept) < self._most:
            return
        for name, (session, _) in self._kept.items():
            if session.done:
                del self._kept[name]
                return
        raise TableFull

    def add(self, session: T) -> str:
        """Raises `TableFull`."""
        self.check_room()
        name = secrets.token_hex(16)
        self._kept[name] = (session, self._clock())
        return name

    def get(self, name: str) -> T | None:
        """The session, which lives on from now; None if there is none, or it has expired."""
        entry = self._kept.get(name)
        if entry is None:
            return None
        session, asked = entry
        if self._clock() - asked > self._limit(session):
            self._expire(name)
            return None
        self._kept[name] = (session, self._clock())
        self._kept.move_to_end(name)
        return session

    def remove(self, name: str) -> None:
        entry = self._kept.pop(name, None)
        if entry is not None:
            entry[0].cancel()

    def sweep(self) -> None:
        """Let go of all whose time is over. They lie in the order of their last use, with two limits among them."""
        now = self._clock()
        late = []
        for name, (session, asked) in self._kept.items():
            if now - asked <= min(self._ttl_s, KEEP_DONE_S):
                break
            if now - asked > self._limit(session):
                late.append(name)
        for name in late:
            self._expire(name)

    def clear(self) -> None:
        for name in list(self._kept):
            self.remove(name)

    def _limit(self, session: T) -> float:
        return min(self._ttl_s, KEEP_DONE_S) if session.done else self._ttl_s

    def _expire(self, name: str) -> None:
        session = self._kept[name][0]
        if not session.done:
            self.expired += 1
        self.remove(name)
