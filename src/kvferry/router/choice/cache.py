"""What an engine's prefix cache is thought to hold, by what it was sent. Owner: the event loop."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from kvferry.router.requests.prompt import BLOCK_TOKENS, Prompt


class SentPrompts:
    """Keys of the prompts that one rank was sent, the least recently used forgotten beyond `tokens`. As in an engine, a
    prompt loses its end before its beginning."""

    def __init__(self, tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = max(1, tokens // BLOCK_TOKENS)
        self._clock = clock
        self._when: OrderedDict[int, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._when)

    def sent(self, prompt: Prompt) -> None:
        now = self._clock()
        for key in reversed(prompt.block_keys()):
            self._when[key] = now
            self._when.move_to_end(key)
        while len(self._when) > self._most:
            self._when.popitem(last=False)

    def matched(self, prompt: Prompt, within_s: float | None = None) -> int:
        """Leading tokens of `prompt` that were sent here (in the last seconds only, if that is said)."""
        when, count = self._when, 0
        since = -float("inf") if within_s is None else self._clock() - within_s
        for key in prompt.block_keys():
            if key not in when or when[key] <= since:
                break
            count += 1
        return count * BLOCK_TOKENS

    def resize(self, tokens: int) -> None:
        self._most = max(1, tokens // BLOCK_TOKENS)

    def clear(self) -> None:
        self._when.clear()
