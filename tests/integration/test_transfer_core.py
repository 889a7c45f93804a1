"""Transfer cores over the in-memory fabric and channel: real bytes, injected clock, one thread, scripted faults."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvferry.config import connector_config
from kvferry.errors import FabricError
from kvferry.protocol import codec
from kvferry.protocol import messages as wire
from kvferry.story import Story
from kvferry.transfer import commands as cmd
from kvferry.transfer.core import TransferCore
from kvferry.transfer.memory import MemoryNetwork, MemoryWorld
from kvferry.transfer.peers import SCRATCH_BYTES, Identity, Stage

PLANES, BLOCKS, BLOCK, TOKEN = 2, 16, 4, 8
DP, PP = 6600, 5600


@dataclass
class Rank:
    core: TransferCore
    memory: np.ndarray  # (planes, blocks, heads, block tokens, token bytes)
    scratch: np.ndarray
    results: list[cmd.Result] = field(default_factory=list)
    failing: list[cmd.Failing] = field(default_factory=list)
    frozen: bool = False

    def block(self, block: int, head: int = 0) -> np.ndarray:
        return self.memory[:, block, head]


class House:
    """Some ranks of P and D, a clock, and the means to break things."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.world, self.network = MemoryWorld(), MemoryNetwork()
        self.ranks: list[Rank] = []

    def rank(self, name, role, port, *, rank=0, tp=1, heads=2, total=2, fill=0, fingerprint="m", **config) -> Rank:
        memory = np.full((PLANES, BLOCKS, heads, BLOCK, TOKEN), fill, np.uint8)
        scratch = np.zeros(SCRATCH_BYTES, np.uint8)
        fabric = self.world.fabric(f"{name}{rank}")
        fabric.register([(memory.ctypes.data, memory.nbytes), (scratch.ctypes.data, SCRATCH_BYTES)], "cpu")
        plane_bytes = memory.nbytes // PLANES
        planes = tuple(
            wire.Plane(
                base=memory.ctypes.data + i * plane_bytes,
                block_stride=heads * BLOCK * TOKEN,
                head_stride=BLOCK * TOKEN,
                token_bytes=TOKEN,
            )
            for i in range(PLANES)
        )
        layout = wire.Layout(
            planes=planes,
            num_blocks=BLOCKS,
            block_size=BLOCK,
            heads=heads,
            total_heads=total,
            divisible=True,
            device="cpu",
            fingerprint={"model": fingerprint},
        )
        results: list[cmd.Result] = []
        failing: list[cmd.Failing] = []
        core = TransferCore(
            Identity(name, rank, tp, role),
            connector_config({"side_channel_port": port, **config}, {}),
            fabric,
            self.network.channel("127.0.0.1", port + rank),
            layout,
            scratch.ctypes.data,
            Story(None, role),
            lambda result: (failing if isinstance(result, cmd.Failing) else results).append(result),
            clock=lambda: self.now,
        )
        made = Rank(core, memory, scratch, results, failing)
        self.ranks.append(made)
        return made

    def run(self, rounds: int = 12) -> None:
        for _ in range(rounds):
            for one in self.ranks:
                if not one.frozen:
                    one.core.step(0.0)

    def wait(self, seconds: float, step: float = 0.25) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + step)
            self.run(3)

    def freeze(self, rank: Rank, frozen: bool = True) -> None:
        rank.frozen = rank.core._fabric.frozen = frozen

    def kill(self, rank: Rank) -> None:
        self.ranks.remove(rank)
        rank.core.close()

    def cut(self) -> None:
        for link in list(self.network.links):
            self.network.cut(link)

    def settled(self, *but: str) -> None:
        """Nothing is held anywhere."""
        for one in self.ranks:
            held = {what: n for what, n in one.core.open_counts().items() if n and what != "peers"}
            assert held == {}, one.core.identity
            assert one.core._requests == {} and one.core._waiting_moments == []
        assert self.world.copies == []


@pytest.fixture
def house():
    made = House()
    yield made
    for one in made.ranks:
        one.core.close()
    assert made.world.fabrics == {} and made.network.links == [] and made.network.listening == {}


