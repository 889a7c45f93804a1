"""What a transfer costs, as seen so far: seconds = per_post + per_descriptor * descriptors + per_byte * bytes.

Pure. From it follows how finely KV should be cut while prefill runs: more pieces leave less for the end, and each costs
a post of its own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

POSTS_PER_PIECE = 4.0
"""A piece of its own must take at least this many times what its post alone costs: a quarter more work at most."""

LEAST_S = 1e-3
"""Nor is less than this worth a piece: the gain is at most as much, and waking two threads costs a part of it."""

LAYERS_FROM_S = 10e-3
"""A step whose KV is copied in less leaves when it is done: what its layers could save, prefill does not notice."""

_ALIKE_BITS = 3
"""Numbers within a factor of eight are of one order of magnitude."""

_BOUNDS = ((0.1, 0.01, 0.01), (5.0, 100.0, 100.0))
"""Of what the fit may find, in units of the prior: a post costs 10 to 500 microseconds, whatever a few samples say."""


@dataclass(frozen=True)
class Cost:
    """Seconds. The defaults stand until something was measured: NIXL over UCX and shared memory on a small machine."""

    per_post: float = 1e-4
    per_descriptor: float = 2e-6
    per_byte: float = 1e-10

    def seconds(self, descriptors: float, nbytes: float) -> float:
        return self.per_post + self.per_descriptor * descriptors + self.per_byte * nbytes

    @property
    def least_piece(self) -> float:
        """Copying time from which on a piece is worth a post of its own."""
        return max(LEAST_S, POSTS_PER_PIECE * self.per_post)

    def least_bytes(self, bytes_per_descriptor: float) -> int:
        """How much KV takes `least_piece`, in descriptors of that size."""
        per_byte = self.per_byte + self.per_descriptor / bytes_per_descriptor
        return int(self.least_piece / per_byte)

    def pieces(self, descriptors: float, nbytes: float, most: int) -> int:
        """Into how many pieces the layers of one step should be cut, 1 to `most`."""
        copying = self.seconds(descriptors, nbytes) - self.per_post
        if copying < LAYERS_FROM_S:
            return 1
        return max(1, min(most, int(copying / self.least_piece)))


STAGED = Cost(per_post=4e-4, per_descriptor=1e-4, per_byte=2e-10)
"""Until one was measured: gathered into slots of a registered area, a WRITE for each, and scattered behind it."""


class CostMeter:
    """Fits `Cost` to the fastest of the last transfers of each size, by least squares over relative errors: what a busy
    machine adds is no cost of theirs. The prior decides what they leave open. One thread adds; `cost` may be read from
    any."""

    _KEPT, _EVERY, _PRIOR_WEIGHT = 8, 8, 0.02

    def __init__(self, prior: Cost = Cost()) -> None:
        self.cost = self._prior = prior
        self.bytes_per_descriptor = 64 * 1024.0
        self._seen: dict[tuple[int, int], deque[tuple[float, int, int]]] = {}  # by size, in powers of two
        self._added = 0

    def add(self, descriptors: int, nbytes: int, seconds: float) -> None:
        """One transfer, from before its plan until it was complete."""
        if seconds <= 0 or descriptors < 1:
            return
        size = (descriptors.bit_length(), nbytes.bit_length())
        self._seen.setdefault(size, deque(maxlen=self._KEPT)).append((seconds, descriptors, nbytes))
        self._added += 1
        if self._added % self._EVERY == 0 or self._added in (1, 2, 4):
            self._fit()

    def seen(self, descriptors: int) -> bool:
        """Whether one with as many descriptors, in order of magnitude, was measured."""
        return any(bits >= descriptors.bit_length() - _ALIKE_BITS for bits, _ in self._seen)

    def _fit(self) -> None:
        seen = np.array([min(alike) for alike in self._seen.values()], dtype=np.float64)
        seconds, descriptors, nbytes = seen.T
        self.bytes_per_descriptor = float(nbytes.sum() / descriptors.sum())
        prior = np.array([self._prior.per_post, self._prior.per_descriptor, self._prior.per_byte])
        # In units of the prior, so that all three columns are of one size; each row divided by what was measured.
        rows = np.column_stack((np.ones(len(seen)), descriptors, nbytes)) * prior / seconds[:, None]
        rows = np.vstack((rows, self._PRIOR_WEIGHT * np.eye(3)))
        wanted = np.concatenate((np.ones(len(seen)), np.full(3, self._PRIOR_WEIGHT)))
        found = np.linalg.lstsq(rows, wanted, rcond=None)[0]
        self.cost = Cost(*(np.clip(found, *_BOUNDS) * prior).tolist())
