"""A request to stop, made from a signal handler and seen by whoever waits.

`set` may be called from a signal handler or another thread at any moment: it changes a number and writes one byte to
a pipe, takes no lock. All waiting of the launcher goes through `wait`, so a stop is seen at once and no poll spins.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeVar


class Stopped(BaseException):
    """The launcher was asked to stop. Not an Exception: nothing but the outermost frame may handle it."""


class Cancel:
    """`count` is how often a stop was asked for; a second time means 'at once'."""

    def __init__(self) -> None:
        self.count = 0
        self._lifeline = -1
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def set(self) -> None:
        self.count += 1
        try:
            os.write(self._write, b"x")
        except OSError:
            pass

    def wait(self, seconds: float) -> bool:
        """Wait at most so long; True if a stop was asked for."""
        if self.count == 0:
            watched = [self._read] + ([self._lifeline] if self._lifeline >= 0 else [])
            if self._lifeline in select.select(watched, [], [], max(0.0, seconds))[0]:
                self.count += 1
                self.forget_lifeline()
        return self.count > 0

    def check(self) -> None:
        if self.wait(0.0):
            raise Stopped

    def add_lifeline(self, fd: int) -> None:
        """Take the closing of this pipe's other end for a request to stop. -1: none."""
        self._lifeline = fd

    def forget_lifeline(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def pause(self, seconds: float) -> None:
        """Wait at most so long; raises Stopped when a stop was asked for."""
        self.wait(seconds)
        self.check()

    def catch_signals(self) -> None:
        """From here on SIGINT, SIGTERM and SIGHUP ask for a stop instead of ending this process."""

        def handler(number: int, frame: FrameType | None) -> None:
            self.set()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, handler)


T = TypeVar("T")


def interruptible(cancel: Cancel, work: Callable[[], T]) -> T:
    """The result of `work`, done in a thread so that a stop is seen meanwhile. After a stop the thread is left to end
    by itself: its engine is gone then, so what it waits for fails.
    """
    results: list[T] = []
    failures: list[Exception] = []

    def target() -> None:
        try:
            results.append(work())
        except Exception as error:  # noqa: BLE001 - raised again below, by the thread that asked
            failures.append(error)

    thread = threading.Thread(target=target, name="kvferry-interruptible", daemon=True)
    thread.start()
    while thread.is_alive():
        cancel.check()
        thread.join(0.05)
    if failures:
        raise failures[0]
    return results[0]