@pytest.fixture(params=["push", "pull"])
def mode(request):
    return request.param


def pair(house, mode="push", **config):
    p = house.rank("P", "producer", PP, mode=mode, **config)
    d = house.rank("D", "consumer", DP, mode=mode, peers=[f"127.0.0.1:{PP}"], **config)
    house.run()
    return p, d


def expect(p, tid="t", mode="push", fan_out=1, request=None):
    p.core.submit(cmd.Expect(tid, request or f"p-{tid}", mode, fan_out))


def ready(p, tid="t", blocks=(1, 2, 3), tokens=10, request=None):
    p.core.submit(cmd.Ready(tid, request or f"p-{tid}", blocks, tokens))


def land(d, tid="t", mode="push", blocks=(7, 5, 9), start=0, end=10, engine="P", tp=1, port=PP):
    d.core.submit(cmd.Land(tid, f"d-{tid}", mode, "127.0.0.1", port, engine, tp, start, end, blocks))


def randomise(rank, seed=1):
    rank.memory[:] = np.random.default_rng(seed).integers(1, 255, rank.memory.shape, np.uint8)


def same(p, d, sources, targets, heads=(0, 1)):
    return all((p.block(s, h) == d.block(t, h)).all() for s, t in zip(sources, targets, strict=True) for h in heads)


def test_happy_path_is_byte_exact_and_touches_nothing_else(house, mode):
    p, d = pair(house, mode)
    randomise(p)
    land(d, mode=mode)
    house.run()
    expect(p, mode=mode)
    house.run()
    ready(p)
    house.run()
    assert p.results == [cmd.Sent("p-t", "t", True, "", "")]
    assert d.results == [cmd.Received("d-t", "t", True, "", "")]
    assert same(p, d, (1, 2, 3), (7, 5, 9))
    others = [b for b in range(BLOCKS) if b not in (7, 5, 9)]
    assert not d.memory[:, others].any()
    house.settled()


def test_prefix_of_d_is_left_alone(house, mode):
    p, d = pair(house, mode)
    randomise(p)
    expect(p, mode=mode)
    ready(p)
    land(d, mode=mode, start=4, blocks=(5, 9))
    house.run()
    assert same(p, d, (2, 3), (5, 9)) and not d.block(7).any() and d.results[0].ok
    house.settled()


def test_nothing_needed_frees_the_source(house, mode):
    p, d = pair(house, mode)
    expect(p, mode=mode)
    ready(p)
    land(d, mode=mode, start=8, end=8, blocks=())
    house.run()
    assert p.results[0].ok and d.results[0].ok and not d.memory.any()
    house.settled()


def test_many_at_once(house, mode):
    p, d = pair(house, mode)
    randomise(p)
    for i in range(5):
        (expect, land, ready)[0](p, f"t{i}", mode)
        land(d, f"t{i}", mode, blocks=(15 - i,), end=4)
        ready(p, f"t{i}", blocks=(i,), tokens=4)
    house.run()
    assert [r.ok for r in p.results + d.results] == [True] * 10
    assert same(p, d, range(5), range(15, 10, -1))
    house.settled()


def test_c42_a_write_that_cannot_be_posted_is_told_at_once(house):
    p, d = pair(house)
    count = 0

    def third_fails(op, owner, target):
        nonlocal count
        count += op == "WRITE"
        if count == 3:
            raise FabricError("third write refused")

    house.world.on_post = third_fails
    house.world.hold = True
    for i in range(5):
        expect(p, f"t{i}")
        land(d, f"t{i}", blocks=(7 + i,), end=4)
        ready(p, f"t{i}", blocks=(1 + i,), tokens=4)
    house.run()
    third = next(r for r in d.results if r.request == "d-t2")
    assert not third.ok and third.code == "write_failed" and "third write refused" in third.reason
    house.world.hold = False
    house.wait(3.0)
    assert len(d.results) == 5 and {r.request for r in p.results} >= {"p-t0", "p-t1", "p-t2"}
    house.wait(35.0)  # the sources whose registrations came after the cut wait for their lease
    house.settled()
    assert len(p.results) == 5 and {r.request for r in d.results} == {f"d-t{i}" for i in range(5)}
    expect(p, "again")
    ready(p, "again")
    land(d, "again")
    house.wait(2.0)
    assert p.results[-1].ok and d.results[-1].ok


