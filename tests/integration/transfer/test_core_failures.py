"""Transfer cores when something goes wrong: scripted faults, peers lost in each phase, limits that pass."""

from __future__ import annotations

import pytest
from transfer_house import DP, PP, expect, land, pair, randomise, ready, same

from kvferry.errors import FabricError
from kvferry.protocol import codec
from kvferry.protocol import messages as wire
from kvferry.transfer import commands as cmd
from kvferry.transfer.channel import Down


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
    assert {r.request for r in d.failing} == {f"d-t{i}" for i in (0, 1, 3, 4)}, "bytes can't be called back"
    house.wait(3.0)
    assert len(d.results) == 1 and len(house.world.copies) == 2
    house.world.hold = False
    for copy in house.world.copies:
        copy.held = False
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
    if who == "P":  # the client hears of it, but the blocks stay: what was posted goes on when P does
        assert [r.code for r in d.failing] == ["transfer_timeout"] and "more than 3 s" in d.failing[0].reason
        house.wait(20.0)
        assert d.results == []
    elif mode != "pull":  # P is read from: it learns of a frozen D by its silence only
        assert [r.code for r in p.results] == ["transfer_timeout"] and "took more than 3 s" in p.results[0].reason
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


@pytest.mark.parametrize("warm", [True, False], ids=["registration", "last greeting"])
def test_what_cannot_be_sent_any_more_ends_with_its_peer(house, mode, warm):
    """The connection breaks, and D, which has not heard of it yet, has something to say on it."""
    p = house.rank("P", "producer", PP, mode=mode)
    d = house.rank("D", "consumer", DP, mode=mode, peers=[f"127.0.0.1:{PP}"])
    (channel,) = {d.core._channel}
    said = channel.send
    if warm:
        house.run()

    def broken(key, data):
        kind = type(codec.decode(data)) if data else None
        if kind is (wire.Register if warm else wire.Warm):
            channel.send = said
            for link in [one for one in house.network.links if one.dialler is channel]:
                house.network.links.remove(link)
                link.listener.events.append(Down(link.listener_key))
            return False
        return said(key, data)

    channel.send = broken
    expect(p, mode=mode)
    land(d, mode=mode)
    house.wait(3.0)
    assert channel.send == said, "nothing was said"
    randomise(p)
    ready(p)
    house.wait(2.0)
    if warm:
        assert [one.code for one in d.failing + d.results] == ["peer_gone"] * 2
        land(d, "again", mode)
        expect(p, "again", mode)
        ready(p, "again")
        house.wait(2.0)
        house.wait(35.0)  # the first one's source waits for its lease
    assert d.results[-1].ok and same(p, d, (1, 2, 3), (7, 5, 9))
    house.settled()
