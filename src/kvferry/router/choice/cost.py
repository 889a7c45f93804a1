"""What prefill and transfer were seen to cost: two straight lines, fitted as requests go by. Pure.

`prefill`: seconds of a prefill leg against the tokens that its engine had to compute until then, those that waited
before it included. `overhead`: seconds from the end of prefill to the first token of decode (what is left of the
transfer, and the second leg) against the tokens of the prompt.
"""

from __future__ import annotations

import msgspec

from kvferry.router.requests.prompt import BYTES_PER_TOKEN

LEAST = 5
"""Observations before a line says anything."""
FADE = 0.98
"""Weight of the last observation but one against the last: about 50 count."""


class Line:
    """y = a + b x, a and b not negative, of weighted observations of which older ones count less."""

    def __init__(self) -> None:
        self.seen = 0
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        self.seen += 1
        self._n = self._n * FADE + 1
        self._x = self._x * FADE + x
        self._y = self._y * FADE + y
        self._xx = self._xx * FADE + x * x
        self._xy = self._xy * FADE + x * y

    def fit(self) -> tuple[float, float] | None:
        """(a, b); None before there is enough to go by. Where all x are alike: through the origin."""
        if self.seen < LEAST:
            return None
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        through = self._xy / self._xx if self._xx else 0.0
        if spread <= 1e-4 * mean_x * mean_x or not self._xx:
            return (0.0, through) if self._xx else (mean_y, 0.0)
        slope = (self._xy / self._n - mean_x * mean_y) / spread
        if slope <= 0:
            return mean_y, 0.0
        start = mean_y - slope * mean_x
        return (start, slope) if start >= 0 else (0.0, through)

    def at(self, x: float) -> float | None:
        line = self.fit()
        return None if line is None else line[0] + line[1] * x


class Costs:
    """Of one router, all its engines together: where they differ it is the mean that counts."""

    def __init__(self) -> None:
        self.prefill = Line()
        self.overhead = Line()
        self._bytes = self._tokens = 0.0

    def told(self, nbytes: int, tokens: int) -> None:
        """An engine counted `tokens` in a prompt of `nbytes` bytes of text."""
        if nbytes and tokens > 0:
            self._bytes = self._bytes * FADE + nbytes
            self._tokens = self._tokens * FADE + tokens

    def tokens_of(self, nbytes: int) -> int:
        """An estimate."""
        width = self._bytes / self._tokens if self._tokens else float(BYTES_PER_TOKEN)
        return round(nbytes / width)

    def ttft_s(self, waiting: int, tokens: int, moved: int) -> float | None:
        """Seconds to the first token of a prompt with `tokens` to compute behind `waiting` others, and `moved` to be
        moved; None before anything was measured. Without a measured transfer: prefill alone."""
        prefill = self.prefill.at(waiting + tokens)
        return None if prefill is None else prefill + (self.overhead.at(moved) or 0.0)


class Estimate(msgspec.Struct, frozen=True):
    """Of one request, at the prefill engine that would have it first. `ttft_s` None: nothing was measured yet."""

    waiting: int
    ttft_s: float | None
