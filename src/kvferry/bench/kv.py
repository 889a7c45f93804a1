"""How many bytes of KV a prompt needs moved: of a real model's files, of a profile, or as told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvferry.bench import workload
from kvferry.bench.workload import ModelFacts
from kvferry.errors import ConfigError
from kvferry.launch.spec import arg_value, tensor_parallel


@dataclass(frozen=True)
class KvFacts:
    """`token_bytes`: K and V of one prompt token, all layers, over all decode ranks. `block_size`: tokens; None where
    it is not known, and moved bytes are then only known to be enough.
    """

    token_bytes: int
    block_size: int | None

    def needed(self, prompt_tokens: int) -> int:
        """Of all prompt tokens but the last, which decode computes itself for its logits."""
        return (prompt_tokens - 1) * self.token_bytes

    def expected(self, prompt_tokens: int) -> int:
        """What moves for one prompt: whole blocks."""
        if self.block_size is None:
            return self.needed(prompt_tokens)
        return -(-(prompt_tokens - 1) // self.block_size) * self.block_size * self.token_bytes

    def fits(self, moved: int, prompt_tokens: int) -> bool:
        if self.block_size is None:
            return moved >= self.needed(prompt_tokens)
        return moved == self.expected(prompt_tokens)


def of_profile(name: str, args: Sequence[str]) -> tuple[KvFacts, ModelFacts]:
    """Of an engine that takes its KV's shape from a profile; `args`: what decode engines are started with."""
    from kvferry.engine.profile import load

    profile = load(name)
    shape = profile.shape
    scale = _whole(args, "--byte-scale") or 1
    copies = max(1, tensor_parallel(args) // shape.kv_heads)
    token_bytes = shape.layers * shape.kv_heads * (shape.cell_bytes // scale) * copies
    words = ModelFacts(np.arange(profile.limits.vocab_size), token_bytes)
    return KvFacts(token_bytes, _whole(args, "--block-size") or profile.limits.block_size), words


def of_model(folder: Path, dtype: str, args: Sequence[str], block_size: int | None) -> tuple[KvFacts, ModelFacts]:
    """`block_size`: as the engines tell it."""
    words = workload.model_facts(folder, dtype, args)
    copies = max(1, tensor_parallel(args) // words.kv_heads)
    size = _whole(args, "--block-size") or block_size
    return KvFacts(words.kv_bytes * copies, size), words


def _whole(args: Sequence[str], name: str) -> int | None:
    text = arg_value(args, name)
    if text is None:
        return None
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{name}: {text!r} is not a whole number from 1 up")
    return int(text)
