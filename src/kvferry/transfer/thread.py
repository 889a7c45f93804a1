"""The transfer thread of one worker, and its inline stand-in.

Threads: the engine's worker thread calls `submit`, `results`, `wait`, `close`; the transfer thread runs
`TransferCore.step` for ever and owns the core, the fabric and the side channel. Two one-way queues join them: commands
(engine -> transfer, in the core; each append wakes the transfer thread's poll) and results (transfer -> engine; each
append sets an event that `wait` sleeps on). Commands are taken up in order; every result is delivered exactly once.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from kvferry.errors import KVFerryError
from kvferry.transfer import commands as cmd
from kvferry.transfer.core import TransferCore
from kvferry.transfer.stats import TransferStats

log = logging.getLogger("kvferry.transfer")

OS_THREAD_NAME = "kvf-transfer"
"""As `top -H` shows it; the kernel takes at most 15 bytes."""

MakeCore = Callable[[Callable[[cmd.Result], None]], TransferCore]


class TransferThread:
    """Starts on construction. `make_core` runs on the caller's thread, so its errors are the caller's."""

    def __init__(self, make_core: MakeCore, name: str = "kvferry-transfer") -> None:
        self._results: deque[cmd.Result] = deque()
        self._arrived = threading.Event()
        self._stopping = False
        self._death: BaseException | None = None
        self._core = make_core(self._deliver)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, command: cmd.Command) -> None:
        self._core.submit(command)

    def pieces(self, nbytes: float, most: int) -> int:
        """Into how many pieces so much KV of one step should be cut."""
        return self._core.pieces(nbytes, most)

    def stats(self) -> TransferStats | None:
        """What happened since the last call, if anything."""
        return self._core.stats.take()

    def pending(self) -> bool:
        """Whether `results` has something to say."""
        return bool(self._results) or self._death is not None

    def results(self) -> list[cmd.Result]:
        """Everything that ended since the last call. Raises `KVFerryError` if the transfer thread died."""
        if self._death is not None:
            raise KVFerryError(f"the transfer thread died: {self._death!r}") from self._death
        self._arrived.clear()
        out = []
        while self._results:
            out.append(self._results.popleft())
        return out

    def wait(self, timeout_s: float) -> None:
        """Sleep until a result is there, at most `timeout_s`."""
        self._arrived.wait(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop, then close the core. Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        self._core.wake()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.error("the transfer thread did not stop within %g s; its memory stays registered", timeout_s)

    def _deliver(self, result: cmd.Result) -> None:
        self._results.append(result)
        self._arrived.set()

    def _run(self) -> None:
        _name_this_thread()
        try:
            while not self._stopping:
                self._core.step(None)
        except BaseException as death:
            # The engine thread re-raises it at its next look: an engine without its transfers must not go on.
            self._death = death
            self._arrived.set()
            raise
        finally:
            self._core.close()


def _name_this_thread() -> None:
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:  # Linux
        prctl(15, OS_THREAD_NAME.encode(), 0, 0, 0)  # PR_SET_NAME


class InlineTransfers:
    """The same interface, with all planning, posting and polling in the engine loop: every call of `results` runs one
    round of the core on the caller's thread. Today's way of pull, kept for comparison.

    An idle engine calls nothing, but its side channel must answer and its peers want to hear from it. So a keeper
    thread runs the core, under a lock, while the engine has not called for `_IDLE_S` and holds no transfer: it can
    neither post nor poll anything.
    """

    _IDLE_S = 0.25

    def __init__(self, make_core: MakeCore, name: str = "kvferry-keeper") -> None:
        self._results: deque[cmd.Result] = deque()
        self._core = make_core(self._results.append)
        self._lock = threading.Lock()
        self._called_at = time.monotonic()
        self._stop = threading.Event()
        self._death: BaseException | None = None
        self._thread = threading.Thread(target=self._keep, name=name, daemon=True)
        self._thread.start()

    def submit(self, command: cmd.Command) -> None:
        self._called_at = time.monotonic()
        self._core.submit(command)

    def pieces(self, nbytes: float, most: int) -> int:
        return 1  # all posting is done between steps

    def stats(self) -> TransferStats | None:
        """As `TransferThread.stats`."""
        return self._core.stats.take()

    def pending(self) -> bool:
        """Always: only `results` makes progress."""
        return True

    def results(self) -> list[cmd.Result]:
        if self._death is not None:
            raise KVFerryError(f"the keeper thread died: {self._death!r}") from self._death
        self._called_at = time.monotonic()
        if not self._lock.acquire(blocking=False):
            self._core.wake()  # the keeper sleeps in there
            self._lock.acquire()
        try:
            self._core.step(0.0)
        finally:
            self._lock.release()
        out = list(self._results)
        self._results.clear()
        return out

    def wait(self, timeout_s: float) -> None:
        """Nothing to sleep on: progress is made by `results` only."""

    def close(self, timeout_s: float = 5.0) -> None:
        if self._stop.is_set():
            return
        self._stop.set()
        self._core.wake()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.error("the keeper thread did not stop within %g s; its memory stays registered", timeout_s)
        else:
            self._core.close()

    def _keep(self) -> None:
        try:
            while not self._stop.wait(self._until_idle_s()):
                with self._lock:
                    if self._until_idle_s() == 0.0 and not self._stop.is_set():
                        self._core.step(None)
        except BaseException as death:
            self._death = death
            raise

    def _until_idle_s(self) -> float:
        if any(self._core.open_counts()[what] for what in ("sources", "landings", "posts")):
            return self._IDLE_S
        return max(0.0, self._called_at + self._IDLE_S - time.monotonic())


Transfers = TransferThread | InlineTransfers
