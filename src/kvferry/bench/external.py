"""A load generator as a process of its own: under the launcher's watchdog, ended with its whole tree."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvferry.launch.cancel import Cancel
from kvferry.launch.guard import Guard
from kvferry.launch.process import ManagedProcess
from kvferry.launch.tree import end_trees

SAY_EVERY_S = 20.0


@contextmanager
def scratch(prefix: str) -> Iterator[tuple[Path, Guard]]:
    """A folder that is gone afterwards, even if this process is killed; and the watchdog that sees to it."""
    guard = Guard()
    try:
        with tempfile.TemporaryDirectory(prefix=prefix) as folder:
            guard.remove_later(folder)
            yield Path(folder), guard
    finally:
        guard.close()


def run(
    argv: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    guard: Guard,
    cancel: Cancel,
    progress: Callable[[str], None],
    *,
    limit_s: float,
) -> str:
    """Wait for its end; "" if it ended well, else how it ended. What it says goes to `log`. Raises `Stopped`."""
    process = ManagedProcess("the load generator", argv, env, log, guard)
    begun = said = time.monotonic()
    try:
        process.start()
        while process.running():
            cancel.pause(0.1)
            now = time.monotonic()
            if now - begun > limit_s:
                return f"the load generator did not end within {limit_s:.0f} s"
            if now - said > SAY_EVERY_S:
                said = now
                progress(f"running for {now - begun:.0f} s")
        return "" if process.poll() == 0 else process.died("while it ran").message
    finally:
        end_trees([process.tree], grace=lambda: 2.0, reap=process.poll)
        process.ended()
