"""Which part of a prompt's KV leaves next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.stream import Growth, Pace, Progress, Span

PLANES = 4


def everything(progress: Progress, growth: Growth) -> list[Span]:
    spans = []
    while (span := progress.take(growth)) is not None:
        spans.append(span)
    return spans


def test_chunks_end_at_whole_blocks_but_for_the_last() -> None:
    progress, growth = Progress(0, 99, Pace(unit=16)), Growth()
    growth.grow(40)
    assert everything(progress, growth) == [Span(0, 32)]
    growth.grow(47)
    assert everything(progress, growth) == []
    growth.grow(100)
    assert everything(progress, growth) == [Span(32, 99)] and progress.complete


def test_a_late_comer_gets_the_backlog_in_pieces_of_bounded_size() -> None:
    progress, growth = Progress(16, 100, Pace(unit=16, most=32)), Growth()
    growth.grow(100)
    assert everything(progress, growth) == [Span(16, 48), Span(48, 80), Span(80, 100)]


def test_little_waits_for_more_unless_nothing_more_will_come() -> None:
    progress, growth = Progress(0, 100, Pace(unit=1, least=30)), Growth()
    growth.grow(20)
    assert everything(progress, growth) == []
    growth.grow(30)
    assert everything(progress, growth) == [Span(0, 30)]
    growth.grow(40)
    growth.sealed = True
    assert everything(progress, growth) == [Span(30, 40)]


def test_planes_of_a_step_under_way() -> None:
    progress, growth = Progress(0, 63, Pace(unit=16)), Growth()
    growth.grow_part(64, 1)
    assert everything(progress, growth) == [Span(0, 63, 0, 1)]
    growth.grow_part(64, 3)
    assert everything(progress, growth) == [Span(0, 63, 1, 3)]
    growth.grow(64)
    assert everything(progress, growth) == [Span(0, 63, 3)] and progress.complete


def test_planes_of_a_long_step_go_out_for_all_its_tokens() -> None:
    progress, growth = Progress(0, 96, Pace(unit=16, most=32)), Growth()
    growth.grow_part(96, 2)
    assert everything(progress, growth) == [Span(0, 96, 0, 2)]
    growth.grow(96)
    assert everything(progress, growth) == [Span(0, 96, 2)] and progress.complete


def test_rewound_it_begins_at_its_start() -> None:
    progress, growth = Progress(16, 64, Pace(unit=16)), Growth()
    growth.grow_part(40, 2)
    assert everything(progress, growth) == [Span(16, 32, 0, 2)]
    progress.rewind()
    growth = Growth()
    growth.grow(64)
    assert everything(progress, growth) == [Span(16, 64)]


@given(
    unit=st.sampled_from([1, 4, 16]),
    least=st.integers(1, 40),
    most=st.integers(1, 5),
    bounds=st.tuples(st.integers(0, 5), st.integers(1, 90)),
    steps=st.lists(st.tuples(st.integers(1, 40), st.lists(st.integers(1, PLANES - 1), max_size=3)), max_size=8),
    calls=st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_every_token_of_every_plane_is_taken_once_when_it_is_there(
    unit: int,
    least: int,
    most: int,
    bounds: tuple[int, int],
    steps: list[tuple[int, list[int]]],
    calls: list[bool],
) -> None:
    """`calls`: whether the taker looks after each event; it may sleep through some."""
    start = bounds[0] * unit
    end = start + bounds[1]
    progress, growth = Progress(start, end, Pace(unit, least, most * unit)), Growth()
    there: set[tuple[int, int]] = set()
    taken: set[tuple[int, int]] = set()
    looks = iter(calls)

    def look(always: bool = False) -> None:
        if not next(looks) and not always:
            return
        for span in everything(progress, growth):
            planes = range(span.first_plane, PLANES if span.end_plane is None else span.end_plane)
            cells = {(token, plane) for token in range(span.start_token, span.end_token) for plane in planes}
            assert cells and cells <= there, "taken before it was there"
            assert not cells & taken, "taken twice"
            whole = span.first_plane == 0 and span.end_plane is None
            assert not whole or span.end_token - span.start_token <= most * unit
            assert span.end_token == end or span.end_token % unit == 0
            taken.update(cells)

    tokens = 0
    for more, parts in [*steps, (end, [])]:
        step_end = min(tokens + more, end + 7)
        for planes in sorted(parts):
            there |= {(token, plane) for token in range(step_end) for plane in range(planes)}
            growth.grow_part(step_end, planes)
            look()
        tokens = step_end
        there |= {(token, plane) for token in range(tokens) for plane in range(PLANES)}
        growth.grow(tokens)
        look()
    growth.sealed = True
    look(always=True)
    assert progress.complete
    assert taken == {(token, plane) for token in range(start, end) for plane in range(PLANES)}


def test_a_packed_block_leaves_when_prefill_writes_to_it_no_more() -> None:
    """Its tokens can't be told apart, so what both sides compare would change under the WRITE."""
    progress, growth = Progress(0, 10, Pace(unit=4, packed=True)), Growth()
    growth.grow(10)  # of 11 tokens: the last one goes into the same block
    assert progress.take(growth) == Span(0, 8) and progress.take(growth) is None
    growth.grow_part(11, 1)
    assert progress.take(growth) == Span(8, 10, 0, 1), "a plane that is done is done"
    growth.grow(11)
    growth.sealed = True
    assert progress.take(growth) == Span(8, 10, 1) and progress.complete
