"""Mode pull: who moves the bytes, and how P finds out whether it may leave that to D."""

from __future__ import annotations

import logging

import pytest
from transfer_house import House, expect, land, pair, randomise, ready, same

from kvferry.protocol import codec
from kvferry.protocol import messages as wire

SOURCES, TARGETS = (1, 2, 3), (7, 5)


def pulled(house: House, p, d, tid: str = "t", settles: bool = True) -> dict[str, int]:
    """A pull of two blocks: done, right, and by whom."""
    randomise(p, seed=len(tid))
    p.core.stats.take()
    expect(p, tid, "pull")
    ready(p, tid, SOURCES)
    land(d, tid, "pull", (*TARGETS, 9), end=8)
    house.run()
    assert p.results[-1].ok and d.results[-1].ok and d.results[-1].transfer_id == tid
    assert same(p, d, SOURCES[:2], TARGETS)
    if settles:
        house.settled()
    return p.core.stats.take().pulls


def shown(house: House) -> list[str]:
    """Messages of the kinds that looks are made of, as they are sent from now on."""
    said: list[str] = []

    def hear(data: bytes) -> list[bytes]:
        message = codec.decode(data) if data else None
        if isinstance(message, wire.Look | wire.Looked | wire.Grant | wire.Begin):
            said.append(type(message).__name__)
        return [data]

    house.network.filter = hear
    return said


def test_where_reads_need_no_help_decode_reads(caplog) -> None:
    house = House()
    caplog.set_level(logging.INFO, "kvferry.transfer")
    p = house.rank("P", "producer", 5600, mode="pull", pull_by="auto")
    p.core._fabric.needs_driving = False  # as over RDMA
    d = house.rank("D", "consumer", 6600, mode="pull", pull_by="auto", peers=["127.0.0.1:5600"])
    house.run()
    said = shown(house)
    assert pulled(house, p, d, "first") == {"write": 1} and said == ["Begin", "Look", "Looked"]
    assert pulled(house, p, d) == {"read": 1} and said[3:] == ["Grant"]
    told = [line for line in caplog.messages if "pull by" in line]
    assert told == ["P rank 0: pull by D rank 0: decode reads, its READ needed no help of ours"]


def test_where_reads_are_emulated_prefill_writes(caplog) -> None:
    """The look hangs until P is told that it does, drives its agent, and is told that it is over."""
    house = House()
    caplog.set_level(logging.INFO, "kvferry.transfer")
    p, d = pair(house, "pull", pull_by="auto")
    said = shown(house)
    house.wait(30.0)
    assert said == [], "nobody has pulled"
    assert pulled(house, p, d, "first", settles=False) == {"write": 1} and said == ["Begin", "Look"]
    said.clear()
    for left in (2, 1, 0):
        assert len(house.world.copies) == 1 and d.core.busy() and not p.core.busy()
        house.now += 0.03
        house.run()
        assert said == ["Looked", "Looked", "Look"][: 3 if left else 2]
        said.clear()
    assert not p.core.busy() and not d.core.busy()
    assert pulled(house, p, d) == {"write": 1} and said == ["Begin"]
    told = [line for line in caplog.messages if "pull by" in line]
    assert told == ["P rank 0: pull by D rank 0: prefill writes, its READs wait for our help"]
    house.wait(30.0)
    assert said.count("Look") == 0, "once is enough"


def test_until_it_is_known_prefill_writes() -> None:
    house = House()
    p, d = pair(house, "pull", pull_by="auto")
    pulled(house, p, d, "first", settles=False)
    assert d.core.busy(), "it looks"
    assert pulled(house, p, d, settles=False) == {"write": 1}


