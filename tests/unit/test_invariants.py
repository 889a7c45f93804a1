"""A leak that was planted is found, by name; a core, a pool and an engine that are well pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transfer_house import House, Rank, expect, land, pair, ready

from kvferry.errors import InvariantBroken
from kvferry.protocol import messages as wire
from kvferry.transfer import commands as cmd
from kvferry.transfer.invariants import check_invariants


@pytest.fixture
def idle() -> tuple[House, Rank, Rank]:
    """P and D after a transfer."""
    house = House()
    p, d = pair(house)
    expect(p)
    land(d)
    ready(p)
    house.run()
    assert p.results[-1].ok and d.results[-1].ok
    return house, p, d


def test_nothing_is_left_after_a_transfer(idle: tuple[House, Rank, Rank]) -> None:
    for rank in idle[1:]:
        check_invariants(rank.core, idle=True)


def _two_of_one_block(p: Rank, d: Rank) -> None:
    d.core._landings.open(_where("a"), set(), 0.0)
    d.core._landings.open(_where("b"), set(), 0.0)


def _where(request: str) -> object:
    from kvferry.protocol.landing import Destination

    return Destination(request, f"t-{request}", "push", 0, 4, (7,), (("nobody", 1),))  # type: ignore[arg-type]


PLANTED: dict[str, tuple[str, Callable[[Rank, Rank], object]]] = {
    "a request": ("requests are left: ['t']", lambda p, d: p.core._requests.update(t="p-t")),
    "a registration": ("1 registrations are left", lambda p, d: p.core._rendezvous._by_leg.update({("d", 1): "t"})),
    "a deadline": ("1 deadlines are left on the decode side", lambda p, d: d.core._landings._deadlines.set(9, 1.0)),
    "a count of WRITEs": ("streamed WRITEs in flight", lambda p, d: p.core._rendezvous._flying.update({"d": 1})),
    "a failure told": ("failures that were told are left", lambda p, d: d.core.stats.doomed("d-t", "peer_gone")),
    "a block in two places": ("block 7 is the destination of 'a' and of 'b'", _two_of_one_block),
    "a source": ("1 sources are open", lambda p, d: p.core._rendezvous.expect("u", "push", 1, 0.0)),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_leak_is_found(what: str, idle: tuple[House, Rank, Rank]) -> None:
    _, p, d = idle
    text, plant = PLANTED[what]
    plant(p, d)
    with pytest.raises(InvariantBroken) as caught:
        for rank in (p, d):
            check_invariants(rank.core, idle=True)
    assert text in str(caught.value)


def test_a_core_finds_it_itself_when_it_is_idle() -> None:
    house = House()
    p, d = pair(house, debug_invariants=True)
    expect(p)
    land(d)
    p.core._rendezvous._flying["gone"] = 1
    house.run()  # something is open: not yet
    ready(p)
    with pytest.raises(InvariantBroken, match="streamed WRITEs in flight"):
        house.run()


def test_a_peer_that_stays_silent_holds_no_more_than_a_share() -> None:
    """P is stopped in the middle of its WRITEs to 9 of D's 16 blocks; what it does when it goes on reaches none."""
    house = House()
    p, d = pair(house, lease_s=3.0, quarantine_share=0.5)
    house.world.hold = True
    for number, blocks in enumerate([(1, 2, 3), (4, 5, 6), (7, 8, 9)]):
        expect(p, f"t{number}")
        ready(p, f"t{number}")
        land(d, f"t{number}", blocks=blocks)
    house.run()
    assert len(house.world.copies) == 3
    for copy in house.world.copies:
        copy.move(1)
    house.freeze(p)
    house.wait(2.5)
    assert d.failing == d.results == []
    house.wait(1.0)
    assert [one.code for one in d.failing] == ["peer_gone"] * 3
    assert d.results == [], "a moment too many is no harm"
    house.wait(3.5)
    assert [(one.request, one.code) for one in d.results] == [(f"d-t{n}", "peer_gone") for n in range(3)]
    assert all(isinstance(one, cmd.Received) for one in d.results)
    d.memory[:] = 0xEE
    house.world.hold = False
    for copy in house.world.copies:
        copy.held = False
    house.freeze(p, False)
    house.wait(3.0)
    assert (d.memory == 0xEE).all(), "written to after they went back"
    assert len(p.results) == 3
    house.settled()
    expect(p, "again")
    ready(p, "again")
    land(d, "again")
    house.wait(2.0)
    assert d.results[-1].ok and p.results[-1].ok


