"""One sentence: two sides have equal digests if, and but for odd chances of 2**-32 only if, they hold the same KV,
however each lays it out, and in whatever parts it is added up.

Memory is real: every plane is a view into an array of its own, whose strides its `Plane` is read off.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.ids import TransferId
from kvferry.protocol.digest import (
    MOST_SLICES,
    SAMPLES,
    Digest,
    Held,
    Scope,
    Store,
    of_heads,
    of_tokens,
    sampled,
    within_token,
    word_type,
)
from kvferry.protocol.layout import fan_in, heads_of
from kvferry.protocol.messages import Layout, Plane, Verify
from kvferry.protocol.stream import Span
from kvferry.transfer.words import DeviceWords, extent, store_of

TID = TransferId("t")


@dataclass
class Side:
    """A rank's memory. `views`: one per plane, [block, head, token, byte]. `ids`: of logical block 0 on."""

    views: list[np.ndarray]
    layout: Layout
    ids: list[int]

    def held(self, head: int, start: int = 0) -> Held:
        first = start // self.layout.block_size
        return Held(store=store_of(self.layout), head=head, block_ids=self.ids[first:], first_block=first)

    def cell(self, plane: int, head: int, token: int) -> np.ndarray:
        size = self.layout.block_size
        return self.views[plane][self.ids[token // size], head, token % size]


def side(
    draw_from: np.random.Generator, widths: tuple[int, ...], heads: int, block_size: int, tokens: int, pad: int = 0
) -> Side:
    """Noise everywhere. `pad`: bytes between heads, between blocks, and before the first one."""
    count = -(-tokens // block_size)
    pool = count + 3
    views, planes = [], []
    for width in widths:
        head_bytes = block_size * width + pad
        block_bytes = heads * head_bytes + pad
        raw = draw_from.integers(0, 256, pad + pool * block_bytes, dtype=np.uint8)
        strides = (block_bytes, head_bytes, width, 1)
        view = np.ndarray((pool, heads, block_size, width), np.uint8, raw.data, pad, strides)
        views.append(view)
        planes.append(Plane(base=view.ctypes.data, block_stride=strides[0], head_stride=strides[1], token_bytes=width))
    layout = Layout(
        planes=tuple(planes),
        num_blocks=pool,
        block_size=block_size,
        heads=heads,
        total_heads=heads,
        divisible=True,
        device="cpu",
        fingerprint={},
    )
    return Side(views, layout, draw_from.permutation(pool)[:count].tolist())


@dataclass(frozen=True)
class Case:
    seed: int
    widths: tuple[int, ...]
    total_heads: int
    p_tp: int
    d_tp: int
    sizes: tuple[int, int]
    pads: tuple[int, int]
    start: int
    end: int
    cuts: tuple[int, ...]
    depth: Verify


@st.composite
def cases(draw: st.DrawFn) -> Case:
    total = draw(st.sampled_from([1, 2, 4]))
    tps = [tp for tp in (1, 2, 4) if total % tp == 0 or tp % total == 0]
    small = draw(st.sampled_from([1, 2, 3, 4]))
    sizes = draw(st.permutations([small, small * draw(st.sampled_from([1, 2, 4]))]))
    end = draw(st.integers(1, 40))
    start = draw(st.integers(0, (end - 1) // sizes[1])) * sizes[1]
    unit = max(sizes)
    bounds = range((start // unit + 1) * unit, end, unit)
    return Case(
        seed=draw(st.integers(0, 1 << 30)),
        widths=tuple(draw(st.lists(st.sampled_from([1, 2, 3, 6, 4, 8, 16, 24]), min_size=1, max_size=4))),
        total_heads=total,
        p_tp=draw(st.sampled_from(tps)),
        d_tp=draw(st.sampled_from(tps)),
        sizes=(sizes[0], sizes[1]),
        pads=(draw(st.sampled_from([0, 1, 8])), draw(st.sampled_from([0, 3, 8]))),
        start=start,
        end=end,
        cuts=tuple(sorted(draw(st.sets(st.sampled_from(bounds), max_size=4)))) if bounds else (),
        depth=draw(st.sampled_from(["sample", "full"])),
    )


def naive(scope: Scope, held: Side, head: int) -> int:
    """All of the scope as one number, word by word."""
    total = 0
    for plane in range(scope.planes):
        width = held.layout.planes[plane].token_bytes
        low, high = within_token(width)
        for h in range(scope.heads):
            by_head = int(of_heads(np.array([plane]), np.array([scope.first_head + h]))[0])
            for token in range(scope.start_token, scope.end_token):
                cell = held.cell(plane, head + h, token)
                by_token = int(of_tokens(np.array([token]))[0])
                for index, word in enumerate(np.frombuffer(cell.tobytes(), word_type(width)).tolist()):
                    found = word * int(low[index])
                    if word_type(width).itemsize == 8:
                        found += (word >> 32) * int(high[index])
                    total += found * by_token * by_head
    return total % (1 << 64)


def spans(case: Case, planes: int, draw: np.random.Generator) -> list[Span]:
    """The scope in rectangles, in any order."""
    edges = [case.start, *case.cuts, case.end]
    out = []
    for a, b in itertools.pairwise(edges):
        middle = int(draw.integers(0, planes + 1))
        out += [Span(a, b, 0, middle), Span(a, b, middle)] if 0 < middle < planes else [Span(a, b)]
    return [out[i] for i in draw.permutation(len(out))]


@given(cases())
@settings(max_examples=150)
def test_both_sides_have_equal_digests_however_they_lay_it_out(case: Case) -> None:
    draw = np.random.default_rng(case.seed)
    kv = [draw.integers(0, 256, (case.total_heads, case.end, width), dtype=np.uint8) for width in case.widths]
    made: dict[tuple[str, int], tuple[Side, int]] = {}
    for who, tp, size, pad in (
        ("P", case.p_tp, case.sizes[0], case.pads[0]),
        ("D", case.d_tp, case.sizes[1], case.pads[1]),
    ):
        for rank in range(tp):
            first, end = heads_of(rank, tp, case.total_heads)
            one = side(draw, case.widths, end - first, size, case.end, pad)
            made[who, rank] = one, first
            for plane, values in enumerate(kv):
                for token in range(case.end):
                    for head in range(end - first):
                        one.cell(plane, head, token)[:] = values[first + head, token]
    for d_rank in range(case.d_tp):
        for share in fan_in(d_rank, case.d_tp, case.p_tp, case.total_heads):
            if not share.count:
                continue
            source, first = made["P", share.p_rank]
            target, _ = made["D", d_rank]
            scope = Scope(
                start_token=case.start,
                end_token=case.end,
                planes=len(case.widths),
                first_head=first + share.src_head_start,
                heads=share.count,
                unit=max(case.sizes),
                packed=False,
            )
            computed, landed = Digest(scope, case.depth, TID), Digest(scope, case.depth, TID)
            for span in spans(case, len(case.widths), draw):
                computed.add(source.held(share.src_head_start), span)
            landed.add(target.held(share.dst_head_start, case.start), Span(case.start, case.end))
            assert landed.compare(computed.to_bytes()) is None
            if case.depth == "full":
                assert int(landed.values.sum(dtype=np.uint64)) == naive(scope, target, share.dst_head_start)


SCOPE = Scope(start_token=4, end_token=23, planes=3, first_head=2, heads=2, unit=8, packed=False)
WIDTHS = (16, 8, 6)


def digest_of(one: Side, depth: Verify = "full", scope: Scope = SCOPE) -> Digest:
    made = Digest(scope, depth, TID)
    made.add(one.held(1, scope.start_token), Span(scope.start_token, scope.end_token))
    return made


def test_every_flipped_bit_is_found_and_named() -> None:
    """Each bit of each token that was asked for; none outside of it."""
    one = side(np.random.default_rng(1), WIDTHS, 4, 4, 24)
    right = digest_of(one).to_bytes()
    for plane, width in enumerate(WIDTHS):
        for head, token in itertools.product(range(4), range(24)):
            cell = one.cell(plane, head, token)
            for bit in range(8 * width) if token == 5 else (0, 31, 8 * width - 1):
                cell[bit // 8] ^= 1 << bit % 8
                found = digest_of(one).compare(right)
                cell[bit // 8] ^= 1 << bit % 8
                if head not in (1, 2) or not 4 <= token < 23:
                    assert found is None
                    continue
                assert found is not None and found.count == 1, (plane, head, token, bit)
                assert found.plane == plane and found.start_token <= token < found.end_token
                assert found.computed != found.landed


@pytest.mark.parametrize(
    "what", ["tokens", "blocks", "heads", "planes", "zeros", "ones", "repeated", "signs", "shifted", "top bits"]
)
def test_what_is_in_the_wrong_place_or_stale_is_found(what: str) -> None:
    one = side(np.random.default_rng(2), (16, 16, 16), 4, 4, 24)
    right = digest_of(one).to_bytes()
    a, b = one.views[1], one.views[2]
    x, y = one.ids[2], one.ids[3]
    if what == "tokens":
        a[x, 1, [0, 1]] = a[x, 1, [1, 0]]
    elif what == "blocks":
        a[[x, y]] = a[[y, x]]
    elif what == "heads":
        a[:, [1, 2]] = a[:, [2, 1]]
    elif what == "planes":
        a[:], b[:] = b.copy(), a.copy()
    elif what == "zeros":
        a[x, 1] = 0
    elif what == "ones":
        a[x] = 255
    elif what == "repeated":
        a[x] = a[y]
    elif what == "signs":  # of every BF16 of two blocks
        a[[x, y], :, :, 1::2] ^= 0x80
    elif what == "shifted":
        a[x, 1].reshape(-1)[:] = np.roll(a[x, 1].reshape(-1), 8)
    else:  # of two words: whole words modulo 2**64 would not show this
        a[x, 1, 0, [7, 15]] ^= 0x80
    found = digest_of(one).compare(right)
    assert found is not None and found.plane == 1


@pytest.mark.parametrize("depth", ["sample", "full"])
def test_packed_blocks_count_whole(depth: Verify) -> None:
    """The last one too: where its tokens lie is not known."""
    draw = np.random.default_rng(3)
    scope = Scope(start_token=4, end_token=10, planes=1, first_head=0, heads=1, unit=4, packed=True)
    one, other = (side(draw, (8,), 2, 4, 12) for _ in range(2))
    for at in range(3):
        other.views[0][other.ids[at]] = one.views[0][one.ids[at]]
    assert digest_of(other, depth, scope).compare(digest_of(one, depth, scope).to_bytes()) is None
    other.cell(0, 1, 11)[3] ^= 1
    found = digest_of(other, "full", scope).compare(digest_of(one, "full", scope).to_bytes())
    assert found is not None and (found.start_token, found.end_token) == (8, 10)


def test_a_sample_is_spread_over_the_prompt_has_its_ends_and_differs_by_transfer() -> None:
    draw = np.random.default_rng(4)
    scope = Scope(start_token=16, end_token=1040, planes=64, first_head=0, heads=2, unit=16, packed=False)
    one = side(draw, (8,) * 64, 2, 16, 1040)
    samples = []
    for name in ("a", "b"):
        assert Digest(scope, "sample", TransferId(name)).add(one.held(0, 16), Span(16, 1040)) == 64 * SAMPLES * 8
        sample = sampled(scope, TransferId(name))
        edge, spread = sample.tokens.reshape(64, SAMPLES).T
        first, last = (edge >= 16) & (edge < 32), (edge >= 1024) & (edge < 1040)
        assert (first | last).all() and first.sum() == last.sum() == 32
        assert ((spread >= 16) & (spread < 1040)).all()
        assert np.diff(np.sort(spread)).max() < 2 * (1040 - 16) / 64 + 1, "a part is left out"
        assert set(sample.heads.tolist()) == {0, 1}
        samples.append(sample)
    assert (samples[0].tokens != samples[1].tokens).any()


@pytest.mark.parametrize(("tokens", "looked_at"), [(16, 16), (256, 16), (257, 17), (700, 44), (1024, 64), (9000, 64)])
def test_a_sample_grows_with_the_prompt_and_takes_the_planes_in_turn(tokens: int, looked_at: int) -> None:
    scope = Scope(start_token=0, end_token=tokens, planes=64, first_head=0, heads=1, unit=16, packed=False)
    seen: set[int] = set()
    for number in range(40):
        planes = sampled(scope, TransferId(f"t{number}")).planes.tolist()
        assert len(planes) == SAMPLES * looked_at and len(set(planes)) == looked_at
        seen |= set(planes)
    assert seen == set(range(64))


@pytest.mark.parametrize("widths", [(16, 16, 8), (4, 12), (8,) * 12, (1, 3)])
def test_what_is_foreseen_is_read_when_it_is_added(widths: tuple[int, ...]) -> None:
    one = side(np.random.default_rng(9), widths, 3, 4, 40)
    scope = Scope(start_token=4, end_token=38, planes=len(widths), first_head=5, heads=2, unit=8, packed=False)
    held, foreseen = one.held(1, 4), Digest(scope, "sample", TID)
    foreseen.foresee(held)
    for view in one.views:
        view ^= 5
    later = Digest(scope, "sample", TID)
    assert foreseen.add(held, Span(4, 38)) == later.add(held, Span(4, 38)) > 0
    assert (foreseen.values == later.values).all() and later.values.any()


def test_a_sample_finds_any_block_that_never_came_while_there_are_no_more_blocks_than_planes() -> None:
    scope = Scope(start_token=0, end_token=8 * 12, planes=12, first_head=0, heads=2, unit=8, packed=False)
    one = side(np.random.default_rng(8), (16,) * 12, 2, 8, 8 * 12)
    for number in range(12):
        name = TransferId(f"t{number}")
        right, wrong = Digest(scope, "sample", name), Digest(scope, "sample", name)
        right.add(one.held(0), Span(0, 96))
        for view in one.views:
            view[one.ids[number]] ^= 1
        wrong.add(one.held(0), Span(0, 96))
        assert wrong.compare(right.to_bytes()) is not None, number


def test_digests_of_a_long_prompt_stay_few_and_still_name_the_place() -> None:
    scope = Scope(start_token=8, end_token=9001, planes=16, first_head=0, heads=1, unit=4, packed=False)
    one = side(np.random.default_rng(5), (8,) * 16, 2, 4, 9001)
    right = digest_of(one, scope=scope)
    assert MOST_SLICES / 3 < right.values.size <= MOST_SLICES
    one.cell(7, 1, 9000)[0] ^= 1
    found = digest_of(one, scope=scope).compare(right.to_bytes())
    assert found is not None and found.plane == 7 and found.start_token <= 9000 < found.end_token == 9001


def test_digests_of_another_size_are_no_digests() -> None:
    one = digest_of(side(np.random.default_rng(6), WIDTHS, 4, 4, 24))
    with pytest.raises(ValueError, match="8 bytes of digests, 72 expected"):
        one.compare(b"12345678")


@pytest.mark.parametrize("widths", [(16, 16, 8), (4, 12), (2, 6), (1, 3)])
def test_a_device_reads_the_same(widths: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch")
    one = side(np.random.default_rng(7), widths, 3, 4, 40)
    table = [(p.base, p.block_stride) for p in one.layout.planes]
    lowest, end = extent(one.layout)
    # One array from the lowest plane to the highest, as a device's addresses are.
    memory = np.zeros(end - lowest, np.uint8)
    for view, (base, stride) in zip(one.views, table, strict=True):
        memory[base - lowest : base - lowest + stride * one.layout.num_blocks] = view.reshape(-1)
    device = Store(one.layout, DeviceWords(one.layout, torch.from_numpy(memory)).sums)
    scope = Scope(start_token=4, end_token=38, planes=len(widths), first_head=5, heads=2, unit=8, packed=False)
    for depth in ("sample", "full"):
        on_host, on_device = Digest(scope, depth, TID), Digest(scope, depth, TID)
        held = one.held(1, 4)
        on_host.add(held, Span(4, 38))
        on_device.add(Held(store=device, head=1, block_ids=held.block_ids, first_block=held.first_block), Span(4, 38))
        assert on_device.compare(on_host.to_bytes()) is None and on_host.values.any()
