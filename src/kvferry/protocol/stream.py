"""Mode `stream`: which part of a prompt's KV can leave next, while prefill still runs. Pure: tokens and planes.

A prompt grows step by step: `Growth.tokens` have all their planes; of a step under way, tokens up to `part_end` have
the first `part_planes`. A registration takes from it in rectangles of tokens x planes (`Span`), each once, in order.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Tokens [start_token, end_token), planes [first_plane, end_plane). `end_plane` None: all the rest."""

    start_token: int
    end_token: int
    first_plane: int = 0
    end_plane: int | None = None


@dataclass(frozen=True)
class Pace:
    """How one registration's KV leaves, in tokens. `unit`: a chunk ends at a multiple of it (the larger block size),
    but for the last one. `least`: fewer are not worth a WRITE of their own while more will come. `most`: in one WRITE,
    not below `unit`. `token_bytes`: what one token has for this registration. `packed`: a block's tokens can't be told
    apart, so none leaves while prefill may write to it still.
    """

    unit: int = 1
    least: int = 1
    most: int = 1 << 40
    token_bytes: float = 0
    packed: bool = False


@dataclass
class Growth:
    """How far a prompt's KV has come. `sealed`: no more will come."""

    tokens: int = 0
    part_end: int = 0
    part_planes: int = 0
    sealed: bool = False

    def grow(self, tokens: int) -> None:
        """The first `tokens` tokens have all their planes."""
        self.tokens, self.part_end, self.part_planes = tokens, 0, 0

    def grow_part(self, end: int, planes: int) -> None:
        """Within a step: tokens up to `end` have their first `planes` planes, which are not all."""
        self.part_end, self.part_planes = end, planes


@dataclass
class Progress:
    """What one registration for tokens [`start`, `end`) has taken: everything up to `tokens`, and of the tokens from
    there to `part_end` the first `planes` planes."""

    start: int
    end: int
    pace: Pace
    tokens: int = 0
    part_end: int = 0
    planes: int = 0

    def __post_init__(self) -> None:
        self.rewind()

    def rewind(self) -> None:
        self.tokens, self.part_end, self.planes = self.start, 0, 0

    @property
    def complete(self) -> bool:
        return self.tokens >= self.end

    def behind(self, growth: Growth) -> int:
        """Bytes of tokens that have come, and whose planes were not all taken."""
        return int(max(0, min(growth.tokens, self.end) - self.tokens) * self.pace.token_bytes)

    def take(self, growth: Growth) -> Span | None:
        """The next rectangle to write, counted as taken; None: nothing worth a WRITE yet."""
        whole = self._bound(growth.tokens, only_full=self.pace.packed and not growth.sealed)
        if self.planes:
            return self._rest_of_part(growth, whole)
        if whole > self.tokens and (whole == self.end or growth.sealed or whole - self.tokens >= self.pace.least):
            start, self.tokens = self.tokens, min(whole, self._furthest())
            return Span(start, self.tokens)
        part = self._bound(growth.part_end)  # a group of planes is a fraction of the step: its tokens go at once
        if whole == self.tokens and growth.part_planes and part > self.tokens:
            self.part_end, self.planes = part, growth.part_planes
            return Span(self.tokens, part, 0, growth.part_planes)
        return None

    def _rest_of_part(self, growth: Growth, whole: int) -> Span | None:
        start, end, first = self.tokens, self.part_end, self.planes
        if whole >= end:
            self.tokens, self.planes = end, 0
            return Span(start, end, first)
        if growth.part_planes > first:
            self.planes = growth.part_planes
            return Span(start, end, first, growth.part_planes)
        return None

    def _furthest(self) -> int:
        """Where one WRITE ends at the latest."""
        end = self.tokens + self.pace.most
        return end - end % self.pace.unit

    def _bound(self, tokens: int, only_full: bool = False) -> int:
        """How far a chunk may go when so many tokens are there. `only_full`: with full blocks only."""
        if tokens >= self.end and not (only_full and self.end % self.pace.unit):
            return self.end
        tokens = min(tokens, self.end)
        return max(self.tokens, tokens - tokens % self.pace.unit)
