"""Turns of what may wait a moment, a few in each pass of the event loop.

All streams of an engine bring a token at the same time, with its step. Were each passed on in the callback that read
it, a request or a first token that came with them would wait for all of those; so it waits for a few, and the others
for their turns. A stream that reads again before its turn passes both pieces on in one write, so a router with more to
do has less of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

AT_ONCE = 4
"""Some 20 microseconds each."""


class Turns:
    """In the order in which they were asked for; the first few at once. Owner: the event loop.

    `clock`: the loop's. uvloop's stands still within a pass, and for a millisecond.
    """

    def __init__(self, clock: Callable[[], float] = lambda: asyncio.get_running_loop().time()) -> None:
        self._clock = clock
        self._asked: deque[Callable[[], None]] = deque()
        self._now = -1.0
        self._left = 0

    def ask(self, turn: Callable[[], None]) -> None:
        if not self._asked:
            now = self._clock()
            if now != self._now:
                self._now, self._left = now, AT_ONCE
            if self._left:
                self._left -= 1
                turn()
                return
            asyncio.get_running_loop().call_soon(self._some)
        self._asked.append(turn)

    def _some(self) -> None:
        try:
            for _ in range(min(AT_ONCE, len(self._asked))):
                self._asked.popleft()()
        finally:  # whatever one of them does, the others go on
            if self._asked:
                asyncio.get_running_loop().call_soon(self._some)
