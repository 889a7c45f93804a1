"""The block pool of one engine: who holds which block, and which blocks a later prompt may find. Pure.

As in vLLM: blocks are taken from the front of a free list and given back at its end, the last block of a request first,
so a cached prompt loses its tail before its head; a free block keeps what it holds until it is taken.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """`fragmentation`: 0 is a fresh pool, whose free list counts upwards; F > 0 one that has served for long: from each
    block on the free list the chance that the next one is not its neighbour is F.
    """

    def __init__(self, num_blocks: int, fragmentation: float = 0.0, seed: int = 0) -> None:
        self.num_blocks = num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(_order(num_blocks, fragmentation, seed))
        self._holders = [0] * num_blocks
        self._block_of: dict[int, int] = {}
        self._key_of: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks, which lose what they held; None, and nothing changed, if there are fewer."""
        if count > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]
        return taken

    def find(self, keys: Iterable[int]) -> list[int]:
        """The blocks that hold these prefixes, up to the first that none holds. Changes nothing."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each."""
        for block in blocks:
            self._holders[block] += 1
            self._free.pop(block, None)

    def label(self, block: int, key: int) -> None:
        """From now on this block can be found by `key`: it is full and will not change."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def give_back(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free[block] = None


def _order(num_blocks: int, fragmentation: float, seed: int) -> list[int]:
    if not fragmentation:
        return list(range(num_blocks))
    draw = random.Random(seed)
    runs: list[list[int]] = [[]]
    for block in range(num_blocks):
        if runs[-1] and draw.random() < fragmentation:
            runs.append([])
        runs[-1].append(block)
    draw.shuffle(runs)
    return [block for run in runs for block in run]
