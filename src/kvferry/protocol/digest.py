"""What shows that KV changed on its way: sums over its words that don't depend on how either side lays it out. Pure.

A word has a place in the model: plane, head, token, offset within the token. Each place has odd 64-bit coefficients:
the product of one for (plane, head), one for the token and one for each 32-bit half of the word. A digest is the sum of
all halves times their coefficients, modulo 2**64. So digests of parts add up, in any order, whatever the block sizes,
the ranks and the strides are; and

- a change within one half of one word always shows: an odd number times less than 2**32 is no multiple of 2**64;
- any other change (swapped, stale, zeroed, repeated KV) goes unseen with a chance of about 2**-32. Halves, since the
  highest bits of whole words would cancel too easily modulo 2**64.

It finds faults, not forgers: the coefficients are known. Where tokens are packed inside a block (`divisible` False),
the bytes that lie where a token would be count as that token, and the last block counts whole, as it moves.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from kvferry.ids import TransferId
from kvferry.protocol.messages import Layout, Verify
from kvferry.protocol.stream import Span

U64 = NDArray[np.uint64]
SAMPLES = 2
"""Tokens per plane that `sample` looks at: one of the first or the last block, in turn, and one that is anywhere: each
plane has its own part of the prompt."""

LEAST_SHARE = 4
"""`sample` looks at one of so many planes at least, others in each transfer, and at one for each block of the prompt
where there are as many: so its cost grows with the prompt, as that of prefill does."""

MOST_SLICES = 1 << 14
"""Above so many, `full` joins neighbouring blocks into one slice: the digests travel with the closing message."""

_GOLDEN = 0x9E3779B97F4A7C15

Read = Callable[[U64, int, U64], U64]
"""(addresses (R, N), bytes per token, weights (N, T)) -> (R, N): what `row_sums` gives for the T tokens at each."""

Prepare = Callable[[U64, int, U64], Callable[[], U64]]
"""(addresses (N,), bytes per token, weights (N,)) -> what reads and gives (N,) for the token at each. All that can be
done before the KV is there is done at once."""

Reads = tuple[NDArray[np.int64], int, Callable[[], U64]]
"""Which of the samples, the bytes of each, and what reads them."""


def weaker(one: Verify, other: Verify) -> Verify:
    return min(one, other, key=get_args(Verify).index)


def mixed(x: U64) -> U64:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection in which every bit depends on every other."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _odd(kind: int, which: Any) -> U64:
    """Coefficients of one kind, for an array of numbers below 2**60."""
    return mixed(np.asarray(which, dtype=np.uint64) + np.uint64(kind << 60)) | np.uint64(1)


def word_type(token_bytes: int) -> np.dtype[Any]:
    """The widest word that fills a token of one head a whole number of times."""
    return np.dtype(next(f"<u{size}" for size in (8, 4, 2, 1) if token_bytes % size == 0))


@functools.lru_cache(maxsize=64)
def within_token(token_bytes: int) -> tuple[U64, U64]:
    """(words,) by which words are multiplied, and then their upper halves once more (no use for words of one half)."""
    at = np.arange(token_bytes // word_type(token_bytes).itemsize)
    return _odd(1, at), _odd(2, at)


def of_tokens(tokens: NDArray[np.int64]) -> U64:
    return _odd(3, tokens)


def of_heads(planes: NDArray[np.int64], heads: NDArray[np.int64]) -> U64:
    """`heads`: of the model. Broadcasts."""
    return _odd(4, (planes.astype(np.uint64) << np.uint64(32)) + heads.astype(np.uint64))


@functools.lru_cache(maxsize=64)
def by_half(token_bytes: int) -> U64:
    """(halves,), or (words,) of narrower ones: the same as `within_token`, for words that are cut in halves."""
    low, high = within_token(token_bytes)
    if word_type(token_bytes).itemsize < 8:
        return low
    return np.stack((low, (low << np.uint64(32)) + high), axis=1).reshape(-1)


def row_sums(words: NDArray[Any], token_bytes: int, weights: U64) -> U64:
    """(N,) of N rows of T tokens each. `words`: (N, T * words per token), may be overwritten; `weights`: (N, T)."""
    low, high = within_token(token_bytes)
    halves = words.dtype.itemsize == 8
    cells = words.astype(np.uint64, copy=False).reshape(-1, len(low))
    found = np.einsum("ij,j->i", cells, low)
    if halves:
        np.right_shift(cells, np.uint64(32), out=cells)
        found += np.einsum("ij,j->i", cells, high)
    by_row: U64 = (found.reshape(weights.shape) * weights).sum(axis=1, dtype=np.uint64)
    return by_row


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What one registration's digests cover: tokens [start_token, end_token) of `heads` heads, the model's from
    `first_head` on, of planes [0, planes). `unit`: the larger block size. `packed`: a side packs tokens."""

    start_token: int
    end_token: int
    planes: int
    first_head: int
    heads: int
    unit: int
    packed: bool


