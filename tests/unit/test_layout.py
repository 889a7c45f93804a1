"""Which engines fit together, and who sends which heads to whom."""

from __future__ import annotations

import itertools
from collections import Counter

import msgspec
import pytest

from kvferry.errors import CompatError
from kvferry.protocol.layout import HeadShare, check_compatible, fan_in, legs_for
from kvferry.protocol.messages import Layout, Plane

SIZES = (1, 2, 4, 8)
HEADS = (1, 2, 3, 4, 8, 16)


def layout(**changes: object) -> Layout:
    plane = Plane(base=0, block_stride=1024, head_stride=512, token_bytes=32)
    good = Layout(
        planes=(plane, msgspec.structs.replace(plane, base=1 << 20)),
        num_blocks=8,
        block_size=16,
        heads=2,
        total_heads=4,
        divisible=True,
        device="cuda",
        fingerprint={"model": "qwen", "dtype": "bf16"},
    )
    return msgspec.structs.replace(good, **changes)


def with_token_bytes(*token_bytes: int) -> Layout:
    return layout(planes=tuple(msgspec.structs.replace(layout().planes[0], token_bytes=n) for n in token_bytes))


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        (layout(), layout(fingerprint={"model": "qwen", "dtype": "fp8"}), ("dtype", "'bf16'", "'fp8'")),
        (layout(), layout(fingerprint={"model": "qwen"}), ("dtype", "'bf16'", "'(absent)'")),
        (layout(), layout(planes=layout().planes[:1]), ("number of planes", "mine is 2", "theirs is 1")),
        (layout(), layout(total_heads=8), ("total_heads", "mine is 4", "theirs is 8")),
        (layout(), with_token_bytes(32, 64), ("planes[1].token_bytes", "mine is 32", "theirs is 64")),
        (layout(), layout(block_size=24), ("block_size", "mine is 16", "theirs is 24")),
        (layout(), layout(block_size=0), ("block_size", "mine is 16", "theirs is 0")),
        (layout(block_size=0), layout(block_size=0), ("block_size is 0 on both sides",)),
        (layout(), layout(block_size=32, divisible=False), ("block_size", "mine is 16", "theirs is 32")),
        (layout(divisible=False), layout(block_size=32), ("divisible=False", "mine is 16", "theirs is 32")),
    ],
)
def test_the_first_difference_is_named_with_both_values(mine: Layout, theirs: Layout, words: tuple[str, ...]) -> None:
    with pytest.raises(CompatError) as caught:
        check_compatible(mine, theirs)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    with pytest.raises(CompatError):
        check_compatible(theirs, mine)


def test_each_difference_comes_with_a_hint() -> None:
    with pytest.raises(CompatError) as caught:
        check_compatible(layout(), layout(block_size=24))
    assert "--block-size" in caught.value.hint


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (layout(), layout()),
        (layout(), layout(heads=4, num_blocks=99, device="cpu")),
        (layout(), layout(block_size=64)),
        (layout(block_size=64), layout()),
        (layout(divisible=False), layout(divisible=False)),
    ],
)
def test_what_may_differ(mine: Layout, theirs: Layout) -> None:
    check_compatible(mine, theirs)


def placeable(tp: int, total_heads: int) -> bool:
    return total_heads % tp == 0 or tp % total_heads == 0


PAIRS = [(p, d, h) for p, d, h in itertools.product(SIZES, SIZES, HEADS) if placeable(p, h) and placeable(d, h)]
PAIRS += [(3, 2, 6), (2, 3, 6), (12, 3, 6), (6, 12, 3), (6, 9, 3), (9, 6, 3)]


