"""Mode `stream` in the cores: chunks land byte for byte, preempted or not, and whoever asks learns how far P is."""

from __future__ import annotations

import pytest
from transfer_house import BLOCKS, PP, Flag, land, pair, randomise, ready, same

from kvferry.protocol import codec
from kvferry.protocol import messages as wire
from kvferry.transfer import commands as cmd

EAGER = {"stream_chunk_bytes": 1}


@pytest.fixture(params=["off", "always"])
def engines(house, request):
    """P and D, and P's memory full of what can be recognised. Staged: in slots of one piece."""
    p, d = pair(house, "stream", **EAGER, staging=request.param, staging_bytes=1024)
    randomise(p)
    return p, d


def expect(p, tid="t", tokens=10, fan_out=1):
    p.core.submit(cmd.Expect(tid, f"p-{tid}", "stream", fan_out, tokens))


def grown(p, blocks, tokens, tid="t", planes=None, moment=None):
    p.core.submit(cmd.Grown(tid, f"p-{tid}", blocks, tokens, planes, moment))


def rewind(p, tid="t"):
    p.core.submit(cmd.Rewind(tid, f"p-{tid}"))


SENT = cmd.Sent("p-t", "t", True, "", "")
RECEIVED = cmd.Received("d-t", "t", True, "", "")


def test_chunks_are_there_before_the_prompt_is_done(house, engines):
    p, d = engines
    expect(p)
    land(d, mode="stream")
    grown(p, (1,), 4)
    house.run()
    assert same(p, d, (1,), (7,)) and not d.block(5).any() and p.results == d.results == []
    grown(p, (2,), 7)  # 3 tokens of the next block: it leaves when it is whole
    house.run()
    assert not d.block(5).any()
    ready(p)
    house.run()
    assert p.results == [SENT] and d.results == [RECEIVED] and same(p, d, (1, 2, 3), (7, 5, 9))
    assert not d.memory[:, [block for block in range(BLOCKS) if block not in (7, 5, 9)]].any()
    house.settled()


def test_the_first_planes_of_a_step_leave_before_its_last(house, engines):
    p, d = engines
    expect(p)
    land(d, mode="stream")
    grown(p, (1, 2, 3), 10, planes=1)
    house.run()
    assert (d.memory[0, (7, 5)] == p.memory[0, (1, 2)]).all() and not d.memory[1].any()
    ready(p)
    house.run()
    assert d.results == [RECEIVED] and same(p, d, (1, 2, 3), (7, 5, 9))
    house.settled()


def test_a_decode_engine_that_comes_late_gets_everything(house, engines):
    p, d = engines
    expect(p)
    grown(p, (1,), 4)
    ready(p)
    house.run()
    land(d, mode="stream")
    house.run()
    assert p.results == [SENT] and d.results == [RECEIVED] and same(p, d, (1, 2, 3), (7, 5, 9))
    house.settled()


def test_chunks_wait_for_a_slow_network_and_become_one(house, engines):
    p, d = engines
    house.world.hold = True
    expect(p, tokens=40)
    land(d, mode="stream", blocks=tuple(range(10)), end=40)
    for number in range(9):
        grown(p, (number + 5,), 4 * number + 4)
        house.run(2)
    assert len({copy.whole for copy in house.world.copies}) == len(house.world.copies) in (4, 8), (
        "staged: 2 slots in each"
    )
    house.let_go()
    ready(p, blocks=tuple(range(5, 15)), tokens=40)
    house.run(30)
    assert d.results == [RECEIVED] and same(p, d, range(5, 15), range(10))
    house.settled()


def test_preempted_the_engine_has_its_blocks_back_when_nothing_reads_them(house, engines):
    p, d = engines
    house.world.hold = True
    expect(p)
    land(d, mode="stream")
    grown(p, (1,), 4)
    house.run()
    rewind(p)
    house.run()
    assert p.results == [] and house.world.copies
    house.let_go()
    house.run()
    assert p.results == [cmd.Rewound("p-t", "t")] and d.results == []
    p.memory[:, 1] = 0  # somebody else's now
    grown(p, (4,), 4)
    grown(p, (2,), 8)
    ready(p, blocks=(4, 2, 3))
    house.run()
    assert p.results[1:] == [SENT] and d.results == [RECEIVED] and same(p, d, (4, 2, 3), (7, 5, 9))
    house.settled()


def test_preempted_with_a_step_still_on_the_device(house, engines):
    """Its moment passes after the rewind, for blocks that are others' by then."""
    p, d = engines
    expect(p)
    land(d, mode="stream")
    flag = Flag()
    grown(p, (1,), 4, moment=flag)
    house.run()
    rewind(p)
    house.run()
    flag.passed = True
    house.run()
    assert p.results == [cmd.Rewound("p-t", "t")] and not d.memory.any()
    ready(p)
    house.run()
    assert d.results == [RECEIVED] and same(p, d, (1, 2, 3), (7, 5, 9))
    house.settled()


def test_a_rewind_of_what_is_not_here_is_answered(house, engines):
    p, _ = engines
    rewind(p, "never")
    house.run()
    assert p.results == [cmd.Rewound("p-never", "never")]
    house.settled()


class Late:
    """A device that gets on between two looks at it: a moment is not seen to have passed at the first `looks`."""

    def __init__(self, looks):
        self.looks = looks

    def query(self):
        self.looks -= 1
        return self.looks < 0


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("looks", [1, 2, 3])
def test_steps_are_taken_in_their_order_however_their_moments_are_seen_to_pass(house, engines, looks, together):
    p, d = engines
    expect(p)
    land(d, mode="stream")
    house.run()
    grown(p, (1,), 4, moment=Late(looks))
    if not together:
        house.run(1)
    grown(p, (2,), 8, moment=Late(0))
    house.run()
    assert same(p, d, (1, 2), (7, 5))
    ready(p)
    house.run()
    assert p.results == [SENT] and d.results == [RECEIVED] and same(p, d, (1, 2, 3), (7, 5, 9))
    house.settled()


