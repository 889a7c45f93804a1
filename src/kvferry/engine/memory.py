"""The KV memory of one rank: written and read as real bytes, laid out as vLLM's connector layout LBHNC.

Owned by the rank's engine thread; peers write to it through the fabric only where the connector lets them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.connector.blocks import Caches
from kvferry.engine.content import U64, coefficients, head_weights, weights
from kvferry.protocol.digest import mixed
from kvferry.protocol.messages import Layout, Plane

_AT_ONCE = 1 << 18
"""Bytes that `sums` gathers before it adds them up, so that they are still in the cache then."""


class KvMemory:
    """(layers, blocks, heads, block_size, words) in the word's dtype, pages touched at the start: the first transfer
    should not pay for them. `array` is numpy's here; `TorchMemory` overrides what differs on a device.
    """

    device = "cpu"

    def __init__(self, layers: int, num_blocks: int, heads: range, block_size: int, cell_bytes: int) -> None:
        self.layers, self.num_blocks = layers, num_blocks
        self.heads, self.block_size, self.cell_bytes = heads, block_size, cell_bytes
        made = coefficients(layers, heads, cell_bytes)
        self._word = made.write.dtype
        self._write = self._words(made.write)
        cells = (layers, len(heads), block_size, made.read.shape[2])
        self._read = self._words(np.broadcast_to(made.read[:, :, None, :], cells).reshape(layers, -1))  # per block
        self.array: Any = self._zeros((layers, num_blocks, len(heads), block_size, cell_bytes // self._word.itemsize))
        self._head_weights = head_weights(heads)
        self._weights: U64 = np.empty((0, block_size), dtype=np.uint64)

    @property
    def block_bytes(self) -> int:
        """Of one block, all layers."""
        return self.layers * len(self.heads) * self.block_bytes_per_head

    @property
    def block_bytes_per_head(self) -> int:
        """Of one head of one layer of one block."""
        return self.block_size * self.cell_bytes

    def caches(self, total_heads: int, fingerprint: dict[str, str]) -> Caches:
        base, (layer, block, head, token, _) = self._place()
        planes = tuple(
            Plane(base=base + index * layer, block_stride=block, head_stride=head, token_bytes=token)
            for index in range(self.layers)
        )
        layout = Layout(
            planes=planes,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            heads=len(self.heads),
            total_heads=total_heads,
            divisible=True,
            device=self.device,
            fingerprint=fingerprint,
        )
        return Caches(layout, [(base, self.num_blocks * self.block_bytes)], 1)

    def write(self, block_ids: NDArray[np.int64], start: int, prefix: U64) -> None:
        """KV of positions [start, start + N). `block_ids`: the request's table. `prefix`: (N,), see `content`."""
        size, end = self.block_size, start + len(prefix)
        seeds = self._words(mixed(prefix).astype(self._word))
        first, last = -(-start // size), end // size
        if first < last:
            whole = seeds[first * size - start : last * size - start].reshape(-1, size)
            made = self._write[:, None, :, None, :] * whole[None, :, None, :, None]
            self.array[:, self._index(block_ids[first:last])] = made
        edges = [(start, min(end, first * size)), (max(start, last * size), end)]
        for a, b in edges if first <= last else [(start, end)]:
            if a < b:
                made = self._write[:, :, None, :] * seeds[None, None, a - start : b - start, None]
                self.array[:, int(block_ids[a // size]), :, a % size : a % size + b - a, :] = made

    def write_one_each(self, block_ids: NDArray[np.int64], positions: NDArray[np.int64], prefix: U64) -> None:
        """KV of one token of each of N requests, at `positions` (N,), in `block_ids` (N,)."""
        seeds = self._words(mixed(prefix).astype(self._word))
        made = seeds[:, None, None, None] * self._write[None]
        self.array[:, self._index(block_ids), :, self._index(positions % self.block_size), :] = made

    def sums(self, block_ids: NDArray[np.int64], logical: NDArray[np.int64], lengths: NDArray[np.int64]) -> U64:
        """(N, heads) uint64: what the first `lengths` tokens of each block hold, read now. `logical`: (N,) index of
        each block in its request."""
        slot = np.arange(self.block_size, dtype=np.int64)
        by_position = np.where(slot[None, :] < lengths[:, None], self._weights_of(logical), np.uint64(0))
        by_head: U64 = (self._by_token(block_ids) * by_position[:, None, :]).sum(axis=2, dtype=np.uint64)
        return by_head * self._head_weights[None, :]

    def flip(self, block_id: int, offset: int, mask: int) -> None:
        """Change one byte of a block: `offset` counts over layers, then heads, tokens and bytes."""
        layer, rest = divmod(offset, self.block_bytes // self.layers)
        self._bytes(layer, block_id)[rest] ^= mask

    def _weights_of(self, logical: NDArray[np.int64]) -> U64:
        top = int(logical.max(initial=0)) + 1
        if top > len(self._weights):
            rows = 2 * top
            self._weights = weights(0, rows * self.block_size).reshape(rows, self.block_size)
        chosen: U64 = self._weights[logical]
        return chosen

    # -- what depends on where the memory is ------------------------------------------------------------------------

    def _zeros(self, shape: tuple[int, ...]) -> Any:
        array = np.empty(shape, dtype=self._word)
        array.fill(0)
        return array

    def _words(self, array: NDArray[Any]) -> Any:
        """Numbers in the word's dtype, where `array` can be multiplied by them."""
        return array

    def _index(self, array: NDArray[np.int64]) -> Any:
        return array

    def _place(self) -> tuple[int, tuple[int, ...]]:
        """Address and strides in bytes."""
        return int(self.array.ctypes.data), self.array.strides

    def _bytes(self, layer: int, block_id: int) -> Any:
        """(bytes,) uint8, a view of one block of one layer."""
        return self.array[layer, block_id].reshape(-1).view(np.uint8)

    def _by_token(self, block_ids: NDArray[np.int64]) -> U64:
        """(N, heads, block_size): each token's cells, summed over layers and words in the word's dtype."""
        heads, size = len(self.heads), self.block_size
        rows = self.array.reshape(self.layers, self.num_blocks, -1)
        found = np.empty((len(block_ids), rows.shape[2]), dtype=self._word)
        step = max(1, _AT_ONCE // (self.layers * rows.shape[2] * rows.itemsize))
        for first in range(0, len(block_ids), step):
            # clip: the one mode of `take` that does not look at each index twice
            cells = rows.take(block_ids[first : first + step], axis=1, mode="clip")
            np.multiply(cells, self._read[:, None, :], out=cells)
            np.sum(cells, axis=0, dtype=self._word, out=found[first : first + step])
        tokens = found.reshape(len(block_ids), heads, size, self.array.shape[4]).sum(axis=3, dtype=self._word)
        by_token: U64 = tokens.astype(np.uint64)
        return by_token
