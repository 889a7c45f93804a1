"""Staged transfers in the cores: the same bytes, whatever is between the two, and nothing kept when a side goes."""

from __future__ import annotations

import pytest
from transfer_house import BLOCKS, DP, PP, expect, land, pair, randomise, ready, same

from kvferry.protocol import codec
from kvferry.protocol import messages as wire
from kvferry.transfer import commands as cmd

SMALL = {"staging": "always", "staging_bytes": 1024}
"""Slots of one piece: 64 bytes, two heads of 4 tokens of 8 bytes."""

SENT = cmd.Sent("p-t", "t", True, "", "")
RECEIVED = cmd.Received("d-t", "t", True, "", "")


@pytest.fixture
def engines(house):
    p, d = pair(house, **SMALL)
    randomise(p)
    return p, d


def begin(house, p, d, mode="push"):
    """Stopped with copies of slots under way."""
    house.world.hold = True
    expect(p, mode=mode)
    land(d, mode=mode)
    ready(p)
    house.run()
    assert {copy.op for copy in house.world.copies} == {"WRITE"} and p.results == d.results == []


def ours(p):
    """Bytes of P's area: what P writes comes from there alone."""
    ((base, nbytes),) = p.areas.regions
    return range(base, base + nbytes)


@pytest.mark.parametrize("staging_bytes", [1024, 2048, 3072])
def test_scattered_blocks_arrive_by_way_of_slots(house, staging_bytes):
    p, d = pair(house, staging="always", staging_bytes=staging_bytes)
    randomise(p)
    begin(house, p, d)
    assert all(copy.whole[0][0] in ours(p) for copy in house.world.copies), "nothing is sent from where it lay"
    house.let_go()
    house.run(40)
    assert p.results == [SENT] and d.results == [RECEIVED] and same(p, d, (1, 2, 3), (7, 5, 9))
    assert not d.memory[:, [block for block in range(BLOCKS) if block not in (7, 5, 9)]].any()
    house.settled()


def test_unequal_sizes_meet_in_slots(house):
    """P: two ranks with a head each; D: one with both. D's pieces are the halves of its blocks' rows."""
    ps = [house.rank("P", "producer", PP, rank=r, tp=2, heads=1, **SMALL) for r in (0, 1)]
    d = house.rank("D", "consumer", DP, peers=[f"127.0.0.1:{PP}"], **SMALL)
    house.run()
    for r, p in enumerate(ps):
        randomise(p, r)
        expect(p)
    land(d, tp=2)
    for p in ps:
        ready(p)
    house.run(40)
    assert d.results == [RECEIVED] and [p.results for p in ps] == [[SENT], [SENT]]
    for head, p in enumerate(ps):
        assert all((p.block(s)[:] == d.block(t, head)).all() for s, t in ((1, 7), (2, 5), (3, 9)))
    house.settled()


@pytest.mark.parametrize("theirs", [{"staging": "off", "staging_bytes": 0}, {"staging_bytes": 512}])
def test_a_decode_side_without_such_slots_is_written_to_directly(house, theirs):
    p = house.rank("P", "producer", PP, **SMALL)
    d = house.rank("D", "consumer", DP, peers=[f"127.0.0.1:{PP}"], **theirs)
    house.run()
    randomise(p)
    expect(p)
    land(d)
    ready(p)
    house.run(20)
    assert p.results == [SENT] and d.results == [RECEIVED] and same(p, d, (1, 2, 3), (7, 5, 9))
    house.settled()


def test_more_transfers_than_lanes(house, engines):
    """Five lanes; the sixth goes directly."""
    p, d = engines
    house.world.hold = True
    for number in range(6):
        expect(p, f"t{number}")
        land(d, f"t{number}", blocks=(2 * number, 2 * number + 1), end=8)
        ready(p, f"t{number}", blocks=(11 - number, 15 - number), tokens=8)
        house.run(4)
    house.let_go()
    house.run(40)
    assert sorted(one.transfer_id for one in d.results if one.ok) == [f"t{number}" for number in range(6)]
    for number in range(6):
        assert same(p, d, (11 - number, 15 - number), (2 * number, 2 * number + 1))
    house.settled()


@pytest.mark.parametrize("who", ["P", "D"])
def test_given_up_in_the_middle(house, engines, who):
    p, d = engines
    begin(house, p, d)
    if who == "P":
        p.core.submit(cmd.Abort("t", "p-t", "the request ended"))
    else:
        d.core.submit(cmd.Drop("d-t"))
    house.run()
    assert p.results == d.results == [], "copies are under way"
    house.let_go()
    house.run(40)
    assert [one.ok for one in p.results + d.results] == [False, False]
    house.settled()


