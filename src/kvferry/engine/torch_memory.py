"""`KvMemory` on a device that torch sees: the same bytes, the same sums. Loads torch.

torch has no arithmetic on unsigned words of more than a byte, so words are signed here; products and sums wrap to the
same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.connector.blocks import Caches
from kvferry.engine.content import U64, coefficients, head_weights, mixed, weights
from kvferry.errors import ConfigError
from kvferry.protocol.messages import Layout, Plane


class TorchMemory:
    """See `KvMemory`. `device`: 'cuda', 'cuda:N' or 'cpu'. Raises `ConfigError` for a device that is not there."""

    def __init__(
        self, layers: int, num_blocks: int, heads: range, block_size: int, cell_bytes: int, device: str
    ) -> None:
        self.heads, self.block_size, self.cell_bytes = heads, block_size, cell_bytes
        self._device = _checked(device)
        made = coefficients(layers, heads, cell_bytes)
        self._word = made.write.dtype
        self._write, self._read = self._signed(made.write), self._signed(made.read)
        words = cell_bytes // self._word.itemsize
        shape = (layers, num_blocks, len(heads), block_size, words)
        self.tensor = torch.zeros(shape, dtype=self._write.dtype, device=self._device)
        self._head_weights = head_weights(heads)

    def _signed(self, array: NDArray[Any]) -> torch.Tensor:
        """On the device, with the same bits; bytes stay unsigned."""
        if array.itemsize > 1:
            array = array.view(f"i{array.itemsize}")
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def _index(self, array: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    @property
    def num_blocks(self) -> int:
        return int(self.tensor.shape[1])

    @property
    def block_bytes(self) -> int:
        return int(self.tensor[:, 0].numel() * self.tensor.element_size())

    @property
    def block_bytes_per_head(self) -> int:
        return self.block_size * self.cell_bytes

    def caches(self, total_heads: int, fingerprint: dict[str, str]) -> Caches:
        size = self.tensor.element_size()
        layer, block, head, token, _ = (stride * size for stride in self.tensor.stride())
        base = self.tensor.data_ptr()
        planes = tuple(
            Plane(base=base + index * layer, block_stride=block, head_stride=head, token_bytes=token)
            for index in range(self.tensor.shape[0])
        )
        layout = Layout(
            planes=planes,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            heads=len(self.heads),
            total_heads=total_heads,
            divisible=True,
            device="cpu" if self._device.type == "cpu" else f"cuda:{self._device.index or 0}",
            fingerprint=fingerprint,
        )
        return Caches(layout, [(base, self.tensor.numel() * size)], 1)

    def write(self, block_ids: NDArray[np.int64], start: int, prefix: U64) -> None:
        size, end = self.block_size, start + len(prefix)
        seeds = self._signed(mixed(prefix).astype(self._word))
        first, last = -(-start // size), end // size
        if first < last:
            whole = seeds[first * size - start : last * size - start].reshape(-1, size)
            made = self._write[:, None, :, None, :] * whole[None, :, None, :, None]
            self.tensor[:, self._index(block_ids[first:last])] = made
        edges = [(start, min(end, first * size)), (max(start, last * size), end)]
        for a, b in edges if first <= last else [(start, end)]:
            if a < b:
                made = self._write[:, :, None, :] * seeds[None, None, a - start : b - start, None]
                self.tensor[:, int(block_ids[a // size]), :, a % size : a % size + b - a, :] = made

    def write_one_each(self, block_ids: NDArray[np.int64], positions: NDArray[np.int64], prefix: U64) -> None:
        seeds = self._signed(mixed(prefix).astype(self._word))
        made = seeds[:, None, None, None] * self._write[None]
        slots = self._index(positions % self.block_size)
        self.tensor[:, self._index(block_ids), :, slots, :] = made

    def sums(self, block_ids: NDArray[np.int64], logical: NDArray[np.int64], lengths: NDArray[np.int64]) -> U64:
        cells = self.tensor[:, self._index(block_ids)]
        tokens = (cells * self._read[:, None, :, None, :]).sum(dim=(0, 4), dtype=torch.int64)
        on_host = tokens.cpu().numpy().view(np.uint64)
        if self._word.itemsize < 8:
            on_host = on_host & np.uint64((1 << 8 * self._word.itemsize) - 1)
        top = int(logical.max(initial=0)) + 1
        by_position = weights(0, top * self.block_size).reshape(top, self.block_size)[logical]
        slot = np.arange(self.block_size, dtype=np.int64)
        by_position = np.where(slot[None, :] < lengths[:, None], by_position, np.uint64(0))
        by_head: U64 = (on_host * by_position[:, None, :]).sum(axis=2, dtype=np.uint64)
        return by_head * self._head_weights[None, :]

    def flip(self, block_id: int, offset: int, mask: int) -> None:
        layer, rest = divmod(offset, self.block_bytes // self.tensor.shape[0])
        row = self.tensor[layer, block_id].reshape(-1).view(torch.uint8)
        row[rest] ^= mask


def _checked(device: str) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device: {device!r}", hint="expected cpu, cuda or cuda:N") from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device: {device!r}: torch sees {torch.cuda.device_count()} CUDA devices", hint="use cpu")
    return found
