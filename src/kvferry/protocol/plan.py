"""From two paged KV memories to the list of memory regions to copy.

The unit is a piece: min(P's block size, D's block size) tokens of one head of one plane, contiguous on both sides.
A plan sorts the pieces by D's address and joins neighbours; `naive`, its plain twin, is the tests' oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import KVFerryError
from kvferry.protocol.layout import HeadShare
from kvferry.protocol.messages import Layout
from kvferry.protocol.stream import Span

U64 = NDArray[np.uint64]


class PlanError(KVFerryError):
    """A transfer was asked for that the two layouts or the given blocks cannot serve."""

    http_status = 502
    code = "bad_plan"


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Regions to copy: `nbytes[i]` bytes from address `src[i]` of P to address `dst[i]` of D. All (N,) uint64."""

    src: U64
    dst: U64
    nbytes: U64

    @property
    def total_bytes(self) -> int:
        return int(self.nbytes.sum())

    @property
    def descriptors(self) -> int:
        return len(self.nbytes)


class Route:
    """The way from one rank's KV memory to another's: what no request changes, made ready once.

    `src`, `dst`: layouts that passed `check_compatible`. Raises `PlanError` if the heads of `share` are not there.
    """

    def __init__(self, src: Layout, dst: Layout, share: HeadShare) -> None:
        self.src, self.dst, self.share = src, dst, share
        _check_fit(src, dst, share)
        self._piece = min(src.block_size, dst.block_size)
        self._source, self._target = _columns(src), _columns(dst)
        self._heads, self._nbytes = share.count, self._piece * self._target.token_bytes
        if _heads_adjoin(self._source, self._nbytes) and _heads_adjoin(self._target, self._nbytes):
            self._heads, self._nbytes = 1, self._nbytes * np.uint64(share.count)
        self._groups = _interleaving(src, self._source), _interleaving(dst, self._target)

    @property
    def piece_bytes(self) -> int:
        """Of one piece; 0 where the planes' pieces differ in size."""
        return int(self._nbytes[0]) if (self._nbytes == self._nbytes[0]).all() else 0

    def plan(
        self,
        src_block_ids: Sequence[int],
        dst_block_ids: Sequence[int],
        start_token: int,
        end_token: int,
        first_plane: int = 0,
        end_plane: int | None = None,
    ) -> Plan:
        """The fewest regions that bring tokens [start_token, end_token) of the heads of `share` from P to D.

        `src_block_ids[0]` holds P's logical block `start_token // src.block_size`, `dst_block_ids[0]` D's logical block
        `start_token // dst.block_size`; ids beyond `end_token` are ignored; D's ids must be distinct. The last piece
        moves whole, so up to a piece less one token past `end_token` is written in D's last block, and nothing after
        it. Planes [first_plane, end_plane) only; None: to the last.

        The result's regions are disjoint on D; those of one plane ascend there, and no two of them could be one, except
        across planes that do not interleave: those may be separate allocations that only happen to be neighbours, and
        the fabric cannot reach across two registrations.

        Raises `PlanError` if `start_token` is not a multiple of D's block size, an id that is needed is missing or out
        of range. Empty if `share.count == 0`, `start_token == end_token` or no plane.
        """
        planes = slice(first_plane, end_plane)
        if self.share.count == 0 or start_token == end_token or not self.src.planes[planes]:
            return _list_of([])
        self._check(src_block_ids, dst_block_ids, start_token, end_token)
        source, target, nbytes = self._source.part(planes), self._target.part(planes), self._nbytes[planes]
        groups = self._groups[0][planes], self._groups[1][planes]
        whole = self.src.block_size == self.dst.block_size and self._heads == 1
        one = _one_of(source, target, nbytes, groups, whole)
        if one is not None:
            source, target = source.part(slice(1)), target.part(slice(1))
        tokens = np.arange(start_token, end_token, self._piece, dtype=np.int64)
        from_ = _addresses(self.src, source, self.share.src_head_start, self._heads, src_block_ids, tokens)
        to = _addresses(self.dst, target, self.share.dst_head_start, self._heads, dst_block_ids, tokens)
        if one is None:
            return _merged(from_, to, nbytes, groups[0] * len(self.src.planes) + groups[1])
        first = _merged(from_, to, one[:1], groups[1][:1])
        if one[0] > nbytes[0] or len(nbytes) == 1:
            return first
        return _repeated(first, self._source.base[planes], self._target.base[planes])

    def source_pieces(self, block_ids: Sequence[int], span: Span) -> U64:
        """(planes * pieces * heads,) where each piece of `span` lies on P, in the order in which both sides count them.

        `block_ids` and errors as for `plan`.
        """
        return self._pieces(self.src, self._source, self.share.src_head_start, block_ids, span, "P")

    def target_pieces(self, block_ids: Sequence[int], span: Span) -> U64:
        """The same on D."""
        return self._pieces(self.dst, self._target, self.share.dst_head_start, block_ids, span, "D")

    def _pieces(
        self, layout: Layout, columns: _Columns, head: int, block_ids: Sequence[int], span: Span, side: str
    ) -> U64:
        _check_range(self.dst, span.start_token, span.end_token)
        _check_blocks(side, layout, block_ids, span.start_token, span.end_token)
        planes = columns.part(slice(span.first_plane, span.end_plane))
        tokens = np.arange(span.start_token, span.end_token, self._piece, dtype=np.int64)
        return _addresses(layout, planes, head, self._heads, block_ids, tokens).ravel()

    def _check(self, src_ids: Sequence[int], dst_ids: Sequence[int], start_token: int, end_token: int) -> None:
        _check_range(self.dst, start_token, end_token)
        _check_blocks("P", self.src, src_ids, start_token, end_token)
        _check_blocks("D", self.dst, dst_ids, start_token, end_token)