def test_c41_failing_copy_ends_both_sides_once(house, mode):
    p, d = pair(house, mode)
    house.world.hold = True
    expect(p, mode=mode)
    ready(p)
    land(d, mode=mode)
    house.run()
    (copy,) = house.world.copies
    house.world.hold = False
    copy.move(1)
    copy.error = "link flapped"
    house.wait(2.0)
    assert len(p.results) == len(d.results) == 1
    assert not p.results[0].ok and not d.results[0].ok
    assert "link flapped" in (d.results[0].reason + p.results[0].reason)
    house.settled()


@pytest.mark.parametrize("who", ["P", "D"])
def test_c43_frozen_peer_in_the_middle_of_a_copy(house, mode, who):
    p, d = pair(house, mode, transfer_timeout_s=3.0, lease_s=30.0)
    frozen, other = (p, d) if who == "P" else (d, p)
    house.world.hold = True
    expect(p, mode=mode)
    ready(p)
    land(d, mode=mode)
    house.run()
    (copy,) = house.world.copies
    house.world.hold = False
    copy.move(1)
    house.freeze(frozen)
    house.wait(2.9)
    assert other.results == []
    house.wait(1.1)
    if (who, mode) == ("P", "push"):  # the client hears of it, but the blocks stay: a stopped P may go on writing
        assert [r.code for r in d.failing] == ["transfer_timeout"] and "more than 3 s" in d.failing[0].reason
        house.wait(20.0)
        assert d.results == []
    elif (who, mode) != ("D", "pull"):  # P is read from: it learns of a frozen D by its silence only
        assert len(other.results) == 1 and not other.results[0].ok
        if who == "D":
            assert "transfer" in other.results[0].code or "took more than 3 s" in other.results[0].reason
    copy.held = False
    house.freeze(frozen, False)
    house.wait(40.0)
    assert len(p.results) == len(d.results) == 1
    assert d.results[0].ok == ((who, mode) == ("D", "pull")), "only D's own late READs are of use"
    house.settled()


def test_c43_blocks_of_a_stopped_writer_go_back_only_when_it_has_spoken(house):
    """Its WRITE lands after it wakes up; by then the request has failed, and D must still hold the blocks."""
    p, d = pair(house, lease_s=3.0)
    randomise(p)
    house.world.hold = True
    expect(p)
    ready(p)
    land(d)
    house.run()
    (copy,) = house.world.copies
    house.freeze(p)
    house.wait(30.0)
    assert [(r.request, r.code) for r in d.failing] == [("d-t", "peer_gone")] and d.results == []
    land(d, "u")
    house.run()
    assert [(r.request, r.code) for r in d.results] == [("d-u", "peer_gone")], "a new request fails at once"
    copy.held = False
    house.freeze(p, False)
    house.world.hold = False
    house.wait(2.0)
    assert [(r.request, r.ok) for r in d.results[1:]] == [("d-t", False)] and house.world.copies == []
    house.settled()
    land(d, "v")
    expect(p, "v")
    ready(p, "v")
    house.run()
    assert d.results[-1] == cmd.Received("d-v", "v", True, "", ""), "and the pair works on"


@pytest.mark.parametrize("phase", ["before landing", "landing waits", "copying", "source waits"])
@pytest.mark.parametrize("how", ["P dies", "D dies", "cut"])
def test_peer_lost_in_each_phase(house, mode, phase, how):
    p, d = pair(house, mode, lease_s=4.0)
    if phase in ("landing waits", "copying"):
        land(d, mode=mode)
    if phase in ("copying", "source waits"):
        house.world.hold = True
        expect(p, mode=mode)
        ready(p)
    house.run()
    started = house.now
    if how == "P dies":
        house.kill(p)
    elif how == "D dies":
        house.kill(d)
    else:
        house.cut()
    house.world.hold = False
    for copy in house.world.copies:
        copy.held = False
    house.wait(2.0)
    if how != "D dies" and phase in ("landing waits", "copying"):
        assert len(d.results) == 1 and not d.results[0].ok and house.now - started <= 2.0
        assert d.results[0].code == "peer_gone"
    if how != "P dies" and phase == "copying":
        assert len(p.results) == 1 and not p.results[0].ok
    house.wait(10.0)
    assert len(p.results) == (how != "P dies" and phase in ("copying", "source waits"))
    house.wait(25.0)
    house.settled()


