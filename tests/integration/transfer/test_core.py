"""Transfer cores over the in-memory fabric and channel: real bytes, injected clock, one thread."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import zmq
from transfer_house import BLOCK, BLOCKS, DP, PP, Flag, expect, land, pair, randomise, ready, same

from kvferry.errors import PeerUnreachable
from kvferry.protocol import codec
from kvferry.protocol import messages as wire
from kvferry.transfer import commands as cmd
from kvferry.transfer.inquiry import why
from kvferry.transfer.peers import Stage


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


def test_what_has_failed_is_told_before_its_blocks_are_back(house):
    """A silent P keeps D's blocks; whoever asks why is told at once that the transfer failed."""
    p, d = pair(house)
    expect(p)
    land(d)
    house.run()
    house.freeze(p)
    assert ask(house, d, wire.Abandon(transfer_id="t", reason="the client left")).known
    verdict = ask(house, d, wire.Why(transfer_id="t"))
    assert (verdict.state, verdict.code, verdict.reason) == ("failed", "abandoned", "the client left")
    assert not [one for one in d.results if isinstance(one, cmd.Received)]
    house.freeze(p, False)
    ready(p)
    house.run()
    house.settled()


def test_a_decode_rank_abandons_too(house):
    p, d = pair(house)
    expect(p)
    land(d)
    house.run()
    assert ask(house, d, wire.Abandon(transfer_id="t", reason="another router's word")).known
    house.run()
    verdict = ask(house, d, wire.Why(transfer_id="t"))
    assert (verdict.state, verdict.code, verdict.reason) == ("failed", "abandoned", "another router's word")
    assert not ask(house, d, wire.Abandon(transfer_id="t", reason="again")).known
    ready(p)
    house.run()
    assert [r.code for r in d.results if isinstance(r, cmd.Received)] == ["abandoned"] and len(p.results) == 1
    house.settled()


@pytest.mark.parametrize(
    "message",
    [
        wire.Fetched(reg_id=1, ok=True),
        wire.Begin(reg_id=1, sealed=True),
        wire.Warm(),
        wire.Beat(),
        wire.Register(
            reg_id=1, transfer_id="x", mode="push", start_token=0, end_token=4, block_ids=(1,), legs=1, credit=1
        ),
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
    for message in (wire.Begin(reg_id=reg_id, sealed=True), wire.Grant(reg_id=reg_id, block_ids=(1, 2, 3))):
        p.core._channel.send(next(iter(p.core._peers.by_key)), codec.encode(message))
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


async def ask_why(answers):
    """What `inquiry.why` makes of these answers."""
    with zmq.Context() as context:
        router = context.socket(zmq.ROUTER)
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        asking = asyncio.create_task(why("127.0.0.1", port, "t"))
        while not router.poll(0):
            await asyncio.sleep(0.001)
        identity, _ = router.recv_multipart()
        for answer in answers:
            router.send_multipart([identity, answer])
        try:
            return await asking
        finally:
            router.close()


def test_inquiry_ignores_probes():
    answer = codec.encode(wire.Verdict(transfer_id="t", state="ok", code="", reason=""))
    assert asyncio.run(ask_why([b"", answer])).state == "ok"


def test_inquiry_of_another_version_says_so():
    older = bytearray(codec.encode(wire.Refuse(code="wire_error", reason="what?")))
    older[2] = 1
    with pytest.raises(PeerUnreachable, match=r"wire version 1, expected .*: run the same version on both sides"):
        asyncio.run(ask_why([bytes(older)]))
