"""SHA-256 of blocks as they lie in memory, for tests that compare both sides byte by byte. CPU memory only."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable

from kvferry.errors import ConfigError
from kvferry.protocol.messages import Layout


def block_digests(layout: Layout, block_ids: Iterable[int]) -> list[str]:
    """One hex digest per block, over all planes in order, heads in order: `heads * block_size * token_bytes` each."""
    if layout.device != "cpu":
        raise ConfigError(f"audit: KV is on {layout.device}", hint="audit works on CPU engines only")
    out = []
    for block in block_ids:
        digest = hashlib.sha256()
        for plane in layout.planes:
            size = layout.block_size * plane.token_bytes
            for head in range(layout.heads):
                address = plane.base + block * plane.block_stride + head * plane.head_stride
                digest.update((ctypes.c_char * size).from_address(address))
        out.append(digest.hexdigest())
    return out
