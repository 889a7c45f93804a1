"""Sums over the last seconds, in slots. Pure: the time comes in, and may not go backwards by more than a slot."""

from __future__ import annotations

from collections import deque


class Window:
    """`width` sums over the last `seconds`, forgotten in `slots` parts."""

    def __init__(self, seconds: float, width: int, slots: int = 10) -> None:
        self._slot_s = seconds / slots
        self._slots = slots
        self._width = width
        self._rows: deque[tuple[int, list[float]]] = deque()

    def add(self, now: float, *amounts: float) -> None:
        index = self._forget(now)
        if not self._rows or self._rows[-1][0] < index:
            self._rows.append((index, [0.0] * self._width))
        row = self._rows[-1][1]
        for place, amount in enumerate(amounts):
            row[place] += amount

    def sums(self, now: float) -> tuple[float, ...]:
        self._forget(now)
        return tuple(sum(row[place] for _, row in self._rows) for place in range(self._width))

    def clear(self) -> None:
        self._rows.clear()

    def _forget(self, now: float) -> int:
        index = int(now // self._slot_s)
        while self._rows and self._rows[0][0] <= index - self._slots:
            self._rows.popleft()
        return index
