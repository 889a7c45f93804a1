"""What the processes of a soak hold: memory while they run, descriptors and threads when nothing does.

A *life* is one process from its start to its end. Its memory is flat if, after a warm-up, a line through its samples
rises by at most `RISE` of its level and `RISE_BYTES` together from the first of them to the last.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from kvferry.launch.process import ManagedProcess
from kvferry.launch.tree import members

RISE, RISE_BYTES = 0.03, 6 << 20
WARM_UP = 0.3
"""Share of a life, and at least `WARM_UP_S`, that is not judged: caches and tables of ended transfers fill up."""
WARM_UP_S = 60.0
SHORTEST_S = 180.0
"""Lives that are shorter have no slope worth the name."""
MORE_FDS, MORE_THREADS = 16, 2
"""Idle, beside what was there idle at the start: connections that are kept, a thread of the runtime's."""


@dataclass(frozen=True)
class Held:
    rss: int
    fds: int
    threads: int


@dataclass
class Life:
    name: str
    pid: int
    begun: float
    samples: list[tuple[float, int]] = field(default_factory=list)

    def verdict(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"name": self.name, "pid": self.pid, "judged": False}
        if not self.samples:
            return facts
        seconds = self.samples[-1][0] - self.begun
        facts |= {"seconds": round(seconds, 1), "rss_mib_last": round(self.samples[-1][1] / 2**20, 1)}
        kept = [one for one in self.samples if one[0] - self.begun >= max(WARM_UP_S, WARM_UP * seconds)]
        if seconds < SHORTEST_S or len(kept) < 10:
            return facts
        times, sizes = zip(*kept, strict=True)
        slope = statistics.linear_regression(times, sizes).slope
        rise, limit = slope * (times[-1] - times[0]), RISE * statistics.median(sizes) + RISE_BYTES
        facts |= {
            "judged": True,
            "rss_mib_median": round(statistics.median(sizes) / 2**20, 1),
            "slope_mib_per_minute": round(slope * 60 / 2**20, 3),
            "rise_mib": round(rise / 2**20, 2),
            "limit_mib": round(limit / 2**20, 2),
            "flat": rise <= limit,
        }
        return facts


class Watch:
    """Thread of whoever calls. `processes` may be started again at any time."""

    def __init__(self, processes: Sequence[ManagedProcess]) -> None:
        self._processes = processes
        self._lives: dict[tuple[str, int], Life] = {}

    def sample(self) -> None:
        for process in self._processes:
            held = holdings(process)
            if held is None:
                continue
            life = self._lives.setdefault(
                (process.name, process.pid), Life(process.name, process.pid, time.monotonic())
            )
            life.samples.append((time.monotonic(), held.rss))

    def verdicts(self) -> list[dict[str, Any]]:
        return [life.verdict() for life in self._lives.values()]

    def now(self) -> dict[str, Held]:
        found = {process.name: holdings(process) for process in self._processes}
        return {name: held for name, held in found.items() if held is not None}


def holdings(process: ManagedProcess) -> Held | None:
    """Of its whole tree; None if it is dead."""
    if not process.running():
        return None
    rss = fds = threads = 0
    try:
        for one in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
            rss, fds, threads = rss + one.memory_info().rss, fds + one.num_fds(), threads + one.num_threads()
    except psutil.Error:
        return None
    return Held(rss, fds, threads)


def grown(before: Mapping[str, Held], after: Mapping[str, Held]) -> list[str]:
    """In words. An engine that was started again is measured by what it held in its first life."""
    found = []
    for name, now in after.items():
        then = before[name]
        if now.fds > then.fds + MORE_FDS:
            found.append(f"{name} has {now.fds} descriptors open when idle, {then.fds} at the start")
        if now.threads > then.threads + MORE_THREADS:
            found.append(f"{name} has {now.threads} threads when idle, {then.threads} at the start")
    return found


def left_running(processes: Sequence[ManagedProcess]) -> list[str]:
    return [f"process {one.pid} was left running" for one in members([process.tree for process in processes])]
