"""Known answers of the planner, its refusals, and how far it joins regions on layouts of real size."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest

from kvferry.errors import KVFerryError
from kvferry.protocol.layout import HeadShare
from kvferry.protocol.messages import Layout, Plane
from kvferry.protocol.plan import Plan, PlanError, naive, plan, regions_per_block, total_bytes

Planner = Callable[[Layout, Layout, HeadShare, Sequence[int], Sequence[int], int, int], Plan]
TOKEN = 10
both = pytest.mark.parametrize("make", [plan, naive])


def layout(
    bases: Sequence[int], *, block_size: int = 4, heads: int = 1, num_blocks: int = 8, blocks: int = 1
) -> Layout:
    """Planes at `bases`; `blocks`: the distance between two blocks of a plane, in blocks."""
    head = block_size * TOKEN
    return Layout(
        planes=tuple(
            Plane(base=base, block_stride=blocks * heads * head, head_stride=head, token_bytes=TOKEN) for base in bases
        ),
        num_blocks=num_blocks,
        block_size=block_size,
        heads=heads,
        total_heads=heads,
        divisible=True,
        device="cpu",
        fingerprint={},
    )


def share(count: int = 1, src: int = 0, dst: int = 0) -> HeadShare:
    return HeadShare(p_rank=0, src_head_start=src, dst_head_start=dst, count=count)


def regions(made: Plan) -> list[tuple[int, int, int]]:
    assert made.src.dtype == made.dst.dtype == made.nbytes.dtype == np.uint64
    return list(zip(made.src.tolist(), made.dst.tolist(), made.nbytes.tolist(), strict=True))


def test_consecutive_blocks_join_and_a_gap_on_one_side_does_not() -> None:
    p, d = layout([1000]), layout([5000])
    assert regions(plan(p, d, share(), [2, 3, 4], [0, 1, 2], 0, 12)) == [(1080, 5000, 120)]
    assert regions(plan(p, d, share(), [2, 3, 7], [0, 1, 2], 0, 12)) == [(1080, 5000, 80), (1280, 5080, 40)]
    assert regions(plan(p, d, share(), [2, 3, 4], [0, 1, 7], 0, 12)) == [(1080, 5000, 80), (1160, 5280, 40)]
    assert regions(plan(p, d, share(), [7, 2, 3], [3, 0, 1], 0, 12)) == [(1080, 5000, 80), (1280, 5120, 40)]


@both
def test_the_last_piece_moves_whole_and_nothing_after_it(make: Planner) -> None:
    made = make(layout([0]), layout([5000], block_size=8), share(), [1, 3], [2], 8, 13)
    assert regions(made) == [(40, 5160, 40), (120, 5200, 40)]
    assert regions(make(layout([0]), layout([5000], block_size=8), share(), [1, 3], [2], 8, 12)) == [(40, 5160, 40)]
    assert (made.descriptors, made.total_bytes) == (2, 80)


@both
def test_a_prefix_can_end_in_the_middle_of_the_first_source_block(make: Planner) -> None:
    made = make(layout([0], block_size=8), layout([5000]), share(), [3, 1], [6, 0], 4, 12)
    assert sorted(regions(made)) == [(80, 5000, 40), (280, 5240, 40)]


def test_heads_join_where_they_adjoin_on_both_sides() -> None:
    p, d = layout([0], heads=4), layout([5000], heads=2)
    assert regions(plan(p, d, share(2, src=1), [5], [3], 0, 4)) == [(5 * 160 + 40, 5000 + 3 * 80, 80)]
    four = layout([5000], heads=4)
    assert regions(plan(p, four, share(2, src=1, dst=2), [5, 6], [3, 4], 0, 8)) == [(840, 5560, 80), (1000, 5720, 80)]


def test_heads_with_a_gap_on_one_side_stay_apart() -> None:
    tight = layout([0], heads=2)
    padded = msgspec.structs.replace(tight, planes=(Plane(base=5000, block_stride=96, head_stride=48, token_bytes=10),))
    assert regions(plan(tight, padded, share(2), [1], [2], 0, 4)) == [(80, 5192, 40), (120, 5240, 40)]
    assert regions(plan(padded, tight, share(2), [2], [1], 0, 4)) == [(5192, 80, 40), (5240, 120, 40)]


def test_planes_of_one_block_join_when_blocks_are_outermost() -> None:
    p, d = (layout([base, base + 40, base + 80], blocks=3) for base in (0, 5000))
    assert regions(plan(p, d, share(), [4, 5, 1], [2, 3, 6], 0, 12)) == [(480, 5240, 240), (120, 5720, 120)]


def test_allocations_that_are_neighbours_by_chance_do_not_join() -> None:
    """A fabric registers allocations one by one, and cannot reach across two of them."""
    p, d = layout([0, 320]), layout([5000, 5320])
    made = plan(p, d, share(), range(8), range(8), 0, 32)
    assert regions(made) == [(0, 5000, 320), (320, 5320, 320)]


def test_two_block_outermost_allocations_that_are_neighbours_do_not_join() -> None:
    p, d = (layout([base, base + 40, base + 640, base + 680], blocks=2) for base in (0, 5000))
    made = plan(p, d, share(), range(8), range(8), 0, 32)
    assert regions(made) == [(0, 5000, 640), (640, 5640, 640)]


def test_high_addresses_keep_every_bit() -> None:
    top = (1 << 64) - 4096
    assert regions(plan(layout([top]), layout([1 << 53 | 1]), share(), [1], [0], 0, 4)) == [(top + 40, 1 << 53 | 1, 40)]


@both
@pytest.mark.parametrize(("count", "start", "end"), [(0, 0, 8), (1, 8, 8), (1, 7, 7), (0, 3, 1)])
def test_nothing_to_move(make: Planner, count: int, start: int, end: int) -> None:
    made = make(layout([0]), layout([5000]), share(count), [], [], start, end)
    assert (regions(made), made.total_bytes, made.descriptors) == ([], 0, 0)


@both
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"start_token": 4, "dst": layout([0], block_size=8)}, "start_token 4 is not a multiple of D's block size 8"),
        ({"src_block_ids": [0]}, r"P: tokens \[0, 8\) need 2 blocks, 1 are given"),
        ({"dst_block_ids": []}, r"D: tokens \[0, 8\) need 2 blocks, 0 are given"),
        ({"src_block_ids": [0, 8]}, "P: block 8 is outside of its 8 blocks"),
        ({"dst_block_ids": [-1, 0]}, "D: block -1 is outside of its 8 blocks"),
        ({"start_token": 8, "end_token": 4}, r"tokens \[8, 4\) are not a range"),
        ({"start_token": -4}, r"tokens \[-4, 8\) are not a range"),
        ({"share": share(2)}, "P stores 1 heads, but the share names 2 from 0 on"),
        ({"share": share(1, dst=1)}, "D stores 1 heads, but the share names 1 from 1 on"),
        ({"share": share(-1)}, "the share names -1"),
        ({"dst": layout([0], block_size=6)}, "do not fit each other"),
        ({"dst": layout([0, 999])}, "do not fit each other"),
    ],
)
def test_refusals(make: Planner, changes: dict[str, object], words: str) -> None:
    good = {"src": layout([0]), "dst": layout([5000]), "share": share(), "src_block_ids": [0, 1]}
    good |= {"dst_block_ids": [0, 1], "start_token": 0, "end_token": 8}
    assert make(**good).total_bytes == 80
    with pytest.raises(PlanError, match=words) as caught:
        make(**(good | changes))
    assert isinstance(caught.value, KVFerryError)


@both
def test_ids_beyond_the_end_are_ignored(make: Planner) -> None:
    assert regions(make(layout([0]), layout([5000]), share(), [2, 99], [1, -1], 0, 3)) == [(80, 5040, 40)]


def test_a_long_prompt_on_a_fresh_pool_is_one_region_per_plane() -> None:
    p, d = (layout([i << 30 for i in range(1, 65)], num_blocks=2048, heads=8) for _ in range(2))
    made = plan(p, d, share(8), range(1024), range(512, 1536), 0, 4096)
    assert (made.descriptors, made.total_bytes) == (64, 64 * 1024 * 8 * 4 * TOKEN)


def test_a_long_prompt_on_a_worn_pool_is_one_region_per_plane_and_run() -> None:
    p, d = (layout([i << 30 for i in range(1, 65)], num_blocks=2048) for _ in range(2))
    ids = random.Random(7).sample(range(0, 2048, 2), 1024)
    made = plan(p, d, share(), ids, ids, 0, 4096)
    assert made.descriptors == 64 * 1024
    assert made.total_bytes == 64 * 1024 * 4 * TOKEN
    halves = [block for even in sorted(ids)[:512] for block in (even, even + 1)]
    assert plan(p, d, share(), halves, halves, 0, 4096).descriptors == 64


@pytest.mark.parametrize("interleaved", [False, True], ids=["LBHNC", "BLHNC"])
def test_a_lone_block_is_one_region_where_blocks_are_outermost(interleaved: bool) -> None:
    block, planes = 4 * TOKEN, 6
    if interleaved:
        made = layout([index * block for index in range(planes)], blocks=planes)
    else:
        made = layout([index * 8 * block for index in range(planes)])
    assert regions_per_block(made) == (1 if interleaved else planes)


def test_planes_can_be_planned_apart_and_together_are_the_whole() -> None:
    block = 4 * TOKEN
    source, target = (
        layout([index * 8 * block for index in range(5)]),
        layout([10_000 + index * block for index in range(5)], blocks=5),
    )
    ids, onto = (3, 0, 5), (7, 2, 4)
    whole = plan(source, target, share(), ids, onto, 0, 11)
    parts = [plan(source, target, share(), ids, onto, 0, 11, first, end) for first, end in ((0, 1), (1, 4), (4, None))]

    def cells(*made: Plan) -> set[tuple[int, int]]:
        return {(s + at, d + at) for one in made for s, d, n in regions(one) for at in range(n)}

    assert cells(*parts) == cells(whole)
    assert sum(one.total_bytes for one in parts) == whole.total_bytes == total_bytes(source, target, share(), 0, 11)
    assert plan(source, target, share(), ids, onto, 0, 11, 2, 2).descriptors == 0
