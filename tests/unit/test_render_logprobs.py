"""Logprobs that went over the wire come back as the rows that an engine core gives."""

from __future__ import annotations

import random
from itertools import chain

import pytest

from kvferry.render.logprobs import Row, prompt_rows, sample_row
from kvferry.render.wire import LogProb, Position, PromptLogProb


def engine_row(rng: random.Random, k: int, rank: int) -> Row:
    """The sampled token of this rank, then the k likeliest."""
    ranked = rng.sample(range(1000), max(k, rank))
    scores = sorted((-rng.random() * 9 for _ in ranked), reverse=True)
    sampled = ranked[rank - 1], scores[rank - 1]
    return Row([sampled[0], *ranked[:k]], [sampled[1], *scores[:k]], rank)


def as_frontend(row: Row, k: int) -> dict[int, tuple[float, int]]:
    """How vLLM's frontend reads a row: ranks by column, a token named twice stands where it stood first."""
    ranks = chain((row.rank,), range(1, k + 1))
    return {one: (score, rank) for one, score, rank in zip(row.ids, row.logprobs, ranks, strict=False)}


def over_the_wire(row: Row, asked: int) -> Position:
    """As `/inference/v1/generate` tells it: no more entries than were asked for, the sampled one among them."""
    entries = [LogProb(one, score, rank) for one, (score, rank) in as_frontend(row, asked).items()]
    return Position(row.ids[0], row.logprobs[0], row.rank, entries[: max(asked, 1)])


@pytest.mark.parametrize("k", [1, 2, 5, 20])
def test_sampled_logprobs_survive_whatever_rank_was_sampled(k: int) -> None:
    rng = random.Random(k)
    for rank in range(1, k + 4):
        wide = engine_row(rng, k + 1, rank)
        # What the engine would have given for k.
        wanted = as_frontend(Row(wide.ids[: k + 1], wide.logprobs[: k + 1], rank), k)
        assert as_frontend(sample_row(over_the_wire(wide, k + 1), k), k) == wanted


def test_only_the_sampled_one_is_asked_for() -> None:
    row = sample_row(Position(7, -0.5, 3, [LogProb(7, -0.5, 3)]), 0)
    assert row == Row([7], [-0.5], 3)


def test_a_position_of_which_nothing_is_known() -> None:
    assert sample_row(Position(7, -9999.0), 2) == Row([7], [-9999.0], 0)


def test_prompt_logprobs_come_back_as_one_block() -> None:
    rng = random.Random(5)
    k = 3
    rows = [engine_row(rng, k, rank) for rank in (1, 3, 4, 9, 2)]
    told: list[dict[str, PromptLogProb] | None] = [None]
    told += [{str(one): PromptLogProb(*facts) for one, facts in as_frontend(row, k).items()} for row in rows]
    back = prompt_rows(told)
    assert len({len(row.ids) for row in back}) == 1
    assert [as_frontend(row, k) for row in back] == [as_frontend(row, k) for row in rows]
    assert [list(as_frontend(row, k)) for row in back] == [list(as_frontend(row, k)) for row in rows]
