"""The last requests, for the dashboard: a ring, so that after a year there are as many as after an hour."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvferry.router.seen.record import Record

MOST = 200
MOST_ERRORS = 50
_LONG = 300


class Recent:
    """Owner: the event loop."""

    def __init__(self, most: int = MOST, most_errors: int = MOST_ERRORS) -> None:
        self._records: deque[Record] = deque(maxlen=most)
        self._errors: deque[Record] = deque(maxlen=most_errors)

    def add(self, record: Record) -> None:
        self._records.append(record)
        if record.failed:
            self._errors.append(record)

    def since(self, number: int) -> list[Record]:
        """Those of a higher number, newest first."""
        return [record for record in reversed(self._records) if record.number > number]

    @property
    def errors(self) -> Sequence[Record]:
        """Newest first; they outlive the ring of all."""
        return list(reversed(self._errors))


def clipped(text: str | None) -> str:
    """What a client named, in a length that 200 of can be kept, and as text that can be written anywhere."""
    text = (text or "")[: _LONG + 1].encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _LONG else text[:_LONG] + "..."
