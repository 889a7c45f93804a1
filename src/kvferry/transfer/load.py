"""What a rank has open: for leak checks, for whoever asks on its side channel, and for its engine's metrics.

The core's owner thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sized

from kvferry.protocol.landing import Landings
from kvferry.protocol.rendezvous import Rendezvous
from kvferry.transfer.stats import Levels, Recorder

_EVERY_S = 0.01
"""While the fabric is driven without a sleep, levels are told this often."""


class Load:
    """`openings`: requests whose prefill engine isn't connected yet. `clock`: monotonic seconds."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        landings: Landings,
        openings: Sized,
        posts: Sized,
        recorder: Recorder,
        clock: Callable[[], float],
    ) -> None:
        self._rendezvous, self._landings, self._openings, self._posts = rendezvous, landings, openings, posts
        self._recorder, self._clock = recorder, clock
        self._told_at = clock()

    def counts(self) -> dict[str, int]:
        return {
            "sources": self._rendezvous.open_count(),
            "landings": self._landings.open_count() + len(self._openings),
            "posts": len(self._posts),
        }

    def levels(self) -> Levels:
        return Levels(
            **self.counts(),
            backlog_bytes=self._rendezvous.backlog_bytes(),
            quarantined_blocks=self._rendezvous.quarantined_blocks() + self._landings.quarantined_blocks(),
        )

    def tell(self, sleep_s: float | None = None) -> None:
        """Before a sleep of so long (None: for ever, or the engine hears of something now)."""
        now = self._clock()
        if sleep_s is None or sleep_s > _EVERY_S or now - self._told_at >= _EVERY_S:
            self._told_at = now
            self._recorder.level(self.levels())