@pytest.mark.parametrize("mode", ["push", "stream"])
def test_landed_with_the_wrong_size_is_no_success(house, mode):
    p, d = pair(house, mode, **EAGER)
    land(d, mode=mode)
    house.run()
    (reg_id,) = d.core._landings._by_reg
    (key,) = p.core._peers.by_key
    whole = d.block(0).nbytes * 2 * 3  # heads, blocks
    for message in (
        wire.Begin(reg_id=reg_id, sealed=mode == "push"),
        wire.Landed(reg_id=reg_id, nbytes=whole - 8, descriptors=3),
    ):
        p.core._channel.send(key, codec.encode(message))
    house.run()
    (result,) = d.results
    assert (result.ok, result.code) == (False, "wrong_size")
    assert f"wrote {whole - 8} bytes, {whole} were registered for" in result.reason
    p.core.submit(cmd.Expect("t", "p-t", mode, 1, 10))
    ready(p)
    house.run()
    house.wait(2.0)
    p.core.submit(cmd.Expect("u", "p-u", mode, 1, 10))
    ready(p, "u")
    land(d, "u", mode)
    house.run()
    assert d.results[-1] == cmd.Received("d-u", "u", True, "", ""), "and the pair works on"
    house.wait(35.0)


def test_the_right_size_of_nothing_is_nothing(house, engines):
    p, d = engines
    expect(p)
    land(d, mode="stream", start=8, end=8, blocks=())
    grown(p, (1,), 4)
    ready(p)
    house.run()
    assert p.results == [SENT] and d.results == [RECEIVED] and not d.memory.any()
    house.settled()


@pytest.mark.parametrize("who", ["P", "D"])
def test_aborted_in_the_middle_of_a_chunk(house, engines, who):
    p, d = engines
    house.world.hold = True
    expect(p)
    land(d, mode="stream")
    grown(p, (1,), 4)
    house.run()
    if who == "P":
        p.core.submit(cmd.Abort("t", "p-t", "the request ended", held=True))
    else:
        d.core.submit(cmd.Drop("d-t"))
    house.run()
    assert p.results == d.results == [], "a WRITE is under way"
    house.let_go()
    house.run()
    assert [result.code for result in d.results] == ["aborted" if who == "P" else "cancelled"]
    if who == "D":
        ready(p)
        house.run()
    assert [(result.ok, result.code) for result in p.results] == [(False, d.results[0].code)]
    house.settled()


@pytest.mark.parametrize("how", ["P dies", "D dies", "cut"])
def test_lost_in_the_middle_of_a_stream(house, engines, how):
    p, d = engines
    house.world.hold = True
    expect(p)
    land(d, mode="stream")
    grown(p, (1,), 4)
    house.run()
    house.cut() if how == "cut" else house.kill(p if how == "P dies" else d)
    house.let_go()
    house.wait(2.0)
    if how != "D dies":
        assert [result.code for result in d.results] == ["peer_gone"]
    if how != "P dies":
        grown(p, (2,), 8)
        ready(p)
        house.run()
        assert [result.ok for result in p.results] == [False]
    house.wait(35.0)
    house.settled()


# -- how far P is


class Asker:
    """A router: its own channel to P, and what came back."""

    def __init__(self, house):
        self.house = house
        self.channel = house.network.channel("127.0.0.1", 7700)
        self.key = self.channel.dial("127.0.0.1", PP)
        self.channel.poll(0)
        self.told = []

    def watch(self, percent, tid="t"):
        self.channel.send(self.key, codec.encode(wire.Watch(transfer_id=tid, percent=percent)))
        self.look()

    def look(self):
        self.house.run(2)
        self.told += [codec.decode(event.data) for event in self.channel.poll(0) if hasattr(event, "data")]


@pytest.fixture
def asker(house):
    made = Asker(house)
    yield made
    made.channel.close()


def reached(tokens, of=10, ended=False, tid="t"):
    return wire.Reached(transfer_id=tid, tokens=tokens, of=of, ended=ended)


def test_watched_from_before_it_came(house, engines, asker):
    p, d = engines
    asker.watch(70)
    expect(p)
    grown(p, (1,), 4)
    asker.look()
    assert asker.told == []
    grown(p, (2,), 8)
    asker.look()
    assert asker.told == [reached(8)]
    asker.watch(75)
    assert asker.told == [reached(8)] * 2, "at once, where it is so far already"
    ready(p)
    land(d, mode="stream")
    asker.look()
    house.run()
    asker.watch(100)
    assert asker.told[2:] == [reached(0, 0, ended=True)]
    house.settled()


def test_watched_and_it_never_came(house, engines, asker):
    asker.watch(50, "never")
    assert engines[0].core.open_counts()["sources"] == 1
    house.wait(31.0)
    asker.look()
    assert asker.told == [reached(0, 0, ended=True, tid="never")]
    house.settled()


def test_watched_and_given_up(house, engines, asker):
    p, _ = engines
    expect(p)
    asker.watch(50)
    p.core.submit(cmd.Abort("t", "p-t", "client left"))
    asker.look()
    assert asker.told == [reached(0, ended=True)]
    house.settled()


def test_an_asker_that_went_away_is_forgotten(house, engines, asker):
    p, _ = engines
    expect(p)
    asker.watch(50)
    asker.channel.close()
    house.run()
    assert [source.watchers for source in p.core._rendezvous._sources.values()] == [[]]
    p.core.submit(cmd.Abort("t", "p-t", "client left"))
    house.run()
    house.settled()
