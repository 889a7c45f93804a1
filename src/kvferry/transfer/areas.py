"""Memory beside the KV that peers reach: for the first access to each other, and for staging."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

SCRATCH_BYTES = 64
_SLOTS = 16
_ALIGN = 64
_HUGE = 2 << 20


class Slots:
    """Equal parts of one area. Owned by the core's thread."""

    def __init__(self, base: int, nbytes: int) -> None:
        self.slot_bytes = nbytes // _SLOTS // _ALIGN * _ALIGN
        count = _SLOTS if self.slot_bytes else 0
        self.total = count
        self._free = [base + index * self.slot_bytes for index in range(count)]

    def take(self, count: int) -> tuple[int, ...]:
        """Addresses of so many slots, or none."""
        if not 0 < count <= len(self._free):
            return ()
        taken, self._free = self._free[-count:], self._free[:-count]  # the last ones used: they are in some cache
        return tuple(taken)

    def give(self, slots: tuple[int, ...]) -> None:
        self._free += slots

    @property
    def lent(self) -> int:
        return self.total - len(self._free)


class Areas:
    """One allocation of zeroed bytes on `device` ('cpu' or 'cuda:N', which needs torch), kept alive by this object.

    `scratch`: address of `SCRATCH_BYTES`. `staging_bytes`: 0 for none.
    """

    def __init__(self, device: str, staging_bytes: int) -> None:
        nbytes = staging_bytes + SCRATCH_BYTES
        self._kept, address = _zeros(device, nbytes)
        self.regions = [(address, nbytes)]
        self.staging = Slots(address, staging_bytes)
        self.scratch = address + staging_bytes


def _zeros(device: str, nbytes: int) -> tuple[Any, int]:
    if device == "cpu":
        pages = mmap.mmap(-1, -(-nbytes // _HUGE) * _HUGE + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # a WRITE within a machine pins page by page
            pages.madvise(mmap.MADV_HUGEPAGE)
        array = np.frombuffer(pages, dtype=np.uint8)
        array.fill(0)  # no transfer shall pay for the pages
        return pages, -(-int(array.ctypes.data) // _HUGE) * _HUGE
    import torch

    tensor = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    return tensor, tensor.data_ptr()
