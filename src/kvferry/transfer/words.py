"""Reads KV where it lies, for `protocol/digest.py`: numpy on the host, torch on a device. No copy of KV leaves either.

Memory is taken as one array from the lowest plane to the highest, of which only places inside the planes are touched:
rows of all planes are read in one go, however they are allocated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import ConfigError
from kvferry.protocol.digest import U64, Store, by_half, row_sums, within_token, word_type
from kvferry.protocol.messages import Layout
from kvferry.transfer.raw import device_array, host_array

if TYPE_CHECKING:
    import torch

_AT_ONCE = 1 << 18
"""Bytes that are gathered before they are summed up, so that they are still in the cache then."""

_AT_ONCE_ON_DEVICE = 1 << 24
"""The same where a launch costs more than a look at the memory; the device needs three times as much for it."""


def store_of(layout: Layout) -> Store:
    """Raises `ConfigError` for device memory that can't be read in words."""
    if layout.device == "cpu":
        host = HostWords(layout)
        return Store(layout, host.sums, host.prepare)
    lowest, end = extent(layout)
    return Store(layout, DeviceWords(layout, device_array(lowest, (end - lowest,), "|u1", layout.device)).sums)


def extent(layout: Layout) -> tuple[int, int]:
    """[lowest, end) of all addresses."""
    lasts = [
        p.base
        + (layout.num_blocks - 1) * p.block_stride
        + (layout.heads - 1) * p.head_stride
        + layout.block_size * p.token_bytes
        for p in layout.planes
    ]
    return min(plane.base for plane in layout.planes), max(lasts)


def aligned(layout: Layout, itemsize: int) -> bool:
    numbers = (number for p in layout.planes for number in (p.base, p.block_stride, p.head_stride))
    return all(number % itemsize == 0 for number in numbers)


class HostWords:
    """KV in this process's memory."""

    def __init__(self, layout: Layout) -> None:
        self._lowest, self._end = extent(layout)
        self._layout = layout
        self._rows = functools.lru_cache(maxsize=64)(self._made)

    def sums(self, addresses: U64, token_bytes: int, weights: U64) -> U64:
        """See `protocol.digest.Read`."""
        columns, tokens = weights.shape
        row_bytes = tokens * token_bytes
        view, step = self._rows(token_bytes, row_bytes)
        at = ((addresses.ravel() - np.uint64(self._lowest)) // np.uint64(step)).astype(np.int64)
        out: U64 = np.empty(len(at), dtype=np.uint64)
        rows = max(1, _AT_ONCE // row_bytes)
        for first in range(0, len(at), rows):
            words = view[at[first : first + rows]]
            column = np.arange(first, first + len(words)) % columns
            out[first : first + rows] = row_sums(words, token_bytes, weights[column])
        return out.reshape(addresses.shape)

    def prepare(self, addresses: U64, token_bytes: int, weights: U64) -> Callable[[], U64]:
        """See `protocol.digest.Prepare`. Few calls: what is not in the caches costs more than what they do."""
        view, step = self._rows(token_bytes, token_bytes)
        at = ((addresses - np.uint64(self._lowest)) // np.uint64(step)).astype(np.int64)
        factors, halves = by_half(token_bytes), np.dtype("<u4") if view.itemsize == 8 else view.dtype

        def sums() -> U64:
            found: U64 = (view[at].view(halves).astype(np.uint64) @ factors) * weights
            return found

        return sums

    def _made(self, token_bytes: int, row_bytes: int) -> tuple[NDArray[Any], int]:
        """(places, words) view of the rows that begin at each place, and how far apart places are."""
        word = word_type(token_bytes)
        step = word.itemsize if aligned(self._layout, word.itemsize) else 1
        shape = ((self._end - self._lowest - row_bytes) // step + 1, row_bytes // word.itemsize)
        return host_array(self._lowest, shape, word.str, (step, word.itemsize), read_only=True), step


class DeviceWords:
    """KV in `memory`, a flat uint8 tensor from the layout's lowest address on. Loads torch."""

    def __init__(self, layout: Layout, memory: torch.Tensor) -> None:
        import torch

        self._torch, self._memory = torch, memory
        self._lowest, self._end = extent(layout)
        widths = {plane.token_bytes for plane in layout.planes}
        if not all(aligned(layout, word_type(width).itemsize) for width in widths):
            raise ConfigError("verify_kv: KV on the device lies across words", hint="set verify_kv to off")
        self._stream = torch.cuda.Stream(memory.device) if memory.is_cuda else None

    def sums(self, addresses: U64, token_bytes: int, weights: U64) -> U64:
        """See `protocol.digest.Read`. What is read must be there: nothing waits for other work of the device."""
        if self._stream is None:
            return self._sums(addresses, token_bytes, weights)
        with self._torch.cuda.stream(self._stream):
            return self._sums(addresses, token_bytes, weights)

    def _sums(self, addresses: U64, token_bytes: int, weights: U64) -> U64:
        torch, device = self._torch, self._memory.device
        columns, tokens = weights.shape
        row_bytes, itemsize = tokens * token_bytes, word_type(token_bytes).itemsize
        whole, per_row = (self._end - self._lowest) // itemsize, row_bytes // itemsize
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[itemsize]
        words = self._memory[: whole * itemsize].view(kind)
        view = words.as_strided((whole - per_row + 1, per_row), (1, 1))
        low, high = (torch.from_numpy(one.view(np.int64)).to(device) for one in within_token(token_bytes))
        by_column = torch.from_numpy(weights.view(np.int64)).to(device)
        at = torch.from_numpy(((addresses.ravel() - np.uint64(self._lowest)) // np.uint64(itemsize)).astype(np.int64))
        at = at.to(device)
        column = torch.arange(len(at), device=device) % columns
        out = torch.empty(len(at), dtype=torch.int64, device=device)
        rows = max(1, _AT_ONCE_ON_DEVICE // row_bytes)
        for first in range(0, len(at), rows):
            # Words are signed here; sums and products wrap to the same bits.
            cells = view[at[first : first + rows]].reshape(-1, len(low)).to(torch.int64)
            if itemsize < 8:
                cells &= (1 << 8 * itemsize) - 1
            found = (cells * low).sum(dim=1)
            if itemsize == 8:
                found += ((cells >> 32 & 0xFFFFFFFF) * high).sum(dim=1)
            weighted = found.reshape(-1, tokens) * by_column[column[first : first + rows]]
            out[first : first + rows] = weighted.sum(dim=1)
        sums: U64 = out.cpu().numpy().view(np.uint64).reshape(addresses.shape)
        return sums
