"""The circuit breaker of one engine. Pure: times come in, nothing is waited for.

closed -> open, after failures in a row or at an error rate; open -> half-open, after a time or when the engine is a new
process; half-open lets one request through at a time; -> closed after some successes, -> open at the first failure.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from kvferry.errors import ConfigError
from kvferry.router.engines.window import Window


class State(IntEnum):
    """The numbers are those of the metric."""

    CLOSED = 0
    OPEN = 1
    HALF_OPEN = 2


class BreakerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Only failures that are the engine's own count; `router/engines/faults.py` says which."""

    failures: int = 5
    """In a row, to open; 0: never opens."""
    error_rate: float = 0.5
    """Or so many of those in the window, to open."""
    volume: int = 20
    """Fewer requests in the window say nothing of a rate."""
    window_s: float = 30.0
    open_s: float = 30.0
    """Then one request may try. An engine that was not reachable and is again need not wait."""
    successes: int = 2
    """In a row while half-open, to close."""

    def check(self) -> None:
        """Raises `ConfigError`."""
        if self.failures < 0:
            raise ConfigError(f"breaker failures: {self.failures}", hint="expected 0 (never opens) or more")
        if not 0 < self.error_rate <= 1:
            raise ConfigError(f"breaker error_rate: {self.error_rate}", hint="expected above 0, at most 1")
        if self.open_s <= 0 or self.window_s <= 0 or self.successes < 1 or self.volume < 1:
            raise ConfigError("breaker: times, successes and volume must be above 0")


class Ticket(msgspec.Struct, frozen=True):
    """Leave to send one request. What becomes of it counts only in the era in which it was given."""

    era: int
    probe: bool


class Breaker:
    """`take` a ticket where `allows` said so, with nothing in between; then tell what became of it, once or more."""

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = settings
        self._state = State.CLOSED
        self._era = 0
        self._opened_at = 0.0
        self._bad_in_a_row = 0
        self._good_in_a_row = 0
        self._probing = False
        self._window = Window(settings.window_s, 2)

    def state(self, now: float) -> State:
        if self._state is State.OPEN and now >= self._opened_at + self._settings.open_s:
            return State.HALF_OPEN
        return self._state

    def open_for(self, now: float) -> float:
        """Seconds until a request may try; 0 if none need wait."""
        return self._opened_at + self._settings.open_s - now if self.state(now) is State.OPEN else 0.0

    def allows(self, now: float) -> bool:
        state = self.state(now)
        return state is State.CLOSED or (state is State.HALF_OPEN and not self._probing)

    def take(self, now: float) -> Ticket:
        if self.state(now) is not State.HALF_OPEN:
            return Ticket(self._era, False)
        if self._state is State.OPEN:
            self._enter(State.HALF_OPEN)
        self._probing = True
        return Ticket(self._era, True)

    def worked(self, ticket: Ticket, now: float) -> None:
        if ticket.era != self._era:
            return
        self._bad_in_a_row = 0
        self._window.add(now, 1.0, 0.0)
        if ticket.probe:
            self._probing = False
            self._good_in_a_row += 1
            if self._good_in_a_row >= self._settings.successes:
                self._enter(State.CLOSED)

    def failed(self, ticket: Ticket, now: float) -> None:
        if ticket.era != self._era:
            return
        self._bad_in_a_row += 1
        self._window.add(now, 0.0, 1.0)
        if ticket.probe or self._too_many(now):
            self._opened_at = now
            self._enter(State.OPEN)

    def dropped(self, ticket: Ticket) -> None:
        """It ended without saying anything of the engine: its client left, the other leg failed."""
        if ticket.era == self._era and ticket.probe:
            self._probing = False

    def renewed(self) -> None:
        """The engine was gone and is back: of an open circuit, one request may try at once."""
        self._enter(State.CLOSED if self._state is State.CLOSED else State.HALF_OPEN)

    def current(self, ticket: Ticket) -> bool:
        """What becomes of it counts."""
        return ticket.era == self._era

    def _too_many(self, now: float) -> bool:
        settings = self._settings
        if settings.failures == 0:
            return False
        if self._bad_in_a_row >= settings.failures:
            return True
        good, bad = self._window.sums(now)
        return good + bad >= settings.volume and bad >= settings.error_rate * (good + bad)

    def _enter(self, state: State) -> None:
        self._state = state
        self._era += 1
        self._bad_in_a_row = self._good_in_a_row = 0
        self._probing = False
        self._window.clear()