def test_one_p_under_two_names(house, mode):
    """`peers` and the router may spell P's address differently: two connections, each good, none evicts the other."""
    p, d = pair(house, mode)
    house.network.listening["p.example", PP] = p.core._channel
    randomise(p)
    for turn, (tid, host) in enumerate([("a", "p.example"), ("b", "127.0.0.1"), ("c", "p.example")]):
        d.core.submit(cmd.Land(tid, f"d-{tid}", mode, host, PP, "P", 1, 0, 10, (7, 5, 9)))
        expect(p, tid, mode=mode)
        ready(p, tid)
        house.wait(1.0)
        assert [r.ok for r in d.results] == [True] * (turn + 1) and same(p, d, (1, 2, 3), (7, 5, 9))
    names = {peer.greeting.dialled for peer in p.core._peers.by_key.values()}
    assert names == {f"p.example:{PP}", f"127.0.0.1:{PP}"}
    del house.network.listening["p.example", PP]


def test_restarted_p_under_the_same_address_works_again(house, mode):
    p, d = pair(house, mode)
    first_life = p.core._peers.life
    house.kill(p)
    house.wait(5.0)
    p = house.rank("P", "producer", PP, mode=mode)
    randomise(p)
    house.wait(2.0)
    assert p.core._peers.life != first_life
    expect(p, mode=mode)
    ready(p)
    land(d, mode=mode)
    house.run()
    assert [r.ok for r in p.results + d.results] == [True, True] and same(p, d, (1, 2, 3), (7, 5, 9))
    house.settled()


def test_reconnect_after_a_cut_works_again(house, mode):
    p, d = pair(house, mode)
    for i in range(3):
        house.cut()
        house.wait(2.0)
        expect(p, f"t{i}", mode)
        ready(p, f"t{i}")
        land(d, f"t{i}", mode)
        house.run()
        assert p.results[-1].ok and d.results[-1].ok and len(d.results) == i + 1
        assert p.core.open_counts()["peers"] == d.core.open_counts()["peers"] == 1
    house.settled()


def test_p_that_forgot_d_is_greeted_anew(house):
    p, d = pair(house, lease_s=3.0)
    house.freeze(d)
    house.wait(5.0)
    assert p.core.open_counts()["peers"] == 0
    house.freeze(d, False)
    house.wait(3.0)
    expect(p)
    ready(p)
    land(d)
    house.run()
    assert d.results[-1].ok and p.results[-1].ok
    house.settled()


@pytest.mark.parametrize(
    ("told", "code", "text"),
    [({"engine": "Q"}, "wrong_engine", "'Q'"), ({"tp": 2}, "wrong_tp_size", "the request says 2")],
)
def test_request_that_expects_another_engine_fails_by_name(house, told, code, text):
    _, d = pair(house)
    land(d, **told)
    house.run()
    assert [(r.ok, r.code) for r in d.results] == [(False, code)] and text in d.results[0].reason
    house.settled()


def test_incompatible_engines_refuse_with_the_field(house):
    house.rank("P", "producer", PP)
    d = house.rank("D", "consumer", DP, fingerprint="other", peers=[f"127.0.0.1:{PP}"])
    house.run()
    for tid in ("a", "b"):
        land(d, tid)
        house.run()
    assert [r.code for r in d.results] == ["incompatible_engines"] * 2 and "model differs" in d.results[0].reason
    house.wait(60.0)
    assert len(d.results) == 2
    house.settled()


