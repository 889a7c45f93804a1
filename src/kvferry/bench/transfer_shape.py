"""What a measured transfer moves: the KV of one rank of a model, and where its blocks lie in each side's pool."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import ConfigError, unknown_name

_ELEMENT_BYTES = 2  # BF16
Order = Literal["LBHNC", "BLHNC"]
"""Of layers, blocks, heads, tokens and the rest in memory, as vLLM names it: the blocks of a layer adjoin, or the
layers of a block do."""

_FOUR = re.compile(r"(\d+)x(\d+)x(\d+)x(\d+)")


@dataclass(frozen=True)
class Shape:
    """Of one rank. `heads`: KV heads that it stores. `block_size`: tokens."""

    layers: int
    heads: int
    head_size: int
    block_size: int

    @property
    def cell_bytes(self) -> int:
        """K and V of one token of one head of one layer, which lie together."""
        return 2 * self.head_size * _ELEMENT_BYTES

    @property
    def block_bytes(self) -> int:
        """Of one block, all layers and heads."""
        return self.layers * self.heads * self.block_size * self.cell_bytes

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


PRESETS = {
    "qwen3-32b-tp8": Shape(64, 1, 128, 16),
    "llama-70b-tp8": Shape(80, 1, 128, 16),
    "smollm2": Shape(30, 3, 64, 16),
}
"""Llama: 3.1-70B. smollm2: SmolLM2-135M, one rank."""


def shape_named(text: str) -> Shape:
    """A preset, or 'LxHxDxBLOCK'. Raises `ConfigError`."""
    if text in PRESETS:
        return PRESETS[text]
    found = _FOUR.fullmatch(text)
    if found is None and not re.search(r"\d+x\d+", text):
        raise unknown_name("--shape", text, [*PRESETS, "LxHxDxBLOCK"])
    if found is None or not all(int(part) for part in found.groups()):
        hint = "expected LxHxDxBLOCK: layers x KV heads of the rank x head size x tokens per block, such as 64x1x128x16"
        raise ConfigError(f"--shape: {text!r}", hint=hint)
    return Shape(*map(int, found.groups()))


def pool_blocks(blocks: int) -> int:
    """How large a pool is in which so many blocks may lie scattered."""
    return blocks + max(16, blocks // 4)


def table(random: np.random.Generator, blocks: int, fragmentation: float) -> NDArray[np.int64]:
    """(blocks,) int64: ids within `pool_blocks(blocks)`, all different.

    A block's successor lies elsewhere than right behind it with the probability `fragmentation`: 0 makes one run, 1 no
    two neighbours. Runs lie in random order, with the rest of the pool spread between them.
    """
    cuts = np.concatenate(([True], random.random(blocks - 1) < fragmentation, [True]))
    ends = np.flatnonzero(cuts)
    lengths = np.diff(ends)
    runs = len(lengths)
    while True:
        order = random.permutation(runs)  # of the runs, as they lie in the pool
        gaps = np.zeros(runs + 1, dtype=np.int64)
        gaps[1:-1] = order[1:] == order[:-1] + 1  # two that follow each other in the table must not touch
        spare = pool_blocks(blocks) - blocks - int(gaps.sum())
        if spare >= 0:
            break
    gaps += random.multinomial(spare, np.full(runs + 1, 1 / (runs + 1)))
    lying = lengths[order]
    first = np.empty(runs, dtype=np.int64)
    first[order] = np.cumsum(gaps[:-1]) + np.concatenate(([0], np.cumsum(lying)[:-1]))
    within = np.arange(blocks) - np.repeat(ends[:-1], lengths)
    result: NDArray[np.int64] = np.repeat(first, lengths) + within
    return result
