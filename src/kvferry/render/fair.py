"""Turns for work of unequal size: who is small is never behind more than a few that are big."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class QueueFull(Exception):
    """As many wait as may."""


class Lane:
    """First come, first served, `at_once` at a time."""

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        self.running = 0
        self.waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        if self.running < self.at_once:
            self.running += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            else:
                self.waiting.remove(turn)
            raise

    def leave(self) -> None:
        while self.waiting:
            turn = self.waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1


class FairQueue:
    """Two lanes. Work runs interleaved (one event loop), so a small one shares with `big_at_once` big ones at most,
    however many of them wait. Loop thread only.
    """

    def __init__(self, *, big_bytes: int, small_at_once: int, big_at_once: int, most_waiting: int) -> None:
        self._big_bytes = big_bytes
        self._small = Lane(small_at_once)
        self._big = Lane(big_at_once)
        self._most_waiting = most_waiting

    @property
    def waiting(self) -> int:
        return len(self._small.waiting) + len(self._big.waiting)

    @asynccontextmanager
    async def turn(self, nbytes: int) -> AsyncIterator[None]:
        """Waits for its turn. Raises `QueueFull` at once when it would have to and `most_waiting` do already."""
        lane = self._big if nbytes >= self._big_bytes else self._small
        if lane.running >= lane.at_once and self.waiting >= self._most_waiting:
            raise QueueFull
        await lane.enter()
        try:
            yield
        finally:
            lane.leave()
