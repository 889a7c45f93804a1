"""One data-parallel rank of an engine, as far as choosing goes: its load, and what its prefix cache may hold."""

from __future__ import annotations

from kvferry.router.choice.ask import Ask
from kvferry.router.choice.cache import SentPrompts
from kvferry.router.choice.kv_events import CachedBlocks
from kvferry.router.choice.load import Load

SETTLE_S = 2.0
"""With KV events: a prompt sent so recently counts, though the engine has not stored it yet."""


class Rank:
    """`blocks`: by the engine's own events; None: it publishes none. `caches`: prefixes, as far as is known.
    `kv_tokens`: what its pool holds; 0: not known."""

    def __init__(self, prefix_tokens: int, events: bool) -> None:
        self.load = Load()
        self.sent = SentPrompts(prefix_tokens)
        self.blocks = CachedBlocks() if events else None
        self.caches = True
        self.kv_tokens = 0

    def matched(self, ask: Ask, lora: str = "") -> int:
        """Leading tokens of the prompt that it holds; less than all, since the last one is always computed."""
        prompt = ask.prompt
        if prompt is None or not prompt.tokens or not self.caches:
            return 0
        stored = self.blocks.matched(prompt, lora) if self.blocks is not None else None
        found = self.sent.matched(prompt) if stored is None else max(stored, self.sent.matched(prompt, SETTLE_S))
        return max(0, min(found * ask.tokens // prompt.tokens, ask.tokens - 1))

    def full(self, ask: Ask, lora: str = "") -> bool:
        """It would have to wait for blocks. A rank that does nothing takes anything."""
        over = self.load.taken + ask.tokens - self.kv_tokens
        return over > 0 and bool(self.kv_tokens and self.load.requests) and self.matched(ask, lora) < over

    def forget(self) -> None:
        """The engine began a new life."""
        self.sent.clear()
        if self.blocks is not None:
            self.blocks.clear()
