"""What a peer that has the key can't do all the same: harm others, name memory that isn't its own, end this engine."""

from __future__ import annotations

import logging

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transfer_house import BLOCKS, DP, PP, House, expect, land, pair, randomise, ready, same
from wire_examples import EXAMPLES, mutated

from kvferry.errors import KeyRefused
from kvferry.ids import RegistrationId, TransferId
from kvferry.protocol import codec
from kvferry.protocol import messages as wire
from kvferry.transfer import commands as cmd
from kvferry.transfer.channel import Barred, Got, Uninvited
from kvferry.transfer.peers import Stage


class Rogue:
    """Has the key, an agent with memory of its own, and says what it likes to the rank at `port`."""

    def __init__(self, house: House, name: str = "R", port: int = PP, at: int = 7700) -> None:
        self.house, self.name, self.at = house, name, at
        self.memory = np.zeros(1 << 12, np.uint8)
        self.fabric = house.world.fabric(name)
        self.fabric.register([(self.memory.ctypes.data, self.memory.nbytes)], "cpu")
        self.channel = house.network.channel("127.0.0.1", at)
        self.key = self.channel.dial("127.0.0.1", port)
        self.channel.poll(0)
        self.heard: list[wire.AnyMessage] = []

    def say(self, *messages: wire.Message | bytes) -> None:
        for message in messages:
            self.channel.send(self.key, message if isinstance(message, bytes) else codec.encode(message))
        self.run()

    def run(self, rounds: int = 6) -> None:
        for _ in range(rounds):
            self.house.run(1)
            self.notes = [note for _, note in self.fabric.progress()] or getattr(self, "notes", [])
            self.heard += [codec.decode(one.data) for one in self.channel.poll(0) if isinstance(one, Got) and one.data]

    def told(self, kind: type) -> list:
        return [one for one in self.heard if type(one) is kind]

    def hello(self, layout: wire.Layout, **other: object) -> wire.Hello:
        facts = dict(
            life=7,
            engine_id=self.name,
            rank=0,
            tp_size=1,
            layout=layout,
            agent=self.fabric.metadata(),
            scratch=self.memory.ctypes.data,
            silence_s=30.0,
            pull_by="auto",
            dialled=f"127.0.0.1:{PP}",
        )
        return wire.Hello(**{**facts, **other})  # type: ignore[arg-type]

    def enter(self, layout: wire.Layout) -> None:
        """As an honest rank would: greet, and show whose agent it is."""
        self.say(self.hello(layout))
        self.say(wire.Warm(echo=self.notes[-1]))

    def close(self) -> None:
        self.channel.close()
        self.fabric.close()
        self.house.run()


@pytest.fixture
def rogue(house):
    made = Rogue(house)
    yield made
    made.close()


def counted(rank) -> dict[str, int]:
    taken = rank.core.stats.take()
    return {} if taken is None else taken.turned_away


def register(reg_id=1, tid="t", blocks=(1, 2, 3), end=10, mode="push"):
    return wire.Register(
        reg_id=RegistrationId(reg_id),
        transfer_id=TransferId(tid),
        mode=mode,
        start_token=0,
        end_token=end,
        block_ids=blocks,
        legs=1,
        credit=1,
    )


def works(house, p, d, tid="good"):
    randomise(p)
    expect(p, tid)
    land(d, tid)
    ready(p, tid)
    house.run(20)
    assert d.results[-1].ok and d.results[-1].transfer_id == tid and same(p, d, (1, 2, 3), (7, 5, 9))


# -- whose memory ------------------------------------------------------------------------------------------------------


def test_agent_of_another_engine_gets_no_registration(house, rogue):
    """The rogue greets with the agent and the layout of D, so that P would write over D's blocks."""
    p, d = pair(house)
    d.core.close()
    house.ranks.remove(d)  # D isn't connected here (any more), but its agent serves
    victim = house.world.fabric("V")
    victim.register([(d.memory.ctypes.data, d.memory.nbytes), *d.areas.regions], "cpu")
    victim.needs_driving = False
    before = d.memory.copy()
    counted(p)
    rogue.say(rogue.hello(d.core._layout, agent=victim.metadata(), scratch=d.areas.scratch))
    assert rogue.told(wire.Welcome)
    assert rogue.notes == [], "what came with P's access went to who holds the agent"
    rogue.say(wire.Warm(echo=b"\0" * 16), wire.Warm(), register())
    expect(p)
    ready(p)
    rogue.run(20)
    assert counted(p) == {"bad_greeting": 2, "not_greeted": 1}
    assert p.results == [] and (d.memory == before).all() and p.core.open_counts()["posts"] == 0
    house.wait(130.0)
    assert p.core.open_counts()["peers"] == 0, "it is not waited for without end"
    victim.close()


