"""Deadlines by key. The caller brings the time (monotonic seconds, its own), so a test can bring any."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Deadlines(Generic[Key]):
    """At most one deadline per key. A live key in front never hides a lapsed one behind it. Not thread-safe."""

    def __init__(self) -> None:
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._count = 0

    def set(self, key: Key, due: float) -> None:
        """Set or renew. O(log n)."""
        self._due[key] = due
        self._count += 1
        heapq.heappush(self._heap, (due, self._count, key))
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._due):
            self._heap = [(due, i, key) for i, (key, due) in enumerate(self._due.items())]
            heapq.heapify(self._heap)

    def clear(self, key: Key) -> None:
        self._due.pop(key, None)

    def __contains__(self, key: Key) -> bool:
        return key in self._due

    def __len__(self) -> int:
        return len(self._due)

    def next_due(self) -> float | None:
        """The earliest deadline, None if there is none."""
        self._drop_stale()
        return self._heap[0][0] if self._heap else None

    def lapsed(self, now: float) -> list[Key]:
        """Remove and return every key whose deadline is at or before `now`, earliest first."""
        out: list[Key] = []
        while True:
            self._drop_stale()
            if not self._heap or self._heap[0][0] > now:
                return out
            key = heapq.heappop(self._heap)[2]
            del self._due[key]
            out.append(key)

    def _drop_stale(self) -> None:
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
