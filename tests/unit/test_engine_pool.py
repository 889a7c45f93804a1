"""Blocks: nobody's twice, found by what they hold until they are taken."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.engine.pool import BlockPool

BLOCKS = 24


class Model(RuleBasedStateMachine):
    """Against a plain account of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, 0.5, seed=3)
        self.held: list[list[int]] = []
        self.labels: dict[int, int] = {}
        self.keys = 0

    @rule(count=st.integers(0, 10))
    def take(self, count: int) -> None:
        free = BLOCKS - len({block for row in self.held for block in row})
        taken = self.pool.take(count)
        assert (taken is None) == (count > free)
        if taken is not None:
            assert len(set(taken)) == count
            assert not set(taken) & {block for row in self.held for block in row}
            self.labels = {key: block for key, block in self.labels.items() if block not in taken}
            self.held.append(taken)

    @precondition(lambda self: any(self.held))
    @rule(draw=st.randoms(use_true_random=False))
    def label(self, draw: random.Random) -> None:
        block = draw.choice([block for row in self.held for block in row])
        self.keys += 1
        self.pool.label(block, self.keys)
        if block not in self.labels.values():
            self.labels[self.keys] = block

    @precondition(lambda self: self.labels)
    @rule(draw=st.randoms(use_true_random=False))
    def share(self, draw: random.Random) -> None:
        key = draw.choice(sorted(self.labels))
        found = self.pool.find([key])
        assert found == [self.labels[key]]
        self.pool.share(found)
        self.held.append(found)

    @precondition(lambda self: self.held)
    @rule(draw=st.randoms(use_true_random=False))
    def give_back(self, draw: random.Random) -> None:
        self.pool.give_back(self.held.pop(draw.randrange(len(self.held))))

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.pool.num_free == BLOCKS - len({block for row in self.held for block in row})


TestPool = Model.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_fresh_pool_counts_upwards() -> None:
    assert BlockPool(5).take(5) == [0, 1, 2, 3, 4]


def test_a_request_loses_its_tail_first() -> None:
    pool = BlockPool(3)
    taken = pool.take(3)
    assert taken is not None
    pool.give_back(taken)
    assert pool.take(3) == [2, 1, 0]


@pytest.mark.parametrize(("fragmentation", "low", "high"), [(0.1, 8.0, 12.5), (0.5, 1.8, 2.2), (1.0, 1.0, 1.05)])
def test_fragmentation_is_the_chance_of_a_gap(fragmentation: float, low: float, high: float) -> None:
    taken = BlockPool(20_000, fragmentation, seed=1).take(20_000)
    assert taken is not None and sorted(taken) == list(range(20_000))
    runs = 1 + sum(b != a + 1 for a, b in itertools.pairwise(taken))
    assert low < 20_000 / runs < high
