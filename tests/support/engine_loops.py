"""An engine loop of the transport-real engine without its server."""

from __future__ import annotations

import queue
import random
from collections.abc import Sequence
from typing import Any

from kvferry.engine.config import EngineConfig
from kvferry.engine.content import answer
from kvferry.engine.loop import EngineLoop
from kvferry.engine.profile import load
from kvferry.engine.request import Output, Request, Sampling

WAIT_S = 30.0


def config(profile: str = "instant", **changes: Any) -> EngineConfig:
    found = load(profile)
    limits = found.limits
    settings: dict[str, Any] = {
        "profile": found,
        "served_model_name": "sim",
        "num_blocks": limits.num_blocks,
        "block_size": limits.block_size,
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "vocab_size": limits.vocab_size,
    }
    return EngineConfig(**{**settings, **changes})


class LoopUnderTest:
    """`with`. Collects outputs by request."""

    def __init__(self, engine: EngineConfig) -> None:
        self.config = engine
        self._queue: queue.Queue[Output] = queue.Queue()
        self.loop = EngineLoop(engine, lambda outputs: [self._queue.put(output) for output in outputs] and None)
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, Output] = {}

    def __enter__(self) -> LoopUnderTest:
        self.loop.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.close()
        assert not self.loop._thread.is_alive()

    def ask(self, name: str, prompt: Sequence[int], max_tokens: int, **sampling: Any) -> None:
        self.tokens[name] = []
        settings = Sampling(max_tokens, **{"ignore_eos": True, **sampling})
        self.loop.add(Request(name, list(prompt), settings))

    def wait(self, *names: str) -> None:
        """Until these (or all) have ended."""
        wanted = set(names or self.tokens)
        while not wanted <= self.last.keys():
            self.take()

    def take(self) -> Output:
        output = self._queue.get(timeout=WAIT_S)
        self.tokens[output.request_id] += output.new_token_ids
        if output.finish_reason is not None:
            self.last[output.request_id] = output
        return output

    def right(self, prompt: Sequence[int], max_tokens: int, **how: Any) -> list[int]:
        shape = self.config.profile.shape
        cell = (shape.layers, shape.kv_heads, self.config.cell_bytes)
        return answer(prompt, max_tokens, cell, self.config.vocab_size, **how)


def prompts(count: int, seed: int, lengths: Sequence[int] = (1, 2, 15, 16, 17, 90, 300)) -> list[list[int]]:
    """Random ones, many of which begin alike."""
    draw = random.Random(seed)
    common = [draw.randrange(256, 30_000) for _ in range(300)]
    made = []
    for _ in range(count):
        own = [draw.randrange(256, 30_000) for _ in range(draw.choice(lengths))]
        made.append(common[: draw.choice([0, 0, 8, 16, 64, 200])] + own)
    return made
