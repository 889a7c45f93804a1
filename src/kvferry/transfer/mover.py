"""Copies between scattered pieces of KV and a slot, on the device where both lie.

Pieces are named by their addresses. They are views of raw memory: the callers see to it that every piece lies within
registered KV. One thread, the core's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.protocol.plan import U64
from kvferry.transfer.commands import Moment
from kvferry.transfer.raw import device_array, host_array


class Mover(Protocol):
    """A copy is over when its moment has passed; None: it is over now."""

    def gather(self, pieces: U64, nbytes: int, slot: int) -> Moment | None:
        """Copy `nbytes` from each of the addresses `pieces`, (N,), to address `slot` and on, one behind the other."""

    def scatter(self, slot: int, pieces: U64, nbytes: int) -> Moment | None:
        """The other way."""


class HostMover:
    """numpy on CPU memory: a copy per piece, the interpreter's lock let go meanwhile."""

    def gather(self, pieces: U64, nbytes: int, slot: int) -> Moment | None:
        staged = _host_rows(slot, len(pieces), nbytes)
        for which, rows, index in _grids(pieces, nbytes, _host_rows):
            if which is None:
                np.take(rows, index, out=staged, mode="clip")
            else:
                staged[which] = rows[index]
        return None

    def scatter(self, slot: int, pieces: U64, nbytes: int) -> Moment | None:
        staged = _host_rows(slot, len(pieces), nbytes)
        for which, rows, index in _grids(pieces, nbytes, _host_rows):
            rows[index] = staged if which is None else staged[which]
        return None


class TorchMover:
    """torch on the memory of `device`; on a GPU by a stream of its own, beside the model's."""

    def __init__(self, device: str) -> None:
        import torch

        self._torch, self._device = torch, torch.device(device)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def gather(self, pieces: U64, nbytes: int, slot: int) -> Moment | None:
        view = self._view(pieces, nbytes, slot)
        with self._torch.cuda.stream(self._stream):
            staged = view(slot, len(pieces), nbytes)
            for which, rows, index in _grids(pieces, nbytes, view):
                if which is None:
                    self._torch.index_select(rows, 0, self._index(index), out=staged)
                else:
                    staged[self._index(which)] = rows[self._index(index)]
        return self._moment()

    def scatter(self, slot: int, pieces: U64, nbytes: int) -> Moment | None:
        view = self._view(pieces, nbytes, slot)
        with self._torch.cuda.stream(self._stream):
            staged = view(slot, len(pieces), nbytes)
            for which, rows, index in _grids(pieces, nbytes, view):
                rows.index_copy_(0, self._index(index), staged if which is None else staged[self._index(which)])
        return self._moment()

    def _moment(self) -> Moment | None:
        if self._stream is None:
            return None
        event: Moment = self._stream.record_event()
        return event

    def _index(self, numbers: NDArray[np.int64]) -> Any:
        return self._torch.from_numpy(numbers).to(self._device, non_blocking=True)

    def _view(self, pieces: U64, nbytes: int, slot: int) -> Callable[[int, int, int], Any]:
        """How raw memory becomes rows, in the longest words that all addresses are multiples of."""
        bits = int(np.bitwise_or.reduce(pieces)) | nbytes | slot
        word = next(size for size in (8, 4, 2, 1) if bits % size == 0)
        typestr = "|u1" if word == 1 else f"<i{word}"

        def rows(address: int, count: int, row_bytes: int) -> Any:
            shape = (count, row_bytes // word)
            if self._stream is None:
                return self._torch.from_numpy(host_array(address, shape, typestr))
            return device_array(address, shape, typestr, self._device)

        return rows


def mover_for(device: str) -> Mover:
    return HostMover() if device == "cpu" else TorchMover(device)


def _host_rows(address: int, count: int, nbytes: int) -> NDArray[np.void]:
    """(count,) items of `nbytes` bytes each."""
    return host_array(address, (count,), f"|V{nbytes}")


def _grids(
    pieces: U64, nbytes: int, view: Callable[[int, int, int], Any]
) -> Iterator[tuple[NDArray[np.int64] | None, Any, NDArray[np.int64]]]:
    """The pieces as rows of arrays of `nbytes` a row: (which pieces, None for all; the array; their rows in it).

    Addresses that are a multiple of `nbytes` apart are rows of one array, whatever lies between them.
    """
    phase = pieces % np.uint64(nbytes)
    for one in np.unique(phase):
        which = np.flatnonzero(phase == one) if (phase != one).any() else None
        mine = pieces if which is None else pieces[which]
        base, last = int(mine.min()), int(mine.max())
        index = ((mine - np.uint64(base)) // np.uint64(nbytes)).astype(np.int64)
        yield which, view(base, (last - base) // nbytes + 1, nbytes), index