@pytest.mark.parametrize("stale", [False, True])
def test_a_note_that_is_quicker_than_the_welcome_is_kept(house, stale):
    """D's agent may be driven just then, for other transfers. A note of a greeting before is said back too, in vain."""
    p = house.rank("P", "producer", PP)
    house.network.hold = True
    d = house.rank("D", "consumer", DP, peers=[f"127.0.0.1:{PP}"])
    house.run(2)
    house.network.deliver()
    house.run(1)  # P greets, and writes
    (of_p,) = p.core._peers.by_key.values()
    notes = d.core._fabric.progress()
    assert notes == [(p.core._fabric.name, of_p.note)]
    if stale:
        notes = [(p.core._fabric.name, b"of another time"), *notes]
        d.core._peers.noted(notes[:1])
        house.network.deliver()
        house.run(2)
        notes = notes[1:]
    d.core._peers.noted(notes)
    house.network.hold = False
    house.network.deliver()
    house.run()
    assert d.core._peers.up_keys() and p.core._peers.up_keys()
    works(house, p, d)
    house.settled()


@pytest.mark.parametrize("where", ["before", "after", "beside"])
def test_memory_that_its_agent_has_not_registered_is_not_written_to(house, rogue, where):
    """Its layout reaches beyond what it registered: that peer is cut off, others don't notice."""
    p, d = pair(house)
    plane = d.core._layout.planes[0]
    size = BLOCKS * plane.block_stride
    base = {
        "before": rogue.memory.ctypes.data - size,
        "after": rogue.memory.ctypes.data + rogue.memory.nbytes,
        "beside": d.memory.ctypes.data,
    }[where]
    planes = tuple(msgspec.structs.replace(one, base=base) for one in d.core._layout.planes)
    before = d.memory.copy()
    rogue.enter(msgspec.structs.replace(d.core._layout, planes=planes))
    rogue.say(register(tid="stolen"))
    expect(p, "stolen")
    ready(p, "stolen")
    rogue.run(20)
    assert (d.memory == before).all() and p.core.open_counts()["posts"] == 0
    assert [(r.ok, r.code) for r in p.results] == [(False, "write_failed")]
    assert rogue.told(wire.Refuse)[-1].code == "cut_off"
    works(house, p, d)
    house.settled()


@pytest.mark.parametrize("blocks", [(1, 2, BLOCKS), (1, 2, 2**62), (1, 2), ()])
def test_blocks_that_are_not_there_end_that_registration_alone(house, rogue, blocks):
    p, d = pair(house)
    rogue.enter(d.core._layout)
    rogue.say(register(tid="x", blocks=blocks))
    expect(p, "x")
    ready(p, "x")
    rogue.run(20)
    (failed,) = rogue.told(wire.Failed)
    assert failed.code == "write_failed" and "block" in failed.reason
    works(house, p, d)
    house.settled()


@pytest.mark.parametrize(
    ("field", "value"), [("block_stride", 2**61), ("token_bytes", 2**61), ("token_bytes", 0), ("base", 0)]
)
def test_a_layout_that_no_rank_can_have_is_refused(house, rogue, field, value):
    p, d = pair(house)
    counted(p)
    planes = tuple(msgspec.structs.replace(one, **{field: value}) for one in d.core._layout.planes)
    huge = msgspec.structs.replace(d.core._layout, planes=planes, num_blocks=2**32)
    rogue.say(rogue.hello(huge))
    (refused,) = rogue.told(wire.Refuse)
    assert "planes[0] is no memory" in refused.reason and counted(p) == {"bad_greeting": 1}
    rogue.say(rogue.hello(msgspec.structs.replace(d.core._layout, heads=9)))
    assert "heads: 9 on one rank, of 2" in rogue.told(wire.Refuse)[-1].reason
    works(house, p, d)


