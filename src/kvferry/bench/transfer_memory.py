"""KV memory of one side of `kvferry bench transfer`: bytes that mean nothing, and can be told apart."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from kvferry.bench.transfer_shape import Order, Shape
from kvferry.protocol.messages import Layout, Plane
from kvferry.transfer.audit import block_digests

_AT_ONCE = 1 << 26  # bytes made at a time


class KvMemory:
    """One allocation of zeros, every page touched: no transfer shall pay for that. Raises `MemoryError`."""

    def __init__(self, shape: Shape, order: Order, num_blocks: int) -> None:
        outer = (shape.layers, num_blocks) if order == "LBHNC" else (num_blocks, shape.layers)
        self._array = np.empty((*outer, shape.heads, shape.block_size, shape.cell_bytes), dtype=np.uint8)
        self.wipe()
        self.base, self.nbytes = int(self._array.ctypes.data), self._array.nbytes
        layer, block, head, token, _ = self._array.strides
        if order == "BLHNC":
            layer, block = block, layer
        planes = tuple(
            Plane(base=self.base + index * layer, block_stride=block, head_stride=head, token_bytes=token)
            for index in range(shape.layers)
        )
        self.layout = Layout(
            planes=planes,
            num_blocks=num_blocks,
            block_size=shape.block_size,
            heads=shape.heads,
            total_heads=shape.heads,
            divisible=True,
            device="cpu",
            fingerprint={"model": "bench", "layout": order},
        )

    def fill(self, seed: int) -> None:
        """Random bytes everywhere."""
        flat, random = self._array.reshape(-1), np.random.default_rng(seed)
        for first in range(0, flat.size, _AT_ONCE):
            part = flat[first : first + _AT_ONCE]
            part[:] = np.frombuffer(random.bytes(part.size), dtype=np.uint8)

    def wipe(self) -> None:
        self._array.fill(0)

    def digests(self, block_ids: Sequence[int]) -> list[str]:
        """SHA-256 of each block."""
        return block_digests(self.layout, block_ids)

    def digest_of_first(self, nbytes: int) -> str:
        """SHA-256 from the beginning on."""
        return hashlib.sha256(self._array.reshape(-1)[:nbytes].data).hexdigest()
