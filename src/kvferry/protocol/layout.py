"""Which engines can exchange KV, and which KV heads go from which prefill rank (P) to which decode rank (D).

vLLM's rule for placing `total_heads` KV heads on `tp` ranks: where `tp <= total_heads`, rank r holds the
`total_heads // tp` heads from `r * total_heads // tp` on; where `tp > total_heads`, it holds one head, and
`tp // total_heads` neighbouring ranks are replicas of each other.
"""

from __future__ import annotations

import msgspec

from kvferry.errors import CompatError
from kvferry.protocol.messages import Layout

_MOST_ADDRESS = 1 << 63


class HeadShare(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one D rank takes from P rank `p_rank`: `count` heads, which are the heads from `src_head_start` on among
    those P stores and from `dst_head_start` on among those D stores. `count == 0`: D takes nothing, but registers, so
    that this P rank learns the transfer's fate too.
    """

    p_rank: int
    src_head_start: int
    dst_head_start: int
    count: int


def check_sane(layout: Layout) -> None:
    """Raises `CompatError` for memory that no rank can have, before anything is reckoned with its numbers."""
    if layout.heads > layout.total_heads:
        raise CompatError(f"heads: {layout.heads} on one rank, of {layout.total_heads} in all")
    for index, plane in enumerate(layout.planes):
        blocks, heads = (layout.num_blocks - 1) * plane.block_stride, (layout.heads - 1) * plane.head_stride
        end = plane.base + blocks + heads + layout.block_size * plane.token_bytes
        if not plane.base or not plane.token_bytes or end > _MOST_ADDRESS:
            raise CompatError(f"planes[{index}] is no memory: it begins at {plane.base:#x} and would end at {end:#x}")


def check_compatible(mine: Layout, theirs: Layout) -> None:
    """Raises `CompatError` naming the first field in which two ranks' memory differs so that KV cannot be exchanged."""
    for name in sorted(mine.fingerprint.keys() | theirs.fingerprint.keys()):
        _same(name, mine.fingerprint.get(name, "(absent)"), theirs.fingerprint.get(name, "(absent)"))
    _same("number of planes", len(mine.planes), len(theirs.planes), "serve one model with one attention backend")
    _same("total_heads", mine.total_heads, theirs.total_heads, "serve the same model on both sides")
    for index, (a, b) in enumerate(zip(mine.planes, theirs.planes, strict=True)):
        hint = "use the same model, dtype and --kv-cache-dtype on both sides"
        _same(f"planes[{index}].token_bytes", a.token_bytes, b.token_bytes, hint)
    small, large = sorted((mine.block_size, theirs.block_size))
    if small < 1 or large % small:
        hint = "choose --block-size so that one is a whole multiple of the other"
        _same("block_size", mine.block_size, theirs.block_size, hint)
        raise CompatError(f"block_size is {small} on both sides, but must be at least 1")
    if not (mine.divisible and theirs.divisible):
        hint = "a side packs the tokens of a block together (divisible=False): give both the same --block-size"
        _same("block_size", mine.block_size, theirs.block_size, hint)


def fan_in(d_rank: int, d_tp: int, p_tp: int, total_heads: int) -> tuple[HeadShare, ...]:
    """The P ranks that D rank `d_rank` registers with, ascending, and what it takes from each.

    Over all D ranks: each head of each D rank comes from exactly one P rank; the D ranks that need one head are spread
    evenly over the P ranks that hold it; each P rank hears from at least one D rank. Raises `CompatError` where vLLM
    could not place `total_heads` heads on one of the two sides, or there is no such rank.
    """
    _check_rank(d_rank, d_tp, total_heads)
    _check_rank(0, p_tp, total_heads)
    shares = (_share(p_rank, p_tp, d_rank, d_tp, total_heads) for p_rank in range(p_tp))
    return tuple(share for share in shares if share is not None)


def legs_for(p_rank: int, p_tp: int, d_tp: int, total_heads: int) -> int:
    """How many D ranks register with P rank `p_rank` for each transfer: 1 or more. Raises like `fan_in`."""
    _check_rank(p_rank, p_tp, total_heads)
    _check_rank(0, d_tp, total_heads)
    return sum(_share(p_rank, p_tp, d_rank, d_tp, total_heads) is not None for d_rank in range(d_tp))


def _share(p_rank: int, p_tp: int, d_rank: int, d_tp: int, total_heads: int) -> HeadShare | None:
    """What this D rank takes from this P rank; None: they do not talk."""
    p_first, p_end = heads_of(p_rank, p_tp, total_heads)
    d_first, d_end = heads_of(d_rank, d_tp, total_heads)
    first, end = max(p_first, d_first), min(p_end, d_end)
    if first >= end:
        return None
    p_replicas, d_replicas = max(1, p_tp // total_heads), max(1, d_tp // total_heads)
    p_replica, d_replica = p_rank % p_replicas, d_rank % d_replicas
    if d_replicas >= p_replicas:
        if p_replica != d_replica * p_replicas // d_replicas:
            return None
    else:
        # More holders than takers: each taker calls on a run of holders and takes from the first.
        if p_replica * d_replicas // p_replicas != d_replica:
            return None
        if p_replica and (p_replica - 1) * d_replicas // p_replicas == d_replica:
            return HeadShare(p_rank=p_rank, src_head_start=0, dst_head_start=0, count=0)
    return HeadShare(p_rank=p_rank, src_head_start=first - p_first, dst_head_start=first - d_first, count=end - first)


def heads_of(rank: int, tp: int, total_heads: int) -> tuple[int, int]:
    """The model's heads [first, end) that a rank stores."""
    first = rank * total_heads // tp
    return first, first + max(1, total_heads // tp)


def _check_rank(rank: int, tp: int, total_heads: int) -> None:
    if tp < 1 or total_heads < 1 or (total_heads % tp and tp % total_heads):
        raise CompatError(
            f"total_heads={total_heads} cannot be placed on tp={tp} ranks",
            hint="vLLM requires total_heads % tp == 0 or tp % total_heads == 0: choose another --tensor-parallel-size",
        )
    if not 0 <= rank < tp:
        raise CompatError(f"there is no rank {rank} in tp={tp}", hint="ranks count from 0 to tp - 1")


def _same(name: str, mine: object, theirs: object, hint: str = "") -> None:
    if mine != theirs:
        hint = hint or f"start both engines so that {name} is equal"
        raise CompatError(f"{name} differs: mine is {mine!r}, theirs is {theirs!r}", hint=hint)
