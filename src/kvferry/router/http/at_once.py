"""Steps of tasks without a pass of the event loop before them: in a busy loop each pass is other requests' work.

Both are for callbacks of the loop's own, a protocol's `data_received` above all.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

Result = TypeVar("Result")


class Now(asyncio.Future[None]):
    """What one task waits for, and goes on from within `tell`. Owner: the event loop."""

    def __init__(self) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self._waiting: tuple[Callable[[Any], object], contextvars.Context | None] | None = None

    def tell(self) -> None:
        """A second time does nothing."""
        if self.done():
            return
        self.set_result(None)
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        go_on, context = waiting
        if asyncio.current_task() is not None:  # no step within another
            self.get_loop().call_soon(go_on, self, context=context)
        elif context is None:
            go_on(self)
        else:
            context.run(go_on, self)

    def add_done_callback(self, fn: Callable[[Any], object], /, *, context: contextvars.Context | None = None) -> None:
        assert self._waiting is None, "one task waits"
        if self.done():
            super().add_done_callback(fn, context=context)
        else:
            self._waiting = fn, context

    def cancel(self, msg: Any | None = None) -> bool:
        waiting, self._waiting = self._waiting, None
        cancelled = super().cancel(msg)
        if cancelled and waiting is not None:
            self.get_loop().call_soon(waiting[0], self, context=waiting[1])
        return cancelled


if sys.version_info >= (3, 12):

    def begin(work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """A task that runs at once, up to its first wait."""
        return asyncio.Task(work, loop=asyncio.get_running_loop(), eager_start=True)

else:
    from asyncio.tasks import _enter_task, _leave_task

    def begin(work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """A task that runs at once, up to its first wait. One that ended there is done in the loop's next pass."""
        loop, begun = asyncio.get_running_loop(), _Begun(work)
        task, outer = loop.create_task(begun), asyncio.current_task()
        if outer is not None:
            _leave_task(loop, outer)
        _enter_task(loop, task)
        try:
            begun.first()
        finally:
            _leave_task(loop, task)
            if outer is not None:
                _enter_task(loop, outer)
        return task

    class _Begun(Coroutine[Any, Any, Result]):
        """A coroutine whose first step is made ahead: whoever asks for that gets what came of it."""

        def __init__(self, work: Coroutine[Any, Any, Result]) -> None:
            self._work = work
            self._ahead = True
            self._waits_for: Any = None
            self._ended: BaseException | None = None

        def first(self) -> None:
            try:
                self._waits_for = self._work.send(None)
            except BaseException as end:  # noqa: BLE001 - StopIteration too: its task gets it
                self._ended = end

        def send(self, value: Any) -> Any:
            if not self._ahead:
                return self._work.send(value)
            return self._taken()

        def throw(self, *error: Any) -> Any:
            if self._ahead:
                self._taken()
            return self._work.throw(*error)

        def _taken(self) -> Any:
            self._ahead = False
            waits_for, self._waits_for = self._waits_for, None
            ended, self._ended = self._ended, None
            if ended is not None:
                raise ended
            return waits_for

        def close(self) -> None:
            self._work.close()

        def __await__(self) -> Generator[Any, Any, Result]:
            return self._work.__await__()