@pytest.mark.parametrize("how", ["P dies", "D dies", "cut"])
def test_lost_in_the_middle_and_the_slots_come_back(house, engines, how):
    p, d = engines
    begin(house, p, d)
    house.cut() if how == "cut" else house.kill(p if how == "P dies" else d)
    house.wait(3.0 if how == "cut" else 0.5)
    if how != "D dies":
        assert d.areas.staging.lent, "a WRITE may still come"
    house.let_go()
    house.wait(3.0)
    for one in house.ranks:
        assert [result.code for result in one.results] == ["peer_gone"]
        assert one.areas.staging.lent == 0
    house.wait(35.0)
    house.settled()


def test_a_copy_of_a_slot_that_fails_ends_the_transfer_on_both_sides(house, engines):
    p, d = engines
    begin(house, p, d)
    house.world.copies[-1].error = "broken"
    house.let_go()
    house.wait(2.0)
    assert [one.ok for one in p.results + d.results] == [False, False]
    house.wait(35.0)
    house.settled()
    expect(p, "u")
    land(d, "u")
    ready(p, "u")
    house.run(40)
    assert d.results[-1] == cmd.Received("d-u", "u", True, "", ""), "and the pair works on"


def test_a_slot_that_never_arrives_times_out(house, engines):
    p, d = engines
    begin(house, p, d)
    house.wait(62.0)
    house.let_go()
    house.wait(3.0)
    assert [one.ok for one in p.results + d.results] == [False, False]
    house.wait(35.0)
    house.settled()


def test_what_is_computed_again_is_staged_again(house):
    p, d = pair(house, "stream", stream_chunk_bytes=1, **SMALL)
    randomise(p)
    house.world.hold = True
    expect(p, mode="stream")
    land(d, mode="stream")
    p.core.submit(cmd.Grown("t", "p-t", (1, 2), 8))
    house.run()
    p.core.submit(cmd.Rewind("t", "p-t"))
    house.run()
    assert p.results == [], "slots are being filled from the blocks"
    house.let_go()
    house.run(30)
    assert p.results == [cmd.Rewound("p-t", "t")]
    p.memory[:, (1, 2)] = 0
    ready(p, blocks=(4, 6, 8))
    house.run(40)
    assert p.results[1:] == [SENT] and d.results == [RECEIVED] and same(p, d, (4, 6, 8), (7, 5, 9))
    house.settled()


ASK = {"stage_id": 77, "start_token": 0, "end_token": 8, "first_plane": 0, "end_plane": None, "slots": 2}


@pytest.mark.parametrize(
    "message",
    [
        wire.Staged(stage_id=5, slot=0, first=0, count=1),
        wire.StageAsk(reg_id=1, slot_bytes=64, **{**ASK, "end_token": 99}),
        wire.StageAsk(reg_id=1, slot_bytes=64, **{**ASK, "start_token": 3}),
    ],
)
def test_a_prefill_side_that_makes_no_sense_is_cut_off(house, engines, message):
    p, d = engines
    land(d)
    house.run()
    (reg_id,) = d.core._landings._by_reg
    if isinstance(message, wire.StageAsk):
        message = wire.StageAsk(**{**{f: getattr(message, f) for f in message.__struct_fields__}, "reg_id": reg_id})
    (key,) = p.core._peers.by_key
    p.core._channel.send(key, codec.encode(message))
    house.wait(3.0)
    assert [one.ok for one in d.results] == [False]
    expect(p, "u")
    land(d, "u")
    ready(p, "u")
    house.wait(2.0)
    assert d.results[-1] == cmd.Received("d-u", "u", True, "", "")
    house.wait(35.0)
    house.settled()


def test_nobody_stages_into_anothers_registration(house, engines):
    """The other P knows the number."""
    _, d = engines
    other = house.rank("Q", "producer", 5700, **SMALL)
    d.core.submit(cmd.Land("q", "d-q", "push", "127.0.0.1", 5700, "Q", 1, 0, 10, (1, 2, 3)))
    land(d)
    house.run()
    reg_id = next(reg for reg, request in d.core._landings._by_reg.items() if request == "d-t")
    (key,) = other.core._peers.by_key
    answers = []
    other.core._posts.gatherer.lent = lambda key, answer: answers.append(answer)
    other.core._channel.send(key, codec.encode(wire.StageAsk(reg_id=reg_id, slot_bytes=64, **ASK)))
    house.run()
    assert answers == [wire.StageLent(stage_id=77, slots=())]
    d.core.submit(cmd.Drop("d-q"))
    d.core.submit(cmd.Drop("d-t"))
    house.wait(35.0)


@pytest.mark.parametrize("slots", [1, 4, 99])
def test_a_decode_side_that_lends_another_number_is_cut_off(house, engines, slots):
    p, d = engines
    lie = wire.StageLent(stage_id=1, slots=tuple(range(4096, 4096 + 64 * slots, 64)))
    d.core._scatterer.asked = lambda peer, ask, route: d.core._peers.send(peer.key, lie)
    expect(p)
    land(d)
    ready(p)
    house.wait(3.0)
    assert [one.ok for one in p.results + d.results] == [False, False]
    house.wait(35.0)
    house.settled()
