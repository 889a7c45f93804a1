"""One sentence: after every D rank has executed its plans, D's memory is what it was, except that the pieces covering
[start_token, end_token) of its heads hold the KV of the request.

Memory is real bytes at made-up addresses. Every cache is a numpy view (block, head, token, byte) into a region; the
`Plane` handed to `plan` is read off the view's strides, while filling and checking go through the view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.protocol.layout import HeadShare, check_compatible, fan_in, legs_for
from kvferry.protocol.messages import Layout, Plane
from kvferry.protocol.plan import Plan, naive, plan

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


@dataclass
class Memory:
    """One rank: regions at addresses, the layout, and one view per plane, indexed [block, head, token, byte]."""

    regions: list[tuple[int, Bytes]]
    layout: Layout
    views: list[Bytes]

    def at(self, address: int, nbytes: int) -> Bytes:
        """The bytes there; they must lie in one region, as a fabric's registrations require."""
        for start, buffer in self.regions:
            if start <= address and address + nbytes <= start + buffer.size:
                return buffer[address - start : address - start + nbytes]
        raise AssertionError(f"[{address}, +{nbytes}) is in no single region")


@dataclass(frozen=True)
class Shape:
    """How one side lays its cache out. `interleave`: how many planes share a region block by block (1: none, 2: K and
    V of a layer, more: block-outermost). `apart`: one region per such group instead of one for all, `gap` bytes apart.
    """

    interleave: int
    apart: bool
    gap: int
    head_pad: int
    block_pad: int
    num_blocks: int
    block_size: int


def build(shape: Shape, token_bytes: Sequence[int], heads: int, total_heads: int, seed: int) -> Memory:
    """A rank's memory, filled with noise."""
    noise = np.random.default_rng(seed)
    everything = range(len(token_bytes))
    groups = [everything[i : i + shape.interleave] for i in everything[:: shape.interleave]]
    head_bytes = [shape.block_size * n + shape.head_pad for n in token_bytes]
    strides = [sum(heads * head_bytes[i] for i in group) + shape.block_pad for group in groups]
    sizes = [stride * shape.num_blocks for stride in strides]
    address, regions = 1 << 40, []
    for size in sizes if shape.apart else [sum(sizes)]:
        regions.append((address, noise.integers(0, 256, size, dtype=np.uint8)))
        address += size + shape.gap
    views, planes, offset = [], [], 0
    for number, group in enumerate(groups):
        start, buffer = regions[number if shape.apart else 0]
        inner = 0 if shape.apart else offset
        for i in group:
            steps = (strides[number], head_bytes[i], token_bytes[i], 1)
            dims = (shape.num_blocks, heads, shape.block_size, token_bytes[i])
            views.append(np.ndarray(dims, np.uint8, buffer.data, inner, steps))
            planes.append(Plane(base=start + inner, block_stride=steps[0], head_stride=steps[1], token_bytes=steps[2]))
            inner += heads * head_bytes[i]
        offset += sizes[number]
    layout = Layout(
        planes=tuple(planes),
        num_blocks=shape.num_blocks,
        block_size=shape.block_size,
        heads=heads,
        total_heads=total_heads,
        divisible=True,
        device="cpu",
        fingerprint={"model": "m"},
    )
    return Memory(regions, layout, views)


def kv(plane: int, head: int, token: int, nbytes: int) -> Bytes:
    """The KV of one token: depends on every coordinate."""
    value = plane * 1_000_003 + head * 10_007 + token * 101 + np.arange(nbytes) * 31
    return (value * 2_654_435_761 >> 7).astype(np.uint8)


@dataclass(frozen=True)
class Case:
    p_tp: int
    d_tp: int
    total_heads: int
    token_bytes: tuple[int, ...]
    p_shape: Shape
    d_shape: Shape
    p_ids: tuple[int, ...]
    d_ids: tuple[int, ...]
    start: int
    end: int


