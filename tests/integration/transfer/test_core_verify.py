"""What landed is what was computed, and of the prompt that was asked for; or D hears in time that it is not."""

from __future__ import annotations

import ctypes

import pytest
from transfer_house import BLOCK, DP, PLANES, PP, TOKEN, expect, land, pair, randomise, ready, same

from kvferry.protocol import codec
from kvferry.protocol import messages as wire
from kvferry.protocol.digest import SAMPLES
from kvferry.protocol.prompt import mark_prompt, prompt_digest
from kvferry.transfer import commands as cmd

SENT = cmd.Sent("p-t", "t", True, "", "")
RECEIVED = cmd.Received("d-t", "t", True, "", "")
STREAM = {"stream_chunk_bytes": 1}


@pytest.fixture(params=["off", "sample", "full"])
def depth(request):
    return request.param


def transfer(house, p, d, mode, **where):
    expect(p, mode=mode)
    land(d, mode=mode, **where)
    if mode == "stream":
        p.core.submit(cmd.Grown("t", "p-t", (1, 2), 8))
        house.run()
    ready(p)
    house.run()


def messages(house, kind):
    """Those of one kind that are sent from now on."""
    seen = []

    def keep(data):
        if data and isinstance(message := codec.decode(data), kind):
            seen.append(message)
        return [data]

    house.network.filter = keep
    return seen


def damage(house, rank, block, head, plane, offset, mask=1):
    """Change one byte whenever it arrives."""
    address = rank.memory[plane, block, head].ctypes.data + offset

    def flip(start, nbytes):
        if start <= address < start + nbytes:
            cell = ctypes.c_ubyte.from_address(address)
            cell.value ^= mask

    house.world.on_move = flip


def test_kv_that_is_right_lands_at_every_depth(house, mode, depth):
    p, d = pair(house, mode, verify_kv=depth, **STREAM)
    randomise(p)
    landed = messages(house, wire.Landed)
    transfer(house, p, d, mode)
    assert p.results == [SENT] and d.results == [RECEIVED] and same(p, d, (1, 2, 3), (7, 5, 9))
    slices = {"off": 0, "sample": PLANES * SAMPLES, "full": PLANES * 3}[depth]
    assert [(one.verify, len(one.digests)) for one in landed] == [(depth, 8 * slices)]
    for rank in (p, d):
        assert len(rank.core.stats.take().verify_s) == (depth != "off") and rank.core._verifier._open == {}
    house.settled()


@pytest.mark.parametrize("place", [(7, 0, 0, 0), (5, 1, 1, BLOCK * TOKEN - 1), (9, 1, 0, 2 * TOKEN - 1)], ids=str)
def test_a_byte_flipped_in_flight_is_found_and_named(house, mode, place):
    block, head, plane, offset = place
    p, d = pair(house, mode, verify_kv="full", **STREAM)
    randomise(p)
    damage(house, d, block, head, plane, offset, mask=0x80)
    transfer(house, p, d, mode)
    assert p.results == [SENT]
    (result,) = d.results
    assert (result.ok, result.code) == (False, "kv_mismatch")
    first = {7: 0, 5: 4, 9: 8}[block]
    named = f"layer {plane}, block {block}, tokens {first} to {min(first + 3, 9)}: P rank 0 at 127.0.0.1:{PP} computed "
    assert result.reason.startswith(named), result.reason
    assert "landed on D rank 0; 1 of 6 digests differ" in result.reason
    assert d.core.stats.take().ended == {"decode": {"kv_mismatch": 1}}
    house.settled()


def test_what_was_not_asked_for_may_differ(house, mode):
    """The last block moves whole; its tokens from `end` on are D's own to compute."""
    p, d = pair(house, mode, verify_kv="full", **STREAM)
    randomise(p)
    damage(house, d, 9, 0, 0, 2 * TOKEN)
    transfer(house, p, d, mode)
    assert d.results == [RECEIVED] and not same(p, d, (3,), (9,))


def test_off_finds_nothing_and_a_sample_finds_what_never_came(house, mode, depth):
    """A block that is as it was before: what a copy leaves that says it is done and is not."""
    p, d = pair(house, mode, verify_kv=depth, **STREAM)
    randomise(p)
    stale = d.memory.copy()

    def undo(start, nbytes):
        for block in (7, 9):  # the prompt's first and last
            d.memory[:, block] = stale[:, block]

    house.world.on_move = undo
    transfer(house, p, d, mode)
    assert [result.code for result in d.results] == ["" if depth == "off" else "kv_mismatch"]
    assert p.results == [SENT]
    house.settled()


@pytest.mark.parametrize(("p_says", "d_says", "holds"), [("full", "sample", "sample"), ("off", "full", "off")])
def test_the_weaker_setting_holds(house, mode, p_says, d_says, holds):
    p = house.rank("P", "producer", PP, mode=mode, verify_kv=p_says)
    d = house.rank("D", "consumer", DP, mode=mode, peers=[f"127.0.0.1:{PP}"], verify_kv=d_says)
    house.run()
    randomise(p)
    landed = messages(house, wire.Landed)
    transfer(house, p, d, mode)
    assert [one.verify for one in landed] == [holds] and d.results == [RECEIVED]