@pytest.mark.parametrize(
    ("of_p", "of_d", "by"),
    [
        ({"pull_by": "write"}, {"pull_by": "auto"}, "write"),
        ({"pull_by": "auto"}, {"pull_by": "write"}, "write"),
        ({"pull_by": "write"}, {"pull_by": "read"}, "write"),
        ({"pull_by": "read"}, {"pull_by": "write"}, "write"),
        ({"pull_by": "read"}, {"pull_by": "auto"}, "read"),
        ({"pull_by": "auto"}, {"pull_by": "read"}, "read"),
        ({"pull_by": "auto"}, {"pull_by": "auto", "background": False}, "read"),
        ({"pull_by": "write"}, {"pull_by": "auto", "background": False}, "write"),
        ({"pull_by": "auto", "num_threads": 2}, {"pull_by": "auto"}, "write"),
    ],
)
def test_settings_go_before_what_is_seen(of_p: dict, of_d: dict, by: str) -> None:
    house = House()
    p = house.rank("P", "producer", 5600, mode="pull", **of_p)
    d = house.rank("D", "consumer", 6600, mode="pull", peers=["127.0.0.1:5600"], **of_d)
    said = shown(house)
    house.run()
    assert "Look" not in said
    assert pulled(house, p, d) == {by: 1}


def test_a_look_at_a_busy_agent_shows_nothing_and_is_asked_for_again() -> None:
    """Its READ goes through because P drives its agent for a push. Twenty such looks are enough: P writes."""
    house = House()
    p, d = pair(house, "pull", pull_by="auto")
    pulled(house, p, d, "first", settles=False)
    said = shown(house)
    p.core._fabric.progress()  # as a push would
    house.run()
    assert said == ["Looked"] and not p.core._pulls.reads(next(iter(p.core._peers.by_key.values())))
    p.core._fabric.needs_driving = False
    house.wait(1.5)
    assert said == ["Looked", "Look", "Looked"]
    assert pulled(house, p, d) == {"read": 1}

    house = House()
    p, d = pair(house, "pull", pull_by="auto")
    pulled(house, p, d, "first", settles=False)
    said = shown(house)
    for _ in range(30):
        p.core._fabric.progress()
        house.run()
        house.now += 1.0
        house.run(1)
        p.core._fabric.progress()
        house.run()
    assert 1 <= said.count("Look") <= 20 and not d.core.busy()
    assert pulled(house, p, d) == {"write": 1}


@pytest.mark.parametrize("who", ["P", "D"])
def test_who_dies_during_a_look_leaves_nothing(who: str) -> None:
    house = House()
    p, d = pair(house, "pull", pull_by="auto")
    pulled(house, p, d, settles=False)
    p.frozen = True
    house.now += 0.03
    house.run()  # P was told that it must help
    p.frozen = False
    house.kill(p if who == "P" else d)
    house.run()
    left = d if who == "P" else p
    assert not left.core.busy() and left.core._pulls._glances == {} and left.core._pulls._ways == {}
    for copy in house.world.copies:
        assert copy.error, "it goes on, between two that live no more"


def test_who_looks_for_ever_is_not_helped_for_ever() -> None:
    house = House()
    p, d = pair(house, "pull", pull_by="auto", transfer_timeout_s=5.0)
    pulled(house, p, d, settles=False)
    of_p = next(iter(d.core._peers.by_key))
    d.core._channel.send(of_p, codec.encode(wire.Looked(alone=False, over=False)))
    house.freeze(d)
    house.run()
    assert p.core.busy()
    house.now += 6.0
    assert not p.core.busy()


def test_looks_out_of_place_are_turned_away() -> None:
    house = House()
    p, d = pair(house, "pull")
    of_p, of_d = (next(iter(one.core._peers.by_key)) for one in (d, p))
    p.core.stats.take()
    d.core.stats.take()
    d.core._channel.send(of_p, codec.encode(wire.Look()))
    p.core._channel.send(of_d, codec.encode(wire.Looked(alone=True, over=True)))
    for over in (True, False):  # nobody asked
        d.core._channel.send(of_p, codec.encode(wire.Looked(alone=True, over=over)))
    house.run()
    assert p.core.stats.take().turned_away == d.core.stats.take().turned_away == {"wrong_side": 1}
    assert not p.core.busy() and not d.core.busy()
