"""`KvMemory` on a device that torch sees: the same bytes, the same sums. Loads torch.

torch has no arithmetic on unsigned words of more than a byte, so words are signed here; products and sums wrap to the
same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.engine.content import U64
from kvferry.engine.memory import KvMemory
from kvferry.errors import ConfigError


class TorchMemory(KvMemory):
    """`array` is a tensor. `device`: 'cuda', 'cuda:N' or 'cpu'. Raises `ConfigError` for one that is not there."""

    def __init__(
        self, layers: int, num_blocks: int, heads: range, block_size: int, cell_bytes: int, device: str
    ) -> None:
        self._device = _checked(device)
        self.device = "cpu" if self._device.type == "cpu" else f"cuda:{self._device.index or 0}"
        super().__init__(layers, num_blocks, heads, block_size, cell_bytes)

    def _zeros(self, shape: tuple[int, ...]) -> Any:
        return torch.zeros(shape, dtype=self._write.dtype, device=self._device)

    def _words(self, array: NDArray[Any]) -> Any:
        """On the device, with the same bits; bytes stay unsigned."""
        if array.itemsize > 1:
            array = array.view(f"i{array.itemsize}")
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def _index(self, array: NDArray[np.int64]) -> Any:
        return torch.from_numpy(array).to(self._device)

    def _place(self) -> tuple[int, tuple[int, ...]]:
        return self.array.data_ptr(), tuple(stride * self.array.element_size() for stride in self.array.stride())

    def _bytes(self, layer: int, block_id: int) -> Any:
        return self.array[layer, block_id].reshape(-1).view(torch.uint8)

    def _by_token(self, block_ids: NDArray[np.int64]) -> U64:
        cells = self.array[:, self._index(block_ids)].reshape(self.layers, len(block_ids), -1)
        summed = (cells * self._read[:, None, :]).sum(dim=0, dtype=torch.int64)
        tokens = summed.reshape(len(block_ids), len(self.heads), self.block_size, -1).sum(dim=3)
        on_host: U64 = tokens.cpu().numpy().view(np.uint64)
        if self._word.itemsize < 8:
            on_host = on_host & np.uint64((1 << 8 * self._word.itemsize) - 1)
        return on_host


def _checked(device: str) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device: {device!r}", hint="expected cpu, cuda or cuda:N") from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device: {device!r}: torch sees {torch.cuda.device_count()} CUDA devices", hint="use cpu")
    return found