def test_only_the_rank_whose_heads_changed_complains(house, mode, depth):
    """P one rank of two heads, D two ranks of one."""
    p = house.rank("P", "producer", PP, mode=mode, verify_kv=depth, **STREAM)
    ranks = [
        house.rank("D", "consumer", DP, rank=i, tp=2, heads=1, mode=mode, peers=[f"127.0.0.1:{PP}"], verify_kv=depth)
        for i in range(2)
    ]
    house.run()
    randomise(p)
    bad = ranks[1]
    house.world.on_move = lambda start, nbytes: bad.memory.fill(0)
    expect(p, mode=mode)
    for d in ranks:
        land(d, mode=mode)
    ready(p)
    house.run()
    codes = [result.code for d in ranks for result in d.results]
    assert codes == (["", ""] if depth == "off" else ["", "kv_mismatch"])
    if depth != "off":
        assert "landed on D rank 1" in bad.results[0].reason


def test_a_prompt_that_was_computed_anew_is_digested_anew(house):
    p, d = pair(house, "stream", verify_kv="full", **STREAM)
    randomise(p)
    expect(p, mode="stream")
    land(d, mode="stream")
    p.core.submit(cmd.Grown("t", "p-t", (1, 2), 8))
    house.run()
    p.core.submit(cmd.Rewind("t", "p-t"))
    house.run()
    randomise(p, seed=2)
    p.core.submit(cmd.Grown("t", "p-t", (4,), 4, 1))
    house.run()
    ready(p, blocks=(4, 5, 6))
    house.run()
    assert d.results == [RECEIVED] and same(p, d, (4, 5, 6), (7, 5, 9))
    house.settled()


def test_digests_that_are_none_end_the_connection(house, mode):
    p, d = pair(house, mode, verify_kv="full")
    randomise(p)

    def cut_short(data):
        message = codec.decode(data) if data else None
        if isinstance(message, wire.Landed):
            made = {name: getattr(message, name) for name in message.__struct_fields__}
            return [codec.encode(wire.Landed(**{**made, "digests": b"1234567"}))]
        return [data]

    house.network.filter = cut_short
    transfer(house, p, d, mode)
    house.wait(2.0)
    assert [(result.ok, result.code) for result in d.results] == [(False, "bad_message")]


def test_a_peer_that_goes_leaves_no_account(house):
    p, d = pair(house, "pull", verify_kv="full")
    randomise(p)
    house.world.hold = True
    transfer(house, p, d, "pull")
    assert p.core._verifier._open != {}
    house.kill(d)
    house.run()
    assert p.core._verifier._open == {} and not p.results[0].ok


# -- the prompt -------------------------------------------------------------------------------------------------------

IDS = list(range(300, 311))  # 11 tokens, of which D takes 10


def expect_prompt(p, ids, mode):
    p.core.submit(cmd.Expect("t", "p-t", mode, 1, len(ids), mark_prompt(ids)))


def land_prompt(d, ids, mode):
    end = len(ids) - 1
    digest = prompt_digest(ids[:end])
    d.core.submit(cmd.Land("t", "d-t", mode, "127.0.0.1", PP, "P", 1, 0, end, (7, 5, 9), digest))


@pytest.mark.parametrize("first", ["registration", "request"])
@pytest.mark.parametrize("theirs", [[300, 301, 999, *IDS[3:]], IDS[:-2]], ids=["other", "shorter"])
def test_another_prompt_under_the_same_id_is_refused_at_once(house, mode, first, theirs):
    p, d = pair(house, mode)
    steps = [lambda: land_prompt(d, theirs, mode), lambda: expect_prompt(p, IDS, mode)]
    for step in steps if first == "registration" else reversed(steps):
        step()
        house.run()
    (result,) = d.results
    assert (result.ok, result.code) == (False, "prompt_mismatch")
    told = (
        "decode side has a prompt of 9 tokens, prefill side one of 11" if len(theirs) < len(IDS) else "token ids differ"
    )
    assert told in result.reason
    assert not d.memory.any()


@pytest.mark.parametrize("more", [0, 1])
def test_the_same_prompt_is_served_and_one_that_p_has_continued(house, mode, more):
    p, d = pair(house, mode)
    randomise(p)
    expect_prompt(p, IDS, mode)
    land_prompt(d, [*IDS, *range(77, 77 + more)], mode)
    ready(p, tokens=len(IDS))
    house.run()
    assert d.results == [RECEIVED] and same(p, d, (1, 2), (7, 5))


def test_a_registration_that_takes_nothing_needs_no_prompt(house, mode):
    p, d = pair(house, mode)
    expect_prompt(p, IDS, mode)
    land(d, mode=mode, start=10, end=10, blocks=())
    ready(p, tokens=len(IDS))
    house.run()
    assert p.results == [SENT] and d.results == [RECEIVED]