def plan(
    src: Layout,
    dst: Layout,
    share: HeadShare,
    src_block_ids: Sequence[int],
    dst_block_ids: Sequence[int],
    start_token: int,
    end_token: int,
    first_plane: int = 0,
    end_plane: int | None = None,
) -> Plan:
    """One plan, on a route that is needed only once."""
    route = Route(src, dst, share)
    return route.plan(src_block_ids, dst_block_ids, start_token, end_token, first_plane, end_plane)


def total_bytes(src: Layout, dst: Layout, share: HeadShare, start_token: int, end_token: int) -> int:
    """What `plan` moves in all planes, without planning it."""
    piece = min(src.block_size, dst.block_size)
    tokens = -(-(end_token - start_token) // piece) * piece
    return tokens * share.count * sum(plane.token_bytes for plane in dst.planes)


def regions_per_block(layout: Layout) -> int:
    """Into how many regions a lone block of all planes and heads falls: what a scattered cache costs per block."""
    share = HeadShare(p_rank=0, src_head_start=0, dst_head_start=0, count=layout.heads)
    return plan(layout, layout, share, (0,), (0,), 0, layout.block_size).descriptors


def naive(
    src: Layout,
    dst: Layout,
    share: HeadShare,
    src_block_ids: Sequence[int],
    dst_block_ids: Sequence[int],
    start_token: int,
    end_token: int,
) -> Plan:
    """What `Route.plan` does, one region per plane, head and piece, nothing joined. Same arguments and errors."""
    if share.count == 0 or start_token == end_token:
        return _list_of([])
    _check_fit(src, dst, share)
    _check_range(dst, start_token, end_token)
    _check_blocks("P", src, src_block_ids, start_token, end_token)
    _check_blocks("D", dst, dst_block_ids, start_token, end_token)
    piece = min(src.block_size, dst.block_size)
    regions = []
    for a, b in zip(src.planes, dst.planes, strict=True):
        for head in range(share.count):
            for token in range(start_token, end_token, piece):
                src_block = src_block_ids[token // src.block_size - start_token // src.block_size]
                dst_block = dst_block_ids[token // dst.block_size - start_token // dst.block_size]
                src_at = a.base + src_block * a.block_stride + (share.src_head_start + head) * a.head_stride
                dst_at = b.base + dst_block * b.block_stride + (share.dst_head_start + head) * b.head_stride
                src_at += token % src.block_size * a.token_bytes
                dst_at += token % dst.block_size * b.token_bytes
                regions.append((src_at, dst_at, piece * b.token_bytes))
    return _list_of(regions)


def _list_of(regions: list[tuple[int, int, int]]) -> Plan:
    table = np.array(regions, dtype=np.uint64).reshape(-1, 3)
    return Plan(src=table[:, 0].copy(), dst=table[:, 1].copy(), nbytes=table[:, 2].copy())


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """The planes of a layout as (planes,) uint64 columns, in bytes."""

    base: U64
    block_stride: U64
    head_stride: U64
    token_bytes: U64

    def part(self, planes: slice) -> _Columns:
        columns = (self.base, self.block_stride, self.head_stride, self.token_bytes)
        return _Columns(*(column[planes] for column in columns))

    @property
    def alike(self) -> bool:
        """But for where they begin."""
        columns = (self.block_stride, self.head_stride, self.token_bytes)
        return all(bool((column == column[0]).all()) for column in columns)


def _one_of(
    source: _Columns, target: _Columns, nbytes: U64, groups: tuple[NDArray[np.int64], NDArray[np.int64]], whole: bool
) -> U64 | None:
    """If one plane tells all: (1,) how many bytes one piece of it has then, else None.

    Either the planes of a block adjoin on both sides, and pieces are `whole` blocks: one piece holds them all. Or all
    planes are alike, and separate on D: each is planned as the first one.
    """
    if not (source.alike and target.alike):
        return None
    if whole and not groups[0].any() and not groups[1].any():
        gaps = [np.diff(side.base) == nbytes[:-1] for side in (source, target)]
        if all(gap.all() for gap in gaps):
            return np.array([nbytes.sum()], dtype=np.uint64)
    return nbytes[:1] if len(np.unique(groups[1])) == len(nbytes) else None


def _repeated(first: Plan, src: U64, dst: U64) -> Plan:
    """For every plane, given the first one's regions and where each begins. (planes,) uint64; differences may wrap."""
    from_, to = ((base - base[0])[:, None] + at for base, at in ((src, first.src), (dst, first.dst)))
    return Plan(src=from_.ravel(), dst=to.ravel(), nbytes=np.tile(first.nbytes, len(dst)))


def _columns(layout: Layout) -> _Columns:
    rows = [(p.base, p.block_stride, p.head_stride, p.token_bytes) for p in layout.planes]
    return _Columns(*np.array(rows, dtype=np.uint64).reshape(-1, 4).T)


def _heads_adjoin(planes: _Columns, head_bytes: U64) -> bool:
    """Whether each plane's heads lie without a gap, `head_bytes` apart; never so on a side with bigger blocks."""
    return bool(np.all(planes.head_stride == head_bytes))


def _addresses(
    layout: Layout, planes: _Columns, first_head: int, heads: int, block_ids: Sequence[int], tokens: NDArray[np.int64]
) -> U64:
    """(planes, pieces, heads) uint64: where the piece that begins at each of `tokens` lies."""
    logical = tokens // layout.block_size - tokens[0] // layout.block_size
    block = np.array(block_ids[: int(logical[-1]) + 1], dtype=np.uint64)[logical]
    offset = (tokens % layout.block_size).astype(np.uint64)
    head = np.arange(first_head, first_head + heads, dtype=np.uint64)
    if planes.alike and len(planes.base):
        block_at = planes.block_stride[0] * block + planes.token_bytes[0] * offset
        in_plane = block_at[:, None] + planes.head_stride[0] * head
        alike: U64 = planes.base[:, None, None] + in_plane
        return alike
    at = planes.base[:, None] + planes.block_stride[:, None] * block + planes.token_bytes[:, None] * offset
    result: U64 = at[:, :, None] + (planes.head_stride[:, None] * head)[:, None, :]
    return result


def _interleaving(layout: Layout, planes: _Columns) -> NDArray[np.int64]:
    """(planes,) int64: equal for planes whose address ranges overlap, which can only be parts of one allocation."""
    order = np.argsort(planes.base, kind="stable")
    last_head = planes.block_stride * (layout.num_blocks - 1) + planes.head_stride * (layout.heads - 1)
    end = planes.base + last_head + planes.token_bytes * layout.block_size
    reach = np.maximum.accumulate(end[order])
    group = np.zeros(len(order), dtype=np.int64)
    group[order[1:]] = np.cumsum(planes.base[order[1:]] >= reach[:-1])
    return group


def _merged(src: U64, dst: U64, nbytes: U64, group: NDArray[np.int64]) -> Plan:
    """Joins pieces that are neighbours on both sides. `src`, `dst`: (planes, ...); `nbytes`, `group`: (planes,)."""
    per_plane = src.size // len(nbytes)
    order = np.argsort(dst, axis=None, kind="stable")
    s, d = src.ravel()[order], dst.ravel()[order]
    plane = order // per_plane
    n, g = nbytes[plane], group[plane]
    joins = (s[:-1] + n[:-1] == s[1:]) & (d[:-1] + n[:-1] == d[1:]) & (g[:-1] == g[1:])
    first = np.flatnonzero(np.concatenate(([True], ~joins)))
    return Plan(src=s[first], dst=d[first], nbytes=np.add.reduceat(n, first))


def _check_fit(src: Layout, dst: Layout, share: HeadShare) -> None:
    small, large = sorted((src.block_size, dst.block_size))
    if small < 1 or large % small or not src.planes or len(src.planes) != len(dst.planes):
        raise PlanError("the two layouts do not fit each other", hint="check_compatible tells why")
    for side, layout, head in (("P", src, share.src_head_start), ("D", dst, share.dst_head_start)):
        if share.count < 0 or head < 0 or head + share.count > layout.heads:
            raise PlanError(f"{side} stores {layout.heads} heads, but the share names {share.count} from {head} on")


def _check_range(dst: Layout, start_token: int, end_token: int) -> None:
    if not 0 <= start_token < end_token:
        raise PlanError(f"tokens [{start_token}, {end_token}) are not a range")
    if start_token % dst.block_size:
        raise PlanError(f"start_token {start_token} is not a multiple of D's block size {dst.block_size}")


def _check_blocks(side: str, layout: Layout, block_ids: Sequence[int], start_token: int, end_token: int) -> None:
    need = (end_token - 1) // layout.block_size - start_token // layout.block_size + 1
    if len(block_ids) < need:
        raise PlanError(f"{side}: tokens [{start_token}, {end_token}) need {need} blocks, {len(block_ids)} are given")
    used = block_ids[:need]
    if min(used) < 0 or max(used) >= layout.num_blocks:
        wrong = next(i for i in used if not 0 <= i < layout.num_blocks)
        raise PlanError(f"{side}: block {wrong} is outside of its {layout.num_blocks} blocks")