def test_consumer_refuses_to_be_read_from(house):
    house.rank("P", "consumer", PP)
    d = house.rank("D", "consumer", DP)
    land(d)
    house.run()
    assert [r.code for r in d.results] == ["incompatible_engines"] and "kv_consumer" in d.results[0].reason


def test_unreachable_peer_is_told_within_the_limit_and_forgotten(house):
    d = house.rank("D", "consumer", DP, connect_timeout_s=4.0)
    land(d, port=9999)
    house.wait(3.75)
    assert d.results == []
    house.wait(0.5)
    assert [r.code for r in d.results] == ["peer_unreachable"] and "127.0.0.1:9999" in d.results[0].reason
    house.wait(10.0)
    assert d.core.open_counts()["peers"] == 0 and d.core._channel.dialled == {}
    house.settled()


def test_listener_that_does_not_answer(house):
    house.network.channel("127.0.0.1", PP)
    d = house.rank("D", "consumer", DP)
    land(d)
    house.wait(4.5)
    assert [r.code for r in d.results] == ["peer_unreachable"] and "does not answer" in d.results[0].reason
    house.network.listening[("127.0.0.1", PP)].close()


def test_silent_p_is_taken_for_dead_after_the_lease(house):
    p, d = pair(house, lease_s=3.0)
    land(d)
    house.run()
    house.freeze(p)
    house.wait(2.9)
    assert d.results == []
    house.wait(2.1)
    assert [r.code for r in d.failing] == ["peer_gone"] and "silent for 3 s" in d.failing[0].reason
    assert d.results == []
    house.freeze(p, False)
    house.wait(40.0)
    assert [r.code for r in d.results] == ["peer_gone"]
    house.settled()


def test_c53_beats_keep_both_alive_while_a_request_queues(house):
    p, d = pair(house, lease_s=2.0)
    land(d)
    house.wait(20.0)
    expect(p)
    ready(p)
    house.run()
    assert p.results[0].ok and d.results[0].ok


def test_c53_p_waits_for_a_request_that_queues_at_d(house, mode):
    """Far longer than the lease, as long as D lives; a D that dies ends the patience."""
    p, d = pair(house, mode, lease_s=2.0)
    d.core.submit(cmd.Wait("t", "127.0.0.1", PP))
    expect(p, mode=mode)
    ready(p)
    d.core.submit(cmd.Wait("t", "127.0.0.1", PP))
    house.wait(20.0)
    assert p.results == []
    land(d, mode=mode)
    house.run()
    assert p.results[0].ok and d.results[0].ok
    expect(p, "u", mode=mode)
    ready(p, "u")
    house.run()
    d.core.submit(cmd.Wait("u", "127.0.0.1", PP))
    house.wait(5.0)
    house.kill(d)
    house.wait(2.6)
    assert [(r.ok, r.code) for r in p.results[1:]] == [(False, "lease_lapsed")]
    house.settled()


def test_c39_nobody_comes(house, mode):
    p, _ = pair(house, mode, lease_s=2.0)
    expect(p, mode=mode)
    ready(p)
    house.wait(1.9)
    assert p.results == []
    house.wait(0.6)
    assert [r.code for r in p.results] == ["lease_lapsed"]
    house.settled()


def test_c40_latecomer_fails_at_once(house, mode):
    p, d = pair(house, mode, lease_s=2.0)
    expect(p, mode=mode)
    ready(p)
    house.wait(3.0)
    land(d, mode=mode)
    house.run()
    assert not d.results[0].ok and "unknown or expired transfer" in d.results[0].reason and not d.memory.any()
    house.settled()


def test_dropped_request_is_acknowledged_before_its_blocks_return(house):
    p, d = pair(house)
    house.world.hold = True
    expect(p)
    ready(p)
    land(d)
    house.run()
    d.core.submit(cmd.Drop("d-t"))
    house.wait(1.0)
    assert d.results == [] and d.core.busy(), "its WRITE is under way, and needs D to be driven"
    house.world.copies[0].held = False
    house.run()
    assert [r.code for r in d.results + p.results] == ["cancelled", "cancelled"]
    house.settled()