class Store:
    """The KV memory of one rank, as digests see it. `read`: its words; `prepare`: for a few, None: by `read`."""

    def __init__(self, layout: Layout, read: Read, prepare: Prepare | None = None) -> None:
        self.block_size, self.read = layout.block_size, read
        self.prepare: Prepare = prepare or self._later
        self.widths = np.array([plane.token_bytes for plane in layout.planes], dtype=np.int64)
        self.each_width = sorted(set(self.widths.tolist()))  # there is one in nearly every model
        table = [(plane.base, plane.block_stride, plane.head_stride) for plane in layout.planes]
        self._base, self._block_stride, self._head_stride = np.array(table, dtype=np.uint64).T

    def _later(self, addresses: U64, width: int, weights: U64) -> Callable[[], U64]:
        def sums() -> U64:
            found: U64 = self.read(addresses[None, :], width, weights[:, None])[0]
            return found

        return sums

    def places(self, planes: NDArray[np.int64], heads: NDArray[np.int64], block_ids: U64) -> U64:
        """Where the heads of these blocks begin; heads as stored here. Broadcasts."""
        head = self._head_stride[planes] * heads.astype(np.uint64)
        at: U64 = self._base[planes] + self._block_stride[planes] * block_ids + head
        return at


@dataclass(frozen=True, kw_only=True)
class Held:
    """What one side has of a scope. `head`: the first of the scope's heads among those stored here. `block_ids[0]` is
    logical block `first_block`."""

    store: Store
    head: int
    block_ids: Sequence[int]
    first_block: int

    def ids(self, logical: NDArray[np.int64]) -> U64:
        at = (logical - self.first_block).tolist()
        return np.array(itemgetter(*at)(self.block_ids), dtype=np.uint64).reshape(logical.shape)


@dataclass(frozen=True)
class Difference:
    """The first slice that differs, and how many of how many do."""

    plane: int
    start_token: int
    end_token: int
    computed: int
    landed: int
    count: int
    of: int