def test_a_share_is_not_reached_by_a_peer_that_answers() -> None:
    """Ten blocks of aborted requests wait for a P that is alive: it is asked, not cut off."""
    house = House()
    p, d = pair(house, quarantine_share=0.5)
    house.world.hold = True
    for number, blocks in enumerate([(1, 2, 3), (4, 5, 6), (7, 8, 9)]):
        expect(p, f"t{number}")
        ready(p, f"t{number}")
        land(d, f"t{number}", blocks=blocks)
    house.run()
    for number in range(3):
        d.core.submit(cmd.Drop(f"d-t{number}"))
    house.wait(5.0)
    assert d.core._landings.quarantined_blocks() == 9 and d.core.open_counts()["peers"] == 1
    for copy in house.world.copies:
        copy.held = False
    house.run()
    assert [one.code for one in d.results] == ["cancelled"] * 3


def test_leases_run_on_while_others_are_streamed() -> None:
    """Each WRITE that completes looks after the other streams; it must not renew the lease of those left alone."""
    house = House()
    p, d = pair(house, "stream", lease_s=2.0, stream_chunk_bytes=1)
    expect(p, "left", "stream")
    ready(p, "left")
    for number in range(12):
        p.core.submit(cmd.Expect(f"t{number}", f"p-t{number}", "stream", 1, 10))
        land(d, f"t{number}", mode="stream")
        ready(p, f"t{number}")
        house.wait(0.25)
    assert [one.code for one in p.results if one.request == "p-left"] == ["lease_lapsed"]
    assert p.core._rendezvous._flying == {}, "a count for each peer that ever was"


@pytest.mark.parametrize("mode", ["push", "stream", "pull"])
def test_a_registration_that_comes_as_the_lease_lapses_is_served(mode: str) -> None:
    house = House()
    p, d = pair(house, mode, lease_s=2.0)
    expect(p, mode=mode)
    ready(p)
    house.run()
    house.now += 2.0  # P has not looked at its clock since
    p.frozen = True
    land(d, mode=mode)
    house.run(2)
    p.frozen = False
    house.run()
    assert p.results[-1].ok and d.results[-1].ok


def test_a_greeting_that_is_lost_is_said_again() -> None:
    house = House()
    house.network.filter = lambda data: []
    p, d = pair(house, connect_timeout_s=2.0)
    house.wait(1.0)
    house.network.filter = lambda data: [data]
    house.wait(0.5)
    assert d.core._peers.up_keys() == set()
    house.wait(1.0)
    assert len(d.core._peers.up_keys()) == len(p.core._peers.up_keys()) == 1


def test_a_first_access_whose_word_is_lost_ends_the_connection_which_is_made_anew() -> None:
    house = House()
    lost: list[bytes] = []

    def first_warm(data: bytes) -> list[bytes]:
        from kvferry.protocol import codec

        if data and isinstance(codec.decode(data), wire.Warm) and not lost:
            lost.append(data)
            return []
        return [data]

    house.network.filter = first_warm
    p, d = pair(house, transfer_timeout_s=3.0)
    assert lost and not (d.core._peers.up_keys() and p.core._peers.up_keys())
    house.wait(6.0)
    assert len(d.core._peers.up_keys()) == len(p.core._peers.up_keys()) == 1
