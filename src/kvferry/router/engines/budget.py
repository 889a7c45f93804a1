"""How many tries may be made again: a share of the recent requests, so that an outage is not multiplied. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from kvferry.errors import ConfigError
from kvferry.router.engines.window import Window


class RetrySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    ratio: float = 0.2
    """At most this share of the window's requests is tried again: what an outage can add to the load of who is left."""
    floor: int = 10
    """And so many in any case: with few requests a share of them is nothing."""
    window_s: float = 10.0
    backoff_s: float = 0.05
    """Before the second try at most this, before the third twice, ...; drawn anew each time, from 0 up."""
    backoff_max_s: float = 1.0

    def check(self) -> None:
        """Raises `ConfigError`."""
        if not 0 <= self.ratio <= 1 or self.floor < 0:
            raise ConfigError(f"retry ratio {self.ratio}, floor {self.floor}", hint="expected 0 to 1, and 0 or more")
        if self.backoff_s < 0 or self.backoff_max_s < self.backoff_s or self.window_s <= 0:
            raise ConfigError("retry: backoff_s must be 0 or more, backoff_max_s not below it, window_s above 0")


class RetryBudget:
    def __init__(self, settings: RetrySettings) -> None:
        self._settings = settings
        self._window = Window(settings.window_s, 2)

    def request(self, now: float) -> None:
        self._window.add(now, 1.0, 0.0)

    def take(self, now: float) -> bool:
        """Leave for one more try; it is spent."""
        requests, retries = self._window.sums(now)
        if retries >= self._settings.floor + self._settings.ratio * requests:
            return False
        self._window.add(now, 0.0, 1.0)
        return True


def backoff_s(settings: RetrySettings, tries: int, draw: Callable[[], float] = random.random) -> float:
    """After so many tries: full jitter. `draw`: from [0, 1)."""
    return draw() * min(settings.backoff_max_s, settings.backoff_s * 2.0 ** min(tries - 1, 30))
