"""The KV memory of one rank: written and read as real bytes, laid out as vLLM's connector layout LBHNC.

Owned by the rank's engine thread; peers write to it through the fabric only where the connector lets them.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.connector.blocks import Caches
from kvferry.engine.content import U64, coefficients, head_weights, mixed, weights
from kvferry.protocol.messages import Layout, Plane


class Memory(Protocol):
    """What a rank needs of its KV memory; see `KvMemory`. Also on devices: `torch_memory.TorchMemory`."""

    heads: range
    block_size: int
    cell_bytes: int

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def block_bytes_per_head(self) -> int: ...

    def caches(self, total_heads: int, fingerprint: dict[str, str]) -> Caches: ...

    def write(self, block_ids: NDArray[np.int64], start: int, prefix: U64) -> None: ...

    def write_one_each(self, block_ids: NDArray[np.int64], positions: NDArray[np.int64], prefix: U64) -> None: ...

    def sums(self, block_ids: NDArray[np.int64], logical: NDArray[np.int64], lengths: NDArray[np.int64]) -> U64: ...

    def flip(self, block_id: int, offset: int, mask: int) -> None: ...


class KvMemory:
    """(layers, blocks, heads, block_size, words) in the word's dtype, pages touched at the start: the first transfer
    should not pay for them."""

    def __init__(self, layers: int, num_blocks: int, heads: range, block_size: int, cell_bytes: int) -> None:
        self.heads, self.block_size, self.cell_bytes = heads, block_size, cell_bytes
        self._made = coefficients(layers, heads, cell_bytes)
        dtype = self._made.write.dtype
        words = cell_bytes // dtype.itemsize
        self.array: NDArray[Any] = np.empty((layers, num_blocks, len(heads), block_size, words), dtype=dtype)
        self.array.fill(0)
        self._head_weights = head_weights(heads)
        self._weights: U64 = np.empty((0, block_size), dtype=np.uint64)

    @property
    def num_blocks(self) -> int:
        return int(self.array.shape[1])

    @property
    def block_bytes(self) -> int:
        """Of one block, all layers."""
        return int(self.array[:, 0].nbytes)

    @property
    def block_bytes_per_head(self) -> int:
        """Of one head of one layer of one block."""
        return self.block_size * self.cell_bytes

    def caches(self, total_heads: int, fingerprint: dict[str, str]) -> Caches:
        layer, block, head, token, _ = self.array.strides
        base = int(self.array.ctypes.data)
        planes = tuple(
            Plane(base=base + index * layer, block_stride=block, head_stride=head, token_bytes=token)
            for index in range(self.array.shape[0])
        )
        layout = Layout(
            planes=planes,
            num_blocks=self.array.shape[1],
            block_size=self.block_size,
            heads=len(self.heads),
            total_heads=total_heads,
            divisible=True,
            device="cpu",
            fingerprint=fingerprint,
        )
        return Caches(layout, [(base, self.array.nbytes)], 1)

    def write(self, block_ids: NDArray[np.int64], start: int, prefix: U64) -> None:
        """KV of positions [start, start + N). `block_ids`: the request's table. `prefix`: (N,), see `content`."""
        size, end = self.block_size, start + len(prefix)
        seeds = mixed(prefix).astype(self.array.dtype)
        first, last = -(-start // size), end // size
        if first < last:
            whole = seeds[first * size - start : last * size - start].reshape(-1, size)
            made = self._made.write[:, None, :, None, :] * whole[None, :, None, :, None]
            self.array[:, block_ids[first:last]] = made
        edges = [(start, min(end, first * size)), (max(start, last * size), end)]
        for a, b in edges if first <= last else [(start, end)]:
            if a < b:
                made = self._made.write[:, :, None, :] * seeds[None, None, a - start : b - start, None]
                self.array[:, block_ids[a // size], :, a % size : a % size + b - a, :] = made

    def write_one_each(self, block_ids: NDArray[np.int64], positions: NDArray[np.int64], prefix: U64) -> None:
        """KV of one token of each of N requests, at `positions` (N,), in `block_ids` (N,)."""
        seeds = mixed(prefix).astype(self.array.dtype)
        made = seeds[:, None, None, None] * self._made.write[None]
        self.array[:, block_ids, :, positions % self.block_size, :] = made

    def sums(self, block_ids: NDArray[np.int64], logical: NDArray[np.int64], lengths: NDArray[np.int64]) -> U64:
        """(N, heads) uint64: what the first `lengths` tokens of each block hold, read now. `logical`: (N,) index of
        each block in its request."""
        array, read = self.array, self._made.read
        tokens = np.zeros((len(block_ids), len(self.heads), self.block_size), dtype=array.dtype)
        for layer in range(array.shape[0]):  # layer by layer: what is read stays in the cache until it is summed
            cells = array[layer, block_ids]
            if cells.shape[-1] == 1:
                tokens += cells[..., 0] * read[layer, None, :, None, 0]
            else:
                tokens += (cells * read[layer, None, :, None, :]).sum(axis=-1, dtype=array.dtype)
        slot = np.arange(self.block_size, dtype=np.int64)
        by_position = self._weights_of(logical)
        by_position = np.where(slot[None, :] < lengths[:, None], by_position, np.uint64(0))
        by_head: U64 = (tokens.astype(np.uint64) * by_position[:, None, :]).sum(axis=2, dtype=np.uint64)
        return by_head * self._head_weights[None, :]

    def _weights_of(self, logical: NDArray[np.int64]) -> U64:
        top = int(logical.max(initial=0)) + 1
        if top > len(self._weights):
            rows = 2 * top
            self._weights = weights(0, rows * self.block_size).reshape(rows, self.block_size)
        chosen: U64 = self._weights[logical]
        return chosen

    def flip(self, block_id: int, offset: int, mask: int) -> None:
        """Change one byte of a block: `offset` counts over layers, then heads, tokens and bytes."""
        layer, rest = divmod(offset, self.array[0, 0].nbytes)
        row = self.array[layer, block_id].reshape(-1).view(np.uint8)
        row[rest] ^= np.uint8(mask)
