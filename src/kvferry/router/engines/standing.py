"""What requests have shown of one engine: its circuit breaker, and how its last requests went.

Owner: the event loop. `Leg` is one request at one engine: made when it is chosen, told what came of it, ended always.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvferry.router.engines.breaker import Breaker, BreakerSettings, State
from kvferry.router.engines.faults import Verdict
from kvferry.router.engines.outliers import OutlierSettings, Sample
from kvferry.router.engines.window import Window

Clock = Callable[[], float]


class Standing:
    """`clock`: seconds. `told` is called after each result."""

    def __init__(
        self,
        breaker: BreakerSettings,
        outliers: OutlierSettings,
        clock: Clock = time.monotonic,
        told: Callable[[], None] = lambda: None,
    ) -> None:
        self._breaker = Breaker(breaker)
        self._window = Window(outliers.window_s, 4)
        self._clock = clock
        self._told = told

    @property
    def state(self) -> State:
        return self._breaker.state(self._clock())

    @property
    def allows(self) -> bool:
        """A request may be sent there."""
        return self._breaker.allows(self._clock())

    @property
    def why_not(self) -> str:
        """Empty if it may."""
        if self.allows:
            return ""
        wait = self._breaker.open_for(self._clock())
        return f"its circuit is open for {wait:.0f} s more" if wait else "its circuit is half open: one request tries"

    def sample(self) -> Sample:
        good, bad, seconds, timed = self._window.sums(self._clock())
        return Sample(good=good, bad=bad, seconds=seconds, timed=timed)

    def begin(self) -> Leg:
        return Leg(self)

    def renewed(self) -> None:
        """The engine was gone and is back: what it did before says nothing of it now."""
        self._breaker.renewed()
        self._window.clear()


class Leg:
    def __init__(self, standing: Standing) -> None:
        self._standing = standing
        self._ticket = standing._breaker.take(standing._clock())
        self._settled = False

    def settle(self, verdict: Verdict, seconds: float | None = None) -> None:
        """A failure counts also after a success: a stream that broke. `seconds`: how long it took, of a success."""
        standing, now = self._standing, self._standing._clock()
        if verdict == "nothing" or (self._settled and verdict == "worked"):
            return
        self._settled = True
        if not standing._breaker.current(self._ticket):
            return
        if verdict == "worked":
            standing._breaker.worked(self._ticket, now)
            standing._window.add(now, 1.0, 0.0, seconds or 0.0, float(seconds is not None))
        else:
            standing._breaker.failed(self._ticket, now)
            standing._window.add(now, 0.0, 1.0)
        standing._told()

    def end(self) -> None:
        """Always, last: nothing more will come of it."""
        if not self._settled:
            self._settled = True
            self._standing._breaker.dropped(self._ticket)
