"""What the KV bytes of the modelled engine hold, and which token follows from them. Pure; uint64 arithmetic wraps.

Every token has a seed that depends on it, on its position and on all tokens before it. A cell, the K and V of one token
of one head of one layer, is the seed times an odd number of (layer, head, word), cut to the word's width. Reading sums
the cells times other odd numbers, then the positions times further ones, so that one changed word, and with it any one
changed byte, always changes the sum; so do blocks that changed places. The next token is a hash of that sum. Since all
of it is linear, `expected_sum` gives from the token ids alone what a faultless engine must read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.protocol.digest import mixed

U64 = NDArray[np.uint64]
EOS = 2
FIRST_WORD = 256
"""Generated ids start here: below lie the bytes and the special tokens of the vocabularies in use."""

_EOS_ONE_IN = 128
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    """`mixed` of one number."""
    x &= _MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def prefixes(token_ids: Sequence[int], before: int = 0, start: int = 0) -> U64:
    """(N,) what identifies each token with all before it. `before`: the value of position `start - 1`, 0 at start."""
    tokens = np.asarray(token_ids, dtype=np.uint64)
    positions = np.arange(start, start + len(tokens), dtype=np.uint64)
    return np.cumsum(prefix_terms(tokens, positions), dtype=np.uint64) + np.uint64(before)


def prefix_terms(tokens: U64, positions: U64) -> U64:
    """(N,) what each token at its position adds to the value of the one before."""
    return mixed(tokens * np.uint64(_GOLDEN) + mixed(positions + np.uint64(1)))


def weights(start: int, end: int) -> U64:
    """(end - start,) odd numbers, one per position."""
    return mixed(np.arange(start, end, dtype=np.uint64) + np.uint64(0x5851F42D4C957F2D)) | np.uint64(1)


@dataclass(frozen=True, eq=False)
class Coefficients:
    """Odd numbers of shape (layers, heads, words) in the word's dtype; `write` makes cells, `read` sums them."""

    write: NDArray[Any]
    read: NDArray[Any]

    @property
    def per_head(self) -> NDArray[Any]:
        """(heads,) in the word's dtype: what one head's cells sum to, for a seed of 1."""
        found: NDArray[Any] = (self.write * self.read).sum(axis=(0, 2), dtype=self.write.dtype)
        return found


def word_type(cell_bytes: int) -> np.dtype[Any]:
    """Widest unsigned integer that fills a cell a whole number of times."""
    return np.dtype(next(f"u{size}" for size in (8, 4, 2, 1) if cell_bytes % size == 0))


def coefficients(layers: int, heads: range, cell_bytes: int) -> Coefficients:
    """For the model's `heads` that one rank stores."""
    dtype = word_type(cell_bytes)
    words = cell_bytes // dtype.itemsize
    layer = np.arange(layers, dtype=np.uint64)[:, None, None] << np.uint64(32)
    head = np.arange(heads.start, heads.stop, dtype=np.uint64)[None, :, None] << np.uint64(16)
    which = mixed(layer + head + np.arange(words, dtype=np.uint64)[None, None, :])
    return Coefficients(*((one | np.uint64(1)).astype(dtype) for one in (which, mixed(which + np.uint64(_GOLDEN)))))


def head_weights(heads: range) -> U64:
    """(heads,) odd numbers by which the heads' sums go into one."""
    return mixed(np.arange(heads.start, heads.stop, dtype=np.uint64) + np.uint64(0x2545F4914F6CDD1D)) | np.uint64(1)


def expected_sum(token_ids: Sequence[int], layers: int, total_heads: int, cell_bytes: int) -> int:
    """What reading the KV of all these tokens gives when every byte is right."""
    heads = range(total_heads)
    made = coefficients(layers, heads, cell_bytes)
    seeds = mixed(prefixes(token_ids)).astype(made.write.dtype)
    per_head = (seeds[:, None] * made.per_head[None, :]).astype(np.uint64)
    by_head = (per_head * weights(0, len(token_ids))[:, None]).sum(axis=0, dtype=np.uint64)
    return int((by_head * head_weights(heads)).sum(dtype=np.uint64))


def next_token(total: int, position: int, vocab_size: int, may_end: bool) -> int:
    """The token at `position`, from the sum over all KV before it. `may_end`: EOS is allowed (one in 128 is one)."""
    drawn = mix(total + position * _GOLDEN)
    if may_end and drawn % _EOS_ONE_IN == 0:
        return EOS
    return FIRST_WORD + (drawn >> 8) % (vocab_size - FIRST_WORD)


def answer(
    prompt: Sequence[int], max_tokens: int, shape: tuple[int, int, int], vocab_size: int, *, ignore_eos: bool = True
) -> list[int]:
    """The tokens that a faultless engine makes after `prompt`. `shape`: (layers, total_heads, cell_bytes)."""
    layers, total_heads, cell_bytes = shape
    tokens, made = list(prompt), list[int]()
    while len(made) < max_tokens:
        total = expected_sum(tokens, layers, total_heads, cell_bytes)
        made.append(next_token(total, len(tokens), vocab_size, not ignore_eos))
        tokens.append(made[-1])
        if made[-1] == EOS:
            break
    return made