class Digest:
    """The digests of one registration, filled in by `add`. `values`: (planes looked at, slices per plane)."""

    def __init__(self, scope: Scope, depth: Verify, transfer_id: TransferId) -> None:
        self.scope, self.depth = scope, depth
        first, self._unit = scope.start_token // scope.unit, scope.unit
        planes = scope.planes
        self._foreseen: list[Reads] = []
        if depth == "full":
            last = (scope.end_token - 1) // scope.unit
            joined = 1
            while scope.planes * (last // joined - first // joined + 1) > MOST_SLICES and joined <= last:
                joined *= 2
            self._unit = scope.unit * joined
            per_plane = (scope.end_token - 1) // self._unit - scope.start_token // self._unit + 1
        else:
            self._sample = sampled(scope, transfer_id)
            planes, per_plane = len(self._sample.planes) // SAMPLES, SAMPLES
        self.values: U64 = np.zeros((planes, per_plane), dtype=np.uint64)

    def foresee(self, held: Held) -> None:
        """`sample`, the whole scope: what can be done before its KV is there. `add` follows, with the same `held`."""
        self._foreseen = self._reads(held, np.arange(len(self._sample.tokens)))

    def add(self, held: Held, span: Span) -> int:
        """What this side holds of `span`, each part of the scope once. How many bytes were looked at. Spans end at
        multiples of `unit`, or with the scope."""
        end_plane = self.scope.planes if span.end_plane is None else span.end_plane
        if self.depth != "full":
            return self._add_samples(held, span, end_plane)
        chosen, store = np.arange(span.first_plane, end_plane), held.store
        read = 0
        for width in store.each_width:
            planes = chosen[store.widths[chosen] == width]
            if len(planes):
                read += self._add_blocks(held, planes, width, span.start_token, span.end_token)
        return read

    def _add_blocks(self, held: Held, planes: NDArray[np.int64], width: int, start: int, end: int) -> int:
        scope, size = self.scope, held.store.block_size
        logical = np.arange(start // size, -(-end // size))
        tokens = logical[:, None] * size + np.arange(size)
        last = tokens[-1, -1] + 1 if scope.packed else end
        weights = np.where((tokens >= start) & (tokens < last), of_tokens(tokens), np.uint64(0))
        heads = np.arange(scope.heads)
        at = held.store.places(planes[:, None, None], heads[:, None] + held.head, held.ids(logical))
        sums = held.store.read(at.reshape(-1, len(logical)), width, weights).reshape(at.shape)
        by_block = (sums * of_heads(planes[:, None], heads + scope.first_head)[:, :, None]).sum(axis=1, dtype=np.uint64)
        group = logical * size // self._unit
        first = np.flatnonzero(np.diff(group, prepend=-1))
        columns = group[first] - scope.start_token // self._unit
        self.values[planes[:, None], columns] += np.add.reduceat(by_block, first, axis=1)
        return at.size * size * width

    def _add_samples(self, held: Held, span: Span, end_plane: int) -> int:
        all_of, scope = self._sample, self.scope
        planes = (span.first_plane, end_plane) == (0, scope.planes)
        if planes and span.start_token <= scope.start_token and span.end_token >= scope.end_token:
            reads = self._foreseen or self._reads(held, np.arange(len(all_of.tokens)))
        else:
            inside = (all_of.tokens >= span.start_token) & (all_of.tokens < span.end_token)
            inside &= (all_of.planes >= span.first_plane) & (all_of.planes < end_plane)
            reads = self._reads(held, np.flatnonzero(inside))
        values = self.values.reshape(-1)
        for slots, _, sums in reads:
            values[slots] = sums()
        return sum(width * len(slots) for slots, width, _ in reads)

    def _reads(self, held: Held, slots: NDArray[np.int64]) -> list[Reads]:
        store, all_of = held.store, self._sample
        planes, tokens, heads = all_of.planes[slots], all_of.tokens[slots], all_of.heads[slots]
        weights = all_of.weights[slots]
        if not len(tokens):
            return []
        widths = store.widths[planes]
        at = store.places(planes, heads + held.head, held.ids(tokens // store.block_size))
        at += (tokens % store.block_size * widths).astype(np.uint64)
        if len(store.each_width) == 1:
            width = store.each_width[0]
            return [(slots, width, store.prepare(at, width, weights))]
        found = [(width, np.flatnonzero(widths == width)) for width in store.each_width]
        return [(slots[of], width, store.prepare(at[of], width, weights[of])) for width, of in found if len(of)]

    def to_bytes(self) -> bytes:
        return self.values.astype("<u8").tobytes()

    def compare(self, computed: bytes) -> Difference | None:
        """With what the other side made of the same scope at the same depth. Raises `ValueError` if it is not that."""
        if len(computed) != 8 * self.values.size:
            raise ValueError(f"{len(computed)} bytes of digests, {8 * self.values.size} expected")
        if computed == self.to_bytes():
            return None
        theirs = np.frombuffer(computed, dtype="<u8").reshape(self.values.shape)
        bad = np.argwhere(theirs != self.values)
        row, slot = (int(index) for index in bad[0])
        plane, start, end = self._place(row, slot)
        pair = int(theirs[row, slot]), int(self.values[row, slot])
        return Difference(plane, start, end, *pair, len(bad), self.values.size)

    def _place(self, row: int, slot: int) -> tuple[int, int, int]:
        """(plane, first token, end) of one value."""
        if self.depth != "full":
            plane, token = (int(one[row * SAMPLES + slot]) for one in (self._sample.planes, self._sample.tokens))
            return plane, token, token + 1
        start = (self.scope.start_token // self._unit + slot) * self._unit
        return row, max(start, self.scope.start_token), min(start + self._unit, self.scope.end_token)


@dataclass(frozen=True, eq=False)
class Sample:
    """Where `sample` looks, SAMPLES for each plane looked at: planes, tokens, heads from the scope's first on,
    coefficients."""

    planes: NDArray[np.int64]
    tokens: NDArray[np.int64]
    heads: NDArray[np.int64]
    weights: U64


@functools.lru_cache(maxsize=1024)
def sampled(scope: Scope, transfer_id: TransferId) -> Sample:
    """Both sides draw the same. Kept for a while: whoever calls this before the KV comes saves the time afterwards."""
    seed = int.from_bytes(hashlib.blake2b(transfer_id.encode(), digest_size=8).digest())
    start, end, unit = scope.start_token, scope.end_token, scope.unit
    blocks = (end - 1) // unit - start // unit + 1
    count = min(scope.planes, max(-(-scope.planes // LEAST_SHARE), blocks))
    planes = ((np.arange(count) * scope.planes // count + seed % scope.planes) % scope.planes).astype(np.int64)
    steps = np.arange(count * SAMPLES * 2, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(seed)
    where, anywhere, which, heads = mixed(steps).reshape(SAMPLES * 2, count)
    edges = [(start, min(end, (start // unit + 1) * unit)), (max(start, (end - 1) // unit * unit), end)]
    firsts, ends = np.array(edges, dtype=np.uint64)[
        (np.arange(count, dtype=np.uint64) + np.uint64(seed)) % np.uint64(2)
    ].T
    at_edge = firsts + where % (ends - firsts)
    part, length = np.argsort(which).astype(np.uint64), np.uint64(end - start)
    spread = np.uint64(start) + (part * length + anywhere % length) // np.uint64(count)
    tokens = np.stack((at_edge, spread), axis=1).astype(np.int64).ravel()
    share = np.uint64(scope.heads)
    of_both = np.stack((heads % share, (heads >> np.uint64(32)) % share), axis=1).astype(np.int64).ravel()
    every = np.repeat(planes, SAMPLES)
    return Sample(every, tokens, of_both, of_tokens(tokens) * of_heads(every, of_both + scope.first_head))