def test_drop_before_anything(house):
    d = house.rank("D", "consumer", DP)
    land(d)
    d.core.submit(cmd.Drop("d-t"))
    d.core.submit(cmd.Drop("unknown"))
    house.run()
    assert [r.code for r in d.results] == ["cancelled"]
    house.settled()


def test_abort_at_prefill_ends_the_landing(house, mode):
    p, d = pair(house, mode)
    expect(p, mode=mode)
    land(d, mode=mode)
    house.run()
    p.core.submit(cmd.Abort("t", "p-t", "client left"))
    house.run()
    assert p.results == [] and [(r.code, r.reason) for r in d.results] == [("aborted", "client left")]
    house.settled()


def test_transfer_id_used_twice_frees_both_requests(house):
    p, d = pair(house)
    randomise(p)
    expect(p, request="one")
    expect(p, request="two")
    ready(p, blocks=(11, 12, 13), request="two")
    p.core.submit(cmd.Abort("t", "two", "must not hurt one"))
    house.run()
    assert [(r.request, r.code) for r in p.results] == [("two", "duplicate_transfer")]
    ready(p, request="one")
    land(d)
    house.run()
    assert [(r.request, r.ok) for r in p.results] == [("two", False), ("one", True)]
    assert d.results[0].ok and same(p, d, (1, 2, 3), (7, 5, 9))
    house.settled()


class Flag:
    def __init__(self):
        self.passed = False

    def query(self):
        return self.passed


def test_nothing_is_sent_before_the_devices_moment(house):
    p, d = pair(house)
    expect(p)
    land(d)
    flag = Flag()
    p.core.submit(cmd.Ready("t", "p-t", (1, 2, 3), 10, flag))
    house.run()
    assert d.results == p.results == [] and p.core.busy()
    randomise(p)
    flag.passed = True
    house.run()
    assert d.results[0].ok and same(p, d, (1, 2, 3), (7, 5, 9))
    house.settled()


def ask(house, rank, question):
    """As `inquiry` does, over the memory channel."""
    asker = house.network.channel("127.0.0.1", 7700)
    key = asker.dial(rank.core._channel.host, rank.core._channel.port)
    asker.poll(0)
    assert asker.send(key, codec.encode(question))
    house.run(2)
    (answer,) = [codec.decode(event.data) for event in asker.poll(0) if hasattr(event, "data")]
    asker.close()
    house.run(1)
    return answer


def test_describe_why_and_abandon(house):
    p, d = pair(house)
    described = ask(house, p, wire.Describe())
    assert (described.engine_id, described.role, described.block_size) == ("P", "producer", BLOCK)
    assert ask(house, p, wire.Why(transfer_id="t")).state == "unknown"
    expect(p)
    land(d)
    house.run()
    assert ask(house, p, wire.Why(transfer_id="t")).state == "open"
    assert ask(house, d, wire.Why(transfer_id="t")).state == "open"
    assert ask(house, p, wire.Abandon(transfer_id="t", reason="no taker")).known
    verdict = ask(house, d, wire.Why(transfer_id="t"))
    assert (verdict.state, verdict.code, verdict.reason) == ("failed", "abandoned", "no taker")
    assert not ask(house, p, wire.Abandon(transfer_id="never", reason="x")).known
    ready(p)
    house.run()
    assert [r.code for r in p.results] == ["abandoned"] and len(d.results) == 1
    house.settled()


@pytest.mark.parametrize(
    "message",
    [
        wire.Fetched(reg_id=1, ok=True),
        wire.Begin(reg_id=1),
        wire.Warm(),
        wire.Beat(),
        wire.Register(reg_id=1, transfer_id="x", mode="push", start_token=0, end_token=4, block_ids=(1,), legs=1),
        b"garbage",
        b"",
        b"KF\x07abc",
    ],
    ids=repr,
)
def test_what_a_stranger_says_does_no_harm(house, message):
    p, d = pair(house)
    stranger = house.network.channel("127.0.0.1", 7700)
    key = stranger.dial("127.0.0.1", PP)
    stranger.poll(0)
    stranger.send(key, message if isinstance(message, bytes) else codec.encode(message))
    house.run()
    expect(p)
    ready(p)
    land(d)
    house.run()
    assert d.results[0].ok and p.results[0].ok
    stranger.close()
    house.run()
    house.settled()


