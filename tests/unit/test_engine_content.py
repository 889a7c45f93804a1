"""The modelled engine's KV: what is written is what is expected, and no changed byte goes unseen."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.content import (
    answer,
    coefficients,
    expected_sum,
    mix,
    mixed,
    next_token,
    prefix_terms,
    prefixes,
    word_type,
)
from kvferry.engine.memory import KvMemory

MASK = (1 << 64) - 1
LAYERS, HEADS, BLOCK = 3, 4, 8


def memory(cell_bytes: int, heads: range = range(HEADS), blocks: int = 32) -> KvMemory:
    return KvMemory(LAYERS, blocks, heads, BLOCK, cell_bytes)


def total(kv: KvMemory, table: list[int], tokens: int) -> int:
    full, rest = divmod(tokens, BLOCK)
    lengths = [BLOCK] * full + ([rest] if rest else [])
    ids = np.array(table[: len(lengths)], dtype=np.int64)
    sums = kv.sums(ids, np.arange(len(lengths), dtype=np.int64), np.array(lengths, dtype=np.int64))
    return int(sums.sum(dtype=np.uint64))


@given(st.integers(0, MASK))
def test_mix_of_one_is_mixed_of_many(x: int) -> None:
    assert mix(x) == int(mixed(np.array([x], dtype=np.uint64))[0])


@given(st.lists(st.integers(0, 200_000), min_size=2, max_size=40), st.data())
def test_prefixes_can_be_continued(tokens: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(tokens) - 1))
    whole = prefixes(tokens)
    rest = prefixes(tokens[cut:], int(whole[cut - 1]), cut)
    assert (rest == whole[cut:]).all()
    term = prefix_terms(np.array([tokens[-1]], dtype=np.uint64), np.array([len(tokens) - 1], dtype=np.uint64))
    assert int((whole[-2:-1] + term)[0]) == int(whole[-1])


@pytest.mark.parametrize(("cell", "word"), [(1, "u1"), (2, "u2"), (4, "u4"), (8, "u8"), (512, "u8"), (12, "u4")])
def test_words_fill_a_cell(cell: int, word: str) -> None:
    assert word_type(cell) == np.dtype(word)
    made = coefficients(2, range(3), cell)
    assert made.write.nbytes == 2 * 3 * cell
    assert (made.write % 2 == 1).all() and (made.read % 2 == 1).all()


@given(
    st.sampled_from([1, 2, 4, 8, 24]),
    st.lists(st.integers(0, 60_000), min_size=1, max_size=70),
    st.lists(st.integers(1, 30), max_size=6),
    st.randoms(use_true_random=False),
)
def test_what_is_written_in_any_chunks_reads_as_expected(
    cell: int, tokens: list[int], cuts: list[int], draw: random.Random
) -> None:
    kv = memory(cell)
    table = draw.sample(range(32), -(-len(tokens) // BLOCK))
    values, at = prefixes(tokens), 0
    while at < len(tokens):
        step = cuts.pop() if cuts else len(tokens) - at
        part = values[at : at + step]
        if len(part) == 1 and draw.random() < 0.5:
            kv.write_one_each(np.array([table[at // BLOCK]]), np.array([at]), part)
        else:
            kv.write(np.array(table), at, part)
        at += step
    assert total(kv, table, len(tokens)) == expected_sum(tokens, LAYERS, HEADS, cell)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_hold_parts_of_one_sum(ranks: int) -> None:
    tokens = list(range(300, 350))
    parts = 0
    for rank in range(ranks):
        kv = memory(8, range(rank * HEADS // ranks, (rank + 1) * HEADS // ranks))
        kv.write(np.arange(32), 0, prefixes(tokens))
        parts += total(kv, list(range(32)), len(tokens))
    assert parts & MASK == expected_sum(tokens, LAYERS, HEADS, 8)


@pytest.mark.parametrize("cell", [1, 2, 8, 16])
def test_every_flipped_byte_changes_the_sum_and_the_answer(cell: int) -> None:
    """Every byte of every block of a small memory, one bit or many."""
    tokens = list(range(1000, 1000 + 2 * BLOCK))
    kv = memory(cell, blocks=2)
    table = [1, 0]
    kv.write(np.array(table), 0, prefixes(tokens))
    right = total(kv, table, len(tokens))
    draw = random.Random(7)
    for block in table:
        for offset in range(kv.block_bytes):
            mask = draw.choice([1, 128, draw.randrange(1, 256)])
            kv.flip(block, offset, mask)
            wrong = total(kv, table, len(tokens))
            assert wrong != right
            kv.flip(block, offset, mask)
    assert total(kv, table, len(tokens)) == right


def test_blocks_that_changed_places_are_seen() -> None:
    tokens = list(range(500, 500 + 4 * BLOCK))
    kv = memory(8)
    kv.write(np.arange(32), 0, prefixes(tokens))
    assert total(kv, [0, 2, 1, 3], len(tokens)) != total(kv, [0, 1, 2, 3], len(tokens))


def test_the_same_tokens_after_other_ones_are_other_bytes() -> None:
    a, b = memory(8), memory(8)
    a.write(np.arange(32), 0, prefixes([1, 2, 3, *range(13)]))
    b.write(np.arange(32), 0, prefixes([1, 2, 4, *range(13)]))
    assert (a.array[:, 1] != b.array[:, 1]).all()


@given(st.integers(0, MASK), st.integers(0, 100_000), st.integers(512, 200_000))
def test_tokens_lie_in_the_vocabulary(sum_: int, position: int, vocab: int) -> None:
    assert 256 <= next_token(sum_, position, vocab, may_end=False) < vocab
    token = next_token(sum_, position, vocab, may_end=True)
    assert token == 2 or 256 <= token < vocab


def test_about_one_token_in_128_ends_an_answer() -> None:
    ends = sum(next_token(mix(i), i, 32_000, may_end=True) == 2 for i in range(20_000))
    assert 100 < ends < 220  # 156 expected, deviation 12


def test_an_answer_follows_from_the_prompt_alone() -> None:
    shape = (LAYERS, HEADS, 8)
    one = answer([5, 6, 7], 20, shape, 32_000)
    assert one == answer([5, 6, 7], 20, shape, 32_000) and len(one) == 20
    assert answer([5, 6, 8], 20, shape, 32_000) != one
    assert answer([5, 6, 7, *one[:9]], 11, shape, 32_000) == one[9:]