def stored(rank: int, tp: int, total_heads: int) -> list[int]:
    """The model's heads on a rank, by listing vLLM's rule from the head's side."""
    if tp <= total_heads:
        return [head for head in range(total_heads) if head // (total_heads // tp) == rank]
    return [head for head in range(total_heads) if rank // (tp // total_heads) == head]


@pytest.mark.parametrize(("p_tp", "d_tp", "total_heads"), PAIRS)
def test_every_head_arrives_once_and_every_p_rank_hears(p_tp: int, d_tp: int, total_heads: int) -> None:
    registrations: Counter[int] = Counter()
    served: dict[int, Counter[int]] = {head: Counter() for head in range(total_heads)}
    for d_rank in range(d_tp):
        mine = stored(d_rank, d_tp, total_heads)
        shares = fan_in(d_rank, d_tp, p_tp, total_heads)
        assert [s.p_rank for s in shares] == sorted({s.p_rank for s in shares}), "one registration per P rank"
        arrived: Counter[int] = Counter()
        for share in shares:
            registrations[share.p_rank] += 1
            theirs = stored(share.p_rank, p_tp, total_heads)
            for i in range(share.count):
                head = theirs[share.src_head_start + i]
                assert mine[share.dst_head_start + i] == head
                arrived[head] += 1
                served[head][share.p_rank] += 1
        assert arrived == Counter(mine)
    for p_rank in range(p_tp):
        legs = legs_for(p_rank, p_tp, d_tp, total_heads)
        assert registrations[p_rank] == legs >= 1
    for head, takers in served.items():
        holders = [p for p in range(p_tp) if head in stored(p, p_tp, total_heads)]
        loads = [takers[p] for p in holders]
        assert max(loads) - min(loads) <= 1, "the holders of a head share its takers evenly"


@pytest.mark.parametrize(("p_tp", "d_tp", "total_heads"), PAIRS)
def test_an_empty_registration_goes_only_to_a_p_rank_nobody_needs(p_tp: int, d_tp: int, total_heads: int) -> None:
    everyone = [share for d_rank in range(d_tp) for share in fan_in(d_rank, d_tp, p_tp, total_heads)]
    needed = {share.p_rank for share in everyone if share.count}
    empty = Counter(share.p_rank for share in everyone if not share.count)
    assert empty == Counter(set(range(p_tp)) - needed)


def share(p_rank: int, src: int, dst: int, count: int) -> HeadShare:
    return HeadShare(p_rank=p_rank, src_head_start=src, dst_head_start=dst, count=count)


def test_known_fans() -> None:
    assert fan_in(1, 2, 2, 8) == (share(1, 0, 0, 4),)
    assert fan_in(1, 2, 4, 8) == (share(2, 0, 0, 2), share(3, 0, 2, 2))
    assert fan_in(3, 4, 2, 8) == (share(1, 2, 0, 2),)
    assert fan_in(1, 3, 2, 6) == (share(0, 2, 0, 1), share(1, 0, 1, 1)), "a D rank astride two P ranks"
    assert fan_in(0, 1, 4, 2) == (share(0, 0, 0, 1), share(1, 0, 0, 0), share(2, 0, 1, 1), share(3, 0, 0, 0))
    assert fan_in(3, 4, 2, 1) == (share(1, 0, 0, 1),), "replicas of a single head on both sides"
    assert [legs_for(p, 2, 8, 1) for p in range(2)] == [4, 4]
    assert [legs_for(p, 8, 2, 1) for p in range(8)] == [1] * 8


@pytest.mark.parametrize(("d_tp", "p_tp", "total_heads"), [(2, 1, 3), (1, 2, 3), (4, 4, 6), (0, 1, 4), (1, 1, 0)])
def test_heads_that_vllm_could_not_place(d_tp: int, p_tp: int, total_heads: int) -> None:
    with pytest.raises(CompatError, match=f"total_heads={total_heads} cannot be placed on tp=") as caught:
        fan_in(0, d_tp, p_tp, total_heads)
    assert "total_heads % tp == 0 or tp % total_heads == 0" in caught.value.hint
    with pytest.raises(CompatError, match="cannot be placed"):
        legs_for(0, p_tp, d_tp, total_heads)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_does_not_exist(rank: int) -> None:
    with pytest.raises(CompatError, match=f"no rank {rank} in tp=2"):
        fan_in(rank, 2, 1, 8)
    with pytest.raises(CompatError, match=f"no rank {rank} in tp=2"):
        legs_for(rank, 2, 1, 8)
