"""One prompt of a session: what vLLM's handler asks an engine for, and where its outputs come from."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from kvferry.render.wire import Choice, Chunk

if TYPE_CHECKING:
    from kvferry.render.session import Session

BREATH = 32
"""Outputs in a row before other sessions have their turn."""


class Item(NamedTuple):
    """One output of an engine: a choice's tokens of one chunk. `choice` None: the chunk is an error."""

    leg: int
    choice: Choice | None
    chunk: Chunk


Process = Callable[[Item], Iterable[int]]
"""Puts what an item comes to into `Leg.outbox`; returns the choices that a stop string ended."""


class Leg:
    """Between the generator that vLLM's handler iterates and the session. Outputs are never merged."""

    def __init__(self, session: Session, index: int) -> None:
        self.index = index
        self.outbox: deque[Any] = deque()
        self.ended = False
        self.failed = False
        self.process: Process | None = None
        self._session = session
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: Any) -> None:
        """What vLLM's output processor calls."""
        self.outbox.append(output)

    @property
    def waiting(self) -> bool:
        """The handler has had everything and asks for more."""
        return self._waiter is not None and not self._waiter.done()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def leave(self) -> None:
        """Make the handler's wait end as if it had been cancelled."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.cancel()

    async def outputs(self) -> AsyncIterator[Any]:
        """Each output once the one before has been consumed. Raises what was put as an exception."""
        given = 0
        while True:
            if given and given % BREATH == 0:
                await asyncio.sleep(0)
            output = self._session.advance(self)
            while output is None:
                self._waiter = asyncio.get_running_loop().create_future()
                self._session.look()
                try:
                    await self._waiter
                finally:
                    self._waiter = None
                output = self._session.advance(self)
            if isinstance(output, Exception):
                raise output
            given += 1
            yield output