def block_ids(draw: st.DrawFn, first: int, end: int) -> tuple[tuple[int, ...], int]:
    """Distinct ids for logical blocks [first, end), in a run or scattered, perhaps one too many; and the pool's size,
    at times exactly filled, so that the last block of one plane and the first of the next are both in use.
    """
    count = end - first + draw(st.integers(0, 1))
    pool = max(2, count + draw(st.sampled_from([0, 0, 1, 3])))
    if draw(st.booleans()):
        begin = draw(st.integers(0, pool - count))
        return tuple(range(begin, begin + count)), pool
    return tuple(draw(st.permutations(range(pool)))[:count]), pool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tp, total_heads, flag = st.sampled_from([1, 2, 4, 8]), st.sampled_from([8, 4, 2, 1, 16]), st.booleans()
    token_bytes = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    piece, ratio = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 3, 4]))
    sizes = [piece, piece * ratio] if draw(flag) else [piece * ratio, piece]
    start = draw(st.integers(0, 4)) * sizes[1]
    end = start + draw(st.integers(1, 5 * max(sizes)))
    pads = st.sampled_from([0, 0, 1])
    looks = st.tuples(st.sampled_from([1, 2, 4]), flag, st.sampled_from([0, 0, 32]), pads, pads)
    p_look = draw(looks)
    d_look = p_look if draw(flag) else draw(looks)
    p_ids, p_pool = block_ids(draw, start // sizes[0], (end - 1) // sizes[0] + 1)
    d_ids, d_pool = block_ids(draw, start // sizes[1], (end - 1) // sizes[1] + 1)
    p_shape, d_shape = Shape(*p_look, p_pool, sizes[0]), Shape(*d_look, d_pool, sizes[1])
    return Case(draw(tp), draw(tp), draw(total_heads), token_bytes, p_shape, d_shape, p_ids, d_ids, start, end)


def heads_of(rank: int, tp: int, total: int) -> list[int]:
    return list(range(rank * total // tp, rank * total // tp + max(1, total // tp)))


def side(case: Case, shape: Shape, tp: int) -> list[Memory]:
    heads = max(1, case.total_heads // tp)
    return [build(shape, case.token_bytes, heads, case.total_heads, seed=rank) for rank in range(tp)]


def store(memory: Memory, heads: Sequence[int], ids: Sequence[int], start: int, end: int) -> None:
    """Writes the request's KV of tokens [start, end) through the views; ids[0] is the block `start` lies in."""
    size = memory.layout.block_size
    for plane, view in enumerate(memory.views):
        for local, head in enumerate(heads):
            for token in range(start, end):
                block = ids[token // size - start // size]
                view[block, local, token % size] = kv(plane, head, token, view.shape[3])


def byte_pairs(made: Plan) -> Bytes:
    """(bytes, 2): each copied byte's address in P and in D, ascending in D."""
    rows = [np.stack([s + np.arange(n), d + np.arange(n)], 1) for s, d, n in regions_of(made)]
    table = np.concatenate([np.empty((0, 2), np.int64), *rows])
    return table[np.argsort(table[:, 1], kind="stable")]


def regions_of(made: Plan) -> list[tuple[int, int, int]]:
    return list(zip(made.src.tolist(), made.dst.tolist(), made.nbytes.tolist(), strict=True))


def check_shape(case: Case, p: Memory, d: Memory, share: HeadShare, made: Plan, reference: Plan) -> None:
    """The list itself: same bytes as the reference, disjoint in D, nothing left to join, exactly the bytes due."""
    assert np.array_equal(byte_pairs(made), byte_pairs(reference))
    assert np.all(made.dst[:-1] + made.nbytes[:-1] <= made.dst[1:])
    piece = min(p.layout.block_size, d.layout.block_size)
    pieces = -(-(case.end - case.start) // piece)
    assert made.total_bytes == pieces * piece * sum(case.token_bytes) * share.count == int(reference.nbytes.sum())
    assert made.descriptors == len(made.src) == len(made.dst) == len(made.nbytes) <= reference.descriptors
    begins = {(s, d) for s, d, _ in regions_of(made)}
    borders = [firsts_of_groups(case.p_shape, p), firsts_of_groups(case.d_shape, d)]
    for s, t, n in regions_of(made):
        if (s + n, t + n) in begins:
            assert s + n in borders[0] or t + n in borders[1], "two regions could have been one"


def firsts_of_groups(shape: Shape, memory: Memory) -> set[int]:
    """Where a plane begins that does not share blocks with the plane before it: no region reaches across."""
    return {plane.base for plane in memory.layout.planes[:: shape.interleave]}


@settings(max_examples=400, deadline=None)
@given(cases())
def test_every_d_rank_gets_exactly_its_kv(case: Case) -> None:
    piece = min(case.p_shape.block_size, case.d_shape.block_size)
    p_side, d_side = side(case, case.p_shape, case.p_tp), side(case, case.d_shape, case.d_tp)
    whole = case.start + -(-(case.end - case.start) // piece) * piece
    for rank, memory in enumerate(p_side):
        store(memory, heads_of(rank, case.p_tp, case.total_heads), case.p_ids, case.start, whole)
    heard = [0] * case.p_tp
    for rank, d in enumerate(d_side):
        heads = heads_of(rank, case.d_tp, case.total_heads)
        expected = build(case.d_shape, case.token_bytes, d.layout.heads, case.total_heads, seed=rank)
        store(expected, heads, case.d_ids, case.start, whole)
        written: list[Bytes] = []
        for share in fan_in(rank, case.d_tp, case.p_tp, case.total_heads):
            heard[share.p_rank] += 1
            p = p_side[share.p_rank]
            check_compatible(d.layout, p.layout)
            request = (p.layout, d.layout, share, case.p_ids, case.d_ids, case.start, case.end)
            made = plan(*request)
            check_shape(case, p, d, share, made, naive(*request))
            for source, target, nbytes in regions_of(made):
                d.at(target, nbytes)[:] = p.at(source, nbytes)
            written.append(byte_pairs(made)[:, 1])
        each = np.concatenate(written)
        assert len(np.unique(each)) == len(each), "two P ranks write the same byte of D"
        for (_, got), (_, want) in zip(d.regions, expected.regions, strict=True):
            assert np.array_equal(got, want)
    assert heard == [legs_for(rank, case.p_tp, case.d_tp, case.total_heads) for rank in range(case.p_tp)]
