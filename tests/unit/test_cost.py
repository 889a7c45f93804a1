"""The cost model finds the numbers that made the times, and cuts accordingly."""

from __future__ import annotations

import random

import pytest

from kvferry.protocol.cost import Cost, CostMeter


def fed(true: Cost, seed: int = 0, noise: float = 0.0) -> CostMeter:
    draw, meter = random.Random(seed), CostMeter()
    for _ in range(64):
        nbytes = draw.choice([1 << 16, 1 << 20, 1 << 24, 1 << 27])
        descriptors = max(1, nbytes // draw.choice([4096, 65536, 1 << 20]))
        meter.add(descriptors, nbytes, true.seconds(descriptors, nbytes) * (1 + draw.uniform(-noise, noise)))
    return meter


@pytest.mark.parametrize(
    "true", [Cost(2e-4, 4e-6, 2e-10), Cost(3e-5, 3e-7, 2.5e-11), Cost(4e-4, 2.5e-6, 1e-9)], ids=["tcp", "rdma", "slow"]
)
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_fit_predicts_what_it_has_not_seen(true: Cost, noise: float) -> None:
    found = fed(true, noise=noise).cost
    for descriptors, nbytes in ((1, 1 << 16), (1000, 1 << 24), (30_000, 1 << 27), (64, 1 << 27)):
        assert found.seconds(descriptors, nbytes) == pytest.approx(true.seconds(descriptors, nbytes), rel=0.15)


def test_without_transfers_the_prior_stands() -> None:
    assert CostMeter().cost == Cost()


def test_one_kind_of_transfer_moves_the_model_to_it_and_breaks_nothing() -> None:
    meter = CostMeter()
    for _ in range(16):
        meter.add(30, 11_800_000, 0.009)
    assert meter.cost.seconds(30, 11_800_000) == pytest.approx(0.009, rel=0.1)
    assert meter.bytes_per_descriptor == pytest.approx(11_800_000 / 30)
    assert min(meter.cost.per_post, meter.cost.per_descriptor, meter.cost.per_byte) > 0


def test_useless_samples_are_not_taken() -> None:
    meter = CostMeter()
    for _ in range(16):
        meter.add(0, 0, 0.1)
        meter.add(5, 4096, 0.0)
    assert meter.cost == Cost()


def test_a_piece_takes_several_times_its_post() -> None:
    cost = Cost(per_post=1e-3, per_descriptor=1e-6, per_byte=1e-9)
    assert cost.least_piece == pytest.approx(4e-3)
    nbytes = cost.least_bytes(65536)
    assert cost.seconds(nbytes / 65536, nbytes) - cost.per_post == pytest.approx(4e-3, rel=1e-3)
    assert cost.pieces(10, 9_900_000, 16) == 1
    assert cost.pieces(10, 12_100_000, 16) == 3
    assert cost.pieces(10, 40_100_000, 16) == 10
    assert cost.pieces(10, 4_000_000_000, 16) == 16


def test_short_prompts_stay_whole() -> None:
    """256 tokens of a large model's rank, tidy: a fraction of a millisecond."""
    cost = Cost(per_post=5e-5, per_descriptor=5e-7, per_byte=2.5e-11)
    assert cost.least_bytes(131072) > 256 * 32768


def test_what_a_busy_machine_adds_is_no_cost() -> None:
    true, draw, meter = Cost(1e-4, 2e-6, 1e-10), random.Random(1), CostMeter()
    for _ in range(64):
        nbytes = draw.choice([1 << 20, 1 << 23])
        held_up = draw.choice([0.0, 0.0, 0.0, 8e-3])
        meter.add(30, nbytes, true.seconds(30, nbytes) + held_up)
    assert meter.cost.seconds(30, 1 << 23) == pytest.approx(true.seconds(30, 1 << 23), rel=0.1)
    assert meter.cost.per_post < 3e-4
