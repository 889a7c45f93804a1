"""CPU time of one session's tasks on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Generator
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

T = TypeVar("T")


class Meter:
    """Seconds of this thread. What runs in other threads (a tokenizer's) is not in it."""

    __slots__ = ("cpu_s",)

    def __init__(self) -> None:
        self.cpu_s = 0.0


CURRENT: ContextVar[Meter | None] = ContextVar("kvferry_render_meter", default=None)


class Metered(Coroutine[Any, Any, T]):
    """A coroutine whose steps are timed."""

    __slots__ = ("_inner", "_meter")

    def __init__(self, inner: Coroutine[Any, Any, T], meter: Meter) -> None:
        self._inner = inner
        self._meter = meter

    def send(self, value: Any) -> Any:
        began = time.thread_time()
        try:
            return self._inner.send(value)
        finally:
            self._meter.cpu_s += time.thread_time() - began

    def throw(self, *error: Any) -> Any:
        began = time.thread_time()
        try:
            return self._inner.throw(*error)
        finally:
            self._meter.cpu_s += time.thread_time() - began

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._inner.__await__()


def install(loop: asyncio.AbstractEventLoop) -> None:
    """From now on the loop meters every task that is started where `CURRENT` is set."""

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        context = options.get("context")
        meter = CURRENT.get() if context is None else context.get(CURRENT)
        if meter is not None and asyncio.iscoroutine(coroutine) and not isinstance(coroutine, Metered):
            coroutine = Metered(coroutine, meter)
        return asyncio.Task(coroutine, loop=loop, **options)

    loop.set_task_factory(make)


def spawn(coroutine: Coroutine[Any, Any, T], meter: Meter) -> asyncio.Task[T]:
    """A task of its own context, metered; with all that it starts where `install` has been called."""
    context = copy_context()
    context.run(CURRENT.set, meter)
    return asyncio.get_running_loop().create_task(Metered(coroutine, meter), context=context)
