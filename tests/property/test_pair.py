"""Walks of the machine in `tests/support/pair_machine.py`: what holds under any schedule is said there."""

from __future__ import annotations

import os

import pytest
from hypothesis import seed, settings
from hypothesis.stateful import run_state_machine_as_test
from pair_machine import Pair

DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
SEED = int(os.environ.get("KVFERRY_SEED", "0"))
ROUNDS, RUNS, STEPS = (28, 550, 80) if DEEP else (1, 360, 40)
"""Deep, in rounds whose seeds are `SEED`, `SEED + 1` and so on: Hypothesis remembers all runs of a round."""


@pytest.mark.timeout(3600 if DEEP else 120)
@pytest.mark.parametrize("number", range(ROUNDS))
def test_no_schedule_breaks_a_pair(number: int) -> None:
    if DEEP:
        seed(SEED + number)(Pair)
    run_state_machine_as_test(Pair, settings=settings(max_examples=RUNS, stateful_step_count=STEPS))
    print(f"{Pair.walked} steps")


def test_it_was_a_long_walk() -> None:
    """After the walk itself. A step is one rule with all its consequences."""
    if Pair.walked:  # else this test was asked for alone
        assert Pair.walked >= (1_000_000 if DEEP else 10_000)
