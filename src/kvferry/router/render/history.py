"""All chunks of one session, in their order, for a worker that takes it over. Small: blocks of them are packed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

BLOCK = 16 * 1024
"""Chunks are alike: such a block packs to a tenth or less, in a tenth of a millisecond. A larger chunk (a whole answer,
a prompt's logprobs) is kept as it is: packing it would hold up everybody."""


class History:
    """Owner: one request's task."""

    def __init__(self) -> None:
        self._blocks: list[tuple[bytes, bool]] = []
        """And whether packed."""
        self._plain: list[bytes] = []
        self._size = 0

    def add(self, entries: list[bytes]) -> None:
        """`[I, CHUNK]` each, as JSON."""
        for entry in entries:
            if len(entry) > BLOCK:
                self._pack()
                self._blocks.append((entry, False))
                continue
            self._plain.append(entry)
            self._size += len(entry)
            if self._size >= BLOCK:
                self._pack()

    def _pack(self) -> None:
        if self._plain:
            self._blocks.append((zlib.compress(b",".join(self._plain), 1), True))
            self._plain, self._size = [], 0

    def bodies(self) -> Iterator[bytes]:
        """All of it, as the bodies of one request after the other: a worker turns each to text in a short time."""
        for one, packed in self._blocks:
            yield b"[" + (zlib.decompress(one) if packed else one) + b"]"
        if self._plain:
            yield b"[" + b",".join(self._plain) + b"]"

    @property
    def nbytes(self) -> int:
        """Of memory."""
        return sum(len(one) for one, _ in self._blocks) + self._size
