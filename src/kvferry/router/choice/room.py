"""Requests whose prompt is computed, until a decode engine has room for one: in the order in which they came.

Only who is bound late can wait here: nothing of it is on a decode engine yet, and whichever has room first takes it. In
a queue of one engine's it would wait for that engine, however slow. Owner: the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

LONGEST_S = 2.0
"""Then it goes into an engine's own queue: the prefill engine keeps its blocks for a lease only, and what an engine has
room for is an estimate."""


class Room:
    def __init__(self) -> None:
        self._waiting: deque[asyncio.Event] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, there: Callable[[], bool], limit_s: float = LONGEST_S) -> bool:
        """Returns in the step in which `there` said yes, or after so long: whether it did."""
        if not self._waiting and there():
            return True
        ticket = asyncio.Event()
        self._waiting.append(ticket)
        try:
            async with asyncio.timeout(limit_s):
                while self._waiting[0] is not ticket or not there():
                    await ticket.wait()
                    ticket.clear()
            return True
        except TimeoutError:
            return False
        finally:
            self._waiting.remove(ticket)
            self.freed()

    def freed(self) -> None:
        """Some engine has less to hold than before: the first may look again."""
        if self._waiting:
            self._waiting[0].set()