# -- whose transfer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["push", "pull", "stream"])
def test_registrations_of_another_are_out_of_reach(house, rogue, mode):
    """Their numbers are easily guessed. The rogue is connected to both, as a decode and as a prefill rank."""
    p, d = pair(house, mode)
    rogue.enter(d.core._layout)
    (real,) = d.core._peers.by_key
    expect(p, mode=mode)
    land(d, mode=mode)
    house.run()
    (reg_id,) = d.core._landings._by_reg
    rogue.say(wire.Cancel(reg_id=reg_id, reason="x"), wire.Fetched(reg_id=reg_id, ok=True))
    assert [one.code for one in rogue.told(wire.Failed)] == ["expired_transfer"] * 2
    fake = house.rank("F", "producer", 5700)
    d.core._peers.dial("127.0.0.1", 5700)
    house.run()
    (fake_key,) = fake.core._peers.by_key
    counted(d)
    for lie in (
        wire.Begin(reg_id=reg_id, sealed=True),
        wire.Seal(reg_id=reg_id, end_token=10, attempt=0),
        wire.Grant(reg_id=reg_id, block_ids=(1, 2, 3)),
        wire.Landed(reg_id=reg_id, nbytes=1, descriptors=1),
        wire.Failed(reg_id=reg_id, code="x", reason="x"),
    ):
        fake.core._channel.send(fake_key, codec.encode(lie))
    house.run()
    assert counted(d) == {"foreign": 5}
    assert d.results == [] and d.core._peers.by_key[real].stage is Stage.UP
    randomise(p)
    ready(p)
    house.run()
    assert d.results[0].ok and p.results[0].ok and same(p, d, (1, 2, 3), (7, 5, 9))
    house.settled()


def test_what_only_the_other_side_may_say_is_not_taken(house, rogue):
    p, d = pair(house)
    rogue.enter(d.core._layout)
    counted(p)
    rogue.say(wire.Landed(reg_id=1, nbytes=1, descriptors=1), wire.Welcome(**fields(rogue.hello(d.core._layout))))
    assert counted(p) == {"wrong_side": 2}
    (p_key,) = [key for key, one in p.core._peers.by_key.items() if one.greeting.engine_id == "D"]
    abandon = wire.Abandon(transfer_id=TransferId("t"), reason="x")
    for message in (register(), wire.Describe(), abandon, rogue.hello(d.core._layout)):
        p.core._channel.send(p_key, codec.encode(message))
    house.run()
    assert counted(d) == {"wrong_side": 4}
    works(house, p, d)


def fields(hello: wire.Hello) -> dict:
    return {name: getattr(hello, name) for name in wire.Greeting.__struct_fields__}


# -- twice, too much, nothing at all -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["push", "pull", "stream"])
def test_what_a_decode_rank_says_twice_counts_once(house, mode):
    p, d = pair(house, mode)
    counted(p), counted(d)
    of_decode = (b"Register", b"Waiting", b"Cancel", b"Fetched", b"Warm", b"Beat")
    house.network.filter = lambda data: [data] * (1 + any(one in data for one in of_decode))
    for tid in ("kept", "dropped"):
        expect(p, tid, mode=mode)
        land(d, tid, mode=mode)
    house.run()
    d.core.submit(cmd.Drop("d-dropped"))
    randomise(p)
    ready(p, "kept")
    house.run(20)
    assert [(r.transfer_id, r.ok) for r in d.results] == [("dropped", False), ("kept", True)]
    assert same(p, d, (1, 2, 3), (7, 5, 9)) and counted(p) == {"replayed": 2} and counted(d) == {}
    p.core.submit(cmd.Abort("dropped", "p-dropped", "gone"))
    house.run()
    house.settled()


@pytest.mark.parametrize("mode", ["push", "pull", "stream"])
@pytest.mark.parametrize("kind", ["Begin", "Grant", "Landed", "Seal"])
def test_what_a_prefill_rank_says_twice_moves_no_byte_twice(house, mode, kind):
    """What makes no sense a second time ends the connection, and each request that hung on it once."""
    p, d = pair(house, mode)
    counted(d)
    house.network.filter = lambda data: [data] * (1 + (kind.encode() in data))
    expect(p, mode=mode)
    land(d, mode=mode)
    house.run()
    ready(p)
    house.run(20)
    house.network.filter = lambda data: [data]
    house.wait(40.0)
    assert len(d.results) == len(p.results) == 1
    assert d.results[0].ok or counted(d)["unusable"] == 1
    works(house, p, d)
    house.settled()


def test_a_registration_replayed_after_its_end_is_refused_and_writes_nothing(house, rogue):
    p, d = pair(house)
    rogue.enter(d.core._layout)
    works(house, p, d)
    d.memory[:] = 0
    said = register(reg_id=1, tid="good", blocks=(7, 5, 9))
    rogue.say(said, said, wire.Cancel(reg_id=1, reason="x"), wire.Fetched(reg_id=1, ok=True))
    assert {one.code for one in rogue.told(wire.Failed)} == {"expired_transfer"} and not d.memory.any()
    house.settled()


