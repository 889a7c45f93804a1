"""How one stream goes by: when its chunks came, and what its end says of tokens. Parses nothing on the way."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from kvferry.observe.histogram import Series

_TAIL = 8192
_DONE = b"data: [DONE]"
_USAGE = re.compile(rb'(?<!\\)"usage"\s*:\s*\{')
_PROMPT = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d+)')
_OUTPUT = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d+)')

Tokens = tuple[int | None, int | None]


class Pace:
    """`mark` is called for every read that is relayed: one clock read, a bisect for each chunk in it. `gaps`: asked
    once, when the engine has begun to answer, where to put the seconds between chunks.
    """

    __slots__ = ("_before", "_clock", "_gaps", "_observe", "_tail", "chunks", "first", "last")

    def __init__(self, gaps: Callable[[], Series], clock: Callable[[], float] = time.monotonic) -> None:
        self._gaps, self._clock = gaps, clock
        self._observe: Callable[[float], None] | None = None
        self.first = self.last = 0.0
        self.chunks = 0
        self._before = self._tail = b""

    def begin(self, chunk: bytes) -> None:
        """The first token is here."""
        if not self.chunks:
            self._tail = chunk
            self._observe = self._start(self._clock())

    def _start(self, now: float) -> Callable[[float], None]:
        self.first = self.last = now
        self.chunks = 1
        return self._gaps().observe

    def mark(self, *chunks: bytes) -> None:
        """What one read brought of a running stream; the end mark on its own is no token."""
        self._before, self._tail = chunks[-2] if len(chunks) > 1 else self._tail, chunks[-1]
        count = len(chunks) - chunks[-1].startswith(_DONE)
        if not count:
            return
        now = self._clock()
        if self._observe is None:
            self._observe = self._start(now)
            count -= 1
        for _ in range(count):
            self._observe(now - self.last)
            self.last = now
        self.chunks += count

    def tokens(self) -> Tokens:
        return tokens_told(self._before + self._tail)

    def per_token(self, tokens: int | None) -> float | None:
        """Seconds from the first chunk to the last, over the tokens (where not known: the chunks) after the first."""
        after = (tokens or self.chunks) - 1
        return (self.last - self.first) / after if self.chunks > 1 and after > 0 else None


def tokens_told(tail: bytes) -> Tokens:
    """Prompt and output tokens of the last `usage` in the last 8 KiB of an answer; None where it has none.

    Text that a model wrote can't pass for it: inside of a JSON string its quotes are escaped.
    """
    tail = tail[-_TAIL:]
    ends = [found.end() for found in _USAGE.finditer(tail)]
    if not ends:
        return None, None
    prompt, output = (pattern.search(tail, ends[-1]) for pattern in (_PROMPT, _OUTPUT))
    return int(prompt[1]) if prompt else None, int(output[1]) if output else None