def test_message_out_of_order_ends_the_peer_not_the_engine(house):
    p, d = pair(house)
    land(d)
    house.run()
    (key,) = d.core._peers.by_key
    (reg_id,) = d.core._landings._by_reg
    p.core._channel.send(next(iter(p.core._peers.by_key)), codec.encode(wire.Begin(reg_id=reg_id)))
    p.core._channel.send(next(iter(p.core._peers.by_key)), codec.encode(wire.Begin(reg_id=reg_id)))
    house.run(1)
    house.wait(2.0)
    assert [r.ok for r in d.results] == [False] and d.core._peers.by_key[key].stage is Stage.UP
    house.wait(35.0)
    house.settled()


@pytest.mark.parametrize(("p_tp", "d_tp"), [(2, 1), (1, 2), (2, 2)])
def test_unequal_tensor_parallel_sizes(house, mode, p_tp, d_tp):
    ps = [house.rank("P", "producer", PP, rank=r, tp=p_tp, heads=4 // p_tp, total=4, mode=mode) for r in range(p_tp)]
    ds = [house.rank("D", "consumer", DP, rank=r, tp=d_tp, heads=4 // d_tp, total=4, mode=mode) for r in range(d_tp)]
    for r, p in enumerate(ps):
        randomise(p, r + 5)
        expect(p, mode=mode)
        ready(p)
    for d in ds:
        land(d, mode=mode, tp=p_tp)
    house.run(30)
    assert [[r.ok for r in one.results] for one in house.ranks] == [[True]] * len(house.ranks)
    whole_p = np.concatenate([p.memory[:, (1, 2, 3)] for p in ps], axis=2)
    whole_d = np.concatenate([d.memory[:, (7, 5, 9)] for d in ds], axis=2)
    assert (whole_p == whole_d).all()
    house.settled()


def test_one_of_two_p_ranks_dies(house):
    ps = [house.rank("P", "producer", PP, rank=r, tp=2, heads=2, total=4) for r in range(2)]
    d = house.rank("D", "consumer", DP, heads=4, total=4)
    land(d, tp=2)
    house.run()
    house.kill(ps[1])
    house.wait(2.0)
    assert len(d.results) == 1 and d.results[0].code == "peer_gone"
    expect(ps[0])
    ready(ps[0])
    house.run()
    assert [r.ok for r in ps[0].results] == [False]
    house.settled()


def test_idle_cores_have_nothing_to_wake_for_but_beats(house):
    p, d = pair(house, lease_s=30.0)
    land(d)
    house.run()
    assert not p.core.busy() and not d.core.busy()
    for one in (p, d):
        assert 5.0 < one.core._timeout(None) <= 10.0


def test_c56_clocks_that_differ_by_hours(house):
    p, d = pair(house)
    p.core._clock = lambda: house.now + 3600.0
    for peer in p.core._peers.by_key.values():
        peer.heard_at = peer.said_at = house.now + 3600.0
    expect(p)
    house.run()
    land(d)
    ready(p)
    house.run()
    assert p.results[0].ok and d.results[0].ok
    house.settled()


def test_inquiry_ignores_probes():
    import zmq

    from kvferry.transfer.inquiry import why

    async def talk():
        with zmq.Context() as context:
            router = context.socket(zmq.ROUTER)
            router.linger = 0
            port = router.bind_to_random_port("tcp://127.0.0.1")
            asking = asyncio.create_task(why("127.0.0.1", port, "t"))
            while not router.poll(0):
                await asyncio.sleep(0.001)
            identity, _ = router.recv_multipart()
            answer = codec.encode(wire.Verdict(transfer_id="t", state="ok", code="", reason=""))
            router.send_multipart([identity, b""])
            router.send_multipart([identity, answer])
            verdict = await asking
            router.close()
            return verdict

    assert asyncio.run(talk()).state == "ok"