def test_a_greeting_said_again_and_again_leaves_one_peer(house):
    house.network.filter = lambda data: [data] * 3 if b"Hello" in data or b"Welcome" in data else [data]
    p, d = pair(house)
    house.run(30)
    assert p.core.open_counts()["peers"] == d.core.open_counts()["peers"] == 1
    house.network.filter = lambda data: [data]
    works(house, p, d)
    house.settled()


def test_too_much_is_said_to_be_too_much(house, rogue):
    p, d = pair(house)
    counted(p)
    rogue.say(codec.MAGIC + bytes([codec.VERSION]) + bytes(codec.MAX_BYTES))
    assert "at most 8388608" in rogue.told(wire.Refuse)[0].reason and counted(p) == {"oversized": 1}
    works(house, p, d)


def test_a_flood_fills_the_counter_and_not_the_log(house, rogue, caplog):
    p, d = pair(house)
    counted(p)
    with caplog.at_level(logging.WARNING, "kvferry.transfer"):
        for _ in range(200):
            rogue.say(b"garbage")
        house.now += 11
        rogue.say(b"garbage")
    assert counted(p) == {"malformed": 201}
    lines = [one.getMessage() for one in caplog.records if "malformed" in one.getMessage()]
    assert len(lines) == 2 and "199 more" in lines[1]
    works(house, p, d)


def test_who_is_turned_away_in_the_handshake_is_counted(house):
    p, d = pair(house)
    counted(p)
    p.core._channel.events += [Uninvited("wrong_key"), Uninvited("wrong_key"), Uninvited("no_handshake")]
    house.run()
    assert counted(p) == {"wrong_key": 2, "no_handshake": 1}
    works(house, p, d)


def test_requests_for_a_listener_with_another_key_fail_at_once(house):
    """And when it has the right one, they succeed again."""
    d = house.rank("D", "consumer", DP)
    land(d, "one", blocks=(1, 2, 3))
    house.run()
    (key,) = d.core._peers.by_key
    d.core._channel.hang_up(key)
    d.core._channel.events.append(Barred(key, KeyRefused("side channel x has another key")))
    house.run(1)
    land(d, "two", blocks=(1, 2, 3))
    house.run(1)
    assert [r.code for r in d.results] == ["wrong_key"] * 2 and d.results[1].reason.startswith("side channel x has")
    assert d.core._channel.dialled == {}, "it isn't asked again for a while"
    p = house.rank("P", "producer", PP)
    house.wait(3.0)
    works(house, p, d)
    house.settled()


# -- anything ----------------------------------------------------------------------------------------------------------

SAID = st.lists(mutated(), min_size=1, max_size=12)
KEEP = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@KEEP
@given(SAID, st.booleans(), st.sampled_from(["push", "pull", "stream"]))
def test_whatever_a_decode_rank_says_the_engine_goes_on(messages, greeted, mode):
    house = House()
    p, d = pair(house, mode)
    rogue = Rogue(house)
    expect(p, "t", mode=mode)
    house.run(2)
    if greeted:
        rogue.enter(d.core._layout)
    rogue.say(*messages)
    ready(p, "t")
    rogue.run()
    rogue.close()
    expect(p, "good", mode=mode)
    land(d, "good", mode=mode)
    ready(p, "good")
    house.run(20)
    assert d.results[-1].ok and same(p, d, (1, 2, 3), (7, 5, 9))
    house.wait(310.0, 15.0)
    house.settled()
    for one in house.ranks:
        one.core.close()


@KEEP
@given(SAID, st.booleans())
def test_whatever_a_prefill_rank_says_the_engine_goes_on(messages, greeted):
    """The rogue listens, and D comes to it with a request."""
    house = House()
    p, d = pair(house)
    rogue = Rogue(house, port=9, at=5700)
    land(d, "bad", port=5700, engine="", blocks=(1, 2, 3))
    for _ in range(3):
        rogue.run(2)
    (link,) = [one for one in house.network.links if one.listener is rogue.channel]
    rogue.key = link.listener_key
    if greeted:
        rogue.say(wire.Welcome(**fields(rogue.hello(d.core._layout))))
    rogue.say(*messages)
    rogue.run()
    works(house, p, d)
    rogue.close()
    house.wait(310.0, 15.0)
    assert [r.ok for r in d.results if r.transfer_id == "bad"] == [False]
    house.settled()
    for one in house.ranks:
        one.core.close()


def test_the_examples_that_are_bent_are_all_there_are():
    assert {type(one) for one in EXAMPLES} == set(wire.AnyMessage.__args__)
