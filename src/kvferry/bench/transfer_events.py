"""What the core tells about its posts, with times."""

from __future__ import annotations

import time
from typing import Any

from kvferry.bench.transfer_records import Posted
from kvferry.ids import TransferId
from kvferry.story import Story


class Events(Story):
    """A story that stays in memory, with the monotonic time of each event."""

    def __init__(self, side: str) -> None:
        super().__init__(None, side)
        self._lines: list[tuple[float, str, str, dict[str, Any]]] = []

    def note(self, transfer_id: TransferId | str, event: str, *, t: float | None = None, **facts: Any) -> None:
        self._lines.append((time.monotonic(), transfer_id, event, facts))

    def has(self, transfer_id: str, event: str) -> bool:
        return any((who, what) == (transfer_id, event) for _, who, what, _ in list(self._lines))

    def posts(self, transfer_id: str) -> list[Posted]:
        """In the order of posting. They may complete in any other, so an end belongs to the post that began then."""
        mine = [(t, what, facts) for t, who, what, facts in self._lines if who == transfer_id]
        ends = [(t, facts) for t, what, facts in mine if what in ("written", "read")]
        out = []
        for t, what, facts in mine:
            if what != "posted":
                continue
            began = t - facts["post_ms"] / 1e3
            end = min(ends, key=lambda one: abs(one[0] - one[1]["wire_ms"] / 1e3 - began))
            ends.remove(end)
            plan_s, post_s = facts["plan_ms"] / 1e3, end[1].get("post_ms", facts["post_ms"]) / 1e3
            out.append(Posted(facts["descriptors"], facts["nbytes"], plan_s, post_s, began, end[0]))
        return out

    def verify_s(self, transfer_id: str) -> float:
        """What the digests took here."""
        told = ("digested", "verified")
        spent = (facts["ms"] for _, who, what, facts in self._lines if who == transfer_id and what in told)
        return float(sum(spent)) / 1e3

    def clear(self) -> None:
        self._lines.clear()
