"""Staging: the pure halves under any order of events, the area's slots, and the copies of both movers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.staging import Arrivals, Lane, Load
from kvferry.protocol.table import UnexpectedEvent
from kvferry.transfer.areas import SCRATCH_BYTES, Areas, Slots
from kvferry.transfer.mover import HostMover, TorchMover


@given(pieces=st.integers(1, 60), per_slot=st.integers(1, 9), slots=st.integers(1, 5), data=st.data())
def test_every_piece_goes_once_whatever_the_order(pieces, per_slot, slots, data):
    """And no slot is filled anew before D has emptied it."""
    lane, arrivals = Lane(pieces, per_slot, slots), Arrivals(pieces, per_slot, slots)
    gathering: dict[int, Load] = {}
    writing: set[int] = set()
    away: dict[int, Load] = {}
    moved: Counter[int] = Counter()
    while not lane.done:
        can = [("take", None)] if lane._taken < pieces and len(gathering | away) + len(writing) < slots else []
        can += [("gathered", slot) for slot in gathering] + [("written", slot) for slot in writing]
        can += [("unstaged", slot) for slot in away]
        what, slot = data.draw(st.sampled_from(can))
        if what == "take":
            load = lane.take()
            assert load is not None and load.slot not in {*gathering, *writing, *away}
            assert 1 <= load.count <= per_slot
            gathering[load.slot] = load
        elif what == "gathered":
            assert lane.gathered(slot) == gathering.pop(slot)
            writing.add(slot)
        elif what == "written":
            away[slot] = lane.written(slot)
            writing.remove(slot)
        else:
            load = away.pop(slot)
            assert not arrivals.done
            arrivals.take(load)
            moved.update(range(load.first, load.first + load.count))
            assert lane.unstaged(slot) == load
    assert moved == Counter(range(pieces)) and arrivals.done and lane.take() is None


@pytest.mark.parametrize("slot", [0, 1, 7, -1])
def test_a_slot_that_is_not_away_cannot_be_unstaged(slot):
    lane = Lane(10, 2, 2)
    lane.take()
    with pytest.raises(UnexpectedEvent):
        lane.unstaged(slot)


@pytest.mark.parametrize(
    "load", [Load(2, 0, 4), Load(-1, 0, 4), Load(0, 1, 4), Load(0, 0, 3), Load(0, 8, 4), Load(0, 12, 1), Load(0, 4, 4)]
)
def test_only_what_is_to_come_arrives(load):
    """Of 10 pieces, 4 in each of 2 slots; those from 4 on have come."""
    arrivals = Arrivals(10, 4, 2)
    arrivals.take(Load(1, 4, 4))
    with pytest.raises(UnexpectedEvent):
        arrivals.take(load)
    arrivals.take(Load(0, 8, 2))
    arrivals.take(Load(1, 0, 4))
    assert arrivals.done


def test_slots_are_lent_once_and_all_that_were_asked_for_or_none():
    slots = Slots(1 << 20, 1 << 14)
    everything = slots.take(slots.total)
    assert len(set(everything)) == slots.total == slots.lent and slots.take(1) == ()
    slots.give(everything[3:5])
    assert slots.lent == slots.total - 2
    assert slots.take(3) == slots.take(0) == ()
    assert set(slots.take(2)) == set(everything[3:5])


def test_an_area_holds_its_slots_and_its_scratch_apart():
    areas = Areas("cpu", 1 << 16)
    ((base, nbytes),) = areas.regions
    slots = areas.staging.take(areas.staging.total)
    ends = [slot + areas.staging.slot_bytes for slot in slots]
    assert min(slots) == base and max(ends) <= areas.scratch and areas.scratch + SCRATCH_BYTES == base + nbytes
    assert Areas("cpu", 0).staging.take(1) == ()


@pytest.mark.parametrize("make", [HostMover, lambda: TorchMover("cpu")], ids=["numpy", "torch"])
@pytest.mark.parametrize("nbytes", [24, 64, 7])
def test_movers_copy_byte_for_byte_from_and_to_any_address(make, nbytes):
    """Pieces of three allocations, which need not be a multiple of a piece apart."""
    random = np.random.default_rng(3)
    memory = [random.integers(0, 256, 1000 + 13 * index, np.uint8) for index in range(3)]
    where = [(which, at * nbytes + which * 5) for which in range(3) for at in random.permutation(9)]
    pieces = np.array([memory[which].ctypes.data + at for which, at in where], dtype=np.uint64)
    wanted = np.concatenate([memory[which][at : at + nbytes] for which, at in where])
    slot = np.zeros(len(where) * nbytes + 8, np.uint8)
    mover = make()
    assert mover.gather(pieces, nbytes, slot.ctypes.data) is None
    assert (slot[: len(wanted)] == wanted).all() and not slot[len(wanted) :].any()
    before = [one.copy() for one in memory]
    for one in memory:
        one ^= 0xFF
    inverted = [one.copy() for one in memory]
    assert mover.scatter(slot.ctypes.data, pieces, nbytes) is None
    touched = [np.zeros(len(one), bool) for one in memory]
    for which, at in where:
        touched[which][at : at + nbytes] = True
    for one, old, new, mine in zip(memory, before, inverted, touched, strict=True):
        assert (one[mine] == old[mine]).all() and (one[~mine] == new[~mine]).all()
