"""Waiting for processes to answer, and the first requests through the whole path."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from kvferry.launch.cancel import Cancel, interruptible
from kvferry.launch.process import ManagedProcess, ProcessDied
from kvferry.launch.web import get_json, healthy, post_json

Report = Callable[[str], None]
SAY_EVERY_S = 5.0
NOTE_EVERY_S = 2.0  # shared memory of a process that dies later without a word can then be removed


def wait_healthy(
    processes: Sequence[ManagedProcess],
    urls: Mapping[str, str],
    *,
    timeout_s: float,
    report: Report,
    cancel: Cancel,
) -> dict[str, float]:
    """Wait until each of `urls` (by process name) answers /health; returns the seconds each took.

    ProcessDied at once when any of `processes` that was started has ended, or after `timeout_s`.
    """
    begun = said = noted = time.monotonic()
    took: dict[str, float] = {}
    while True:
        for process in processes:
            if process.pid and not process.running():
                raise process.died("while starting")
        now = time.monotonic()
        for name, url in urls.items():
            if name not in took and healthy(url):
                took[name] = now - begun
                report(f"{name}: ready after {took[name]:.0f} s")
        late = [process for process in processes if process.name in urls and process.name not in took]
        if not late:
            return took
        if now - begun > timeout_s:
            first = late[0]
            message = f"{first.name} does not answer after {timeout_s:.0f} s"
            raise ProcessDied(message, hint=f"its log: {first.log}", tail=first.lines())
        if now - noted >= NOTE_EVERY_S:
            noted = now
            for process in late:
                process.note_shm()
        if now - said >= (SAY_EVERY_S if now - begun < 20.0 else 2 * SAY_EVERY_S):
            said = now
            for process in late:
                report(f"{process.name}: loading {now - begun:.0f} s")
        cancel.pause(0.25)


def warm_up(url: str, rounds: int, *, report: Report, cancel: Cancel, timeout_s: float = 120.0) -> None:
    """Send `rounds` completions, short and long in turn: kernels, memory and connections are first used here.

    A thread asks, so that a stop is seen while an engine computes.
    """
    begun = time.monotonic()

    def ask() -> None:
        name = str(get_json(f"{url}/v1/models")["data"][0]["id"])
        for index in range(rounds):
            # Different from the first word on, so that no prefix cache makes the second round a no-op.
            words = " ".join(f"{index}-{number}" for number in range(12 if index % 2 == 0 else 120))
            body = {"model": name, "prompt": words, "max_tokens": 4, "temperature": 0.0}
            post_json(f"{url}/v1/completions", body, timeout_s=timeout_s)

    interruptible(cancel, ask)
    report(f"warm-up: {rounds} requests in {time.monotonic() - begun:.1f} s")
