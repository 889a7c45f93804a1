"""Waiting for room on a decode engine: in order, only while none has any, and never for long."""

from __future__ import annotations

import asyncio
import time

from kvferry.router.choice.ask import Ask
from kvferry.router.choice.load import Share
from kvferry.router.choice.policy import Snapshot, choose
from kvferry.router.choice.rank import Rank
from kvferry.router.choice.room import Room
from kvferry.router.requests.prompt import Prompt


async def test_who_came_first_goes_first_each_when_there_is_room() -> None:
    room, places, went = Room(), 1, list[int]()

    async def come(number: int) -> None:
        nonlocal places
        assert await room.wait(lambda: places > 0, 5.0)
        places -= 1
        went.append(number)

    tasks = [asyncio.create_task(come(number)) for number in range(4)]
    await asyncio.sleep(0.01)
    assert went == [0] and len(room) == 3
    places = 2
    room.freed()
    await asyncio.sleep(0.01)
    assert went == [0, 1, 2] and len(room) == 1
    tasks[3].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(room) == 0


async def test_a_late_comer_does_not_overtake() -> None:
    room, there = Room(), False
    first = asyncio.create_task(room.wait(lambda: there, 5.0))
    await asyncio.sleep(0)
    there = True  # nobody has been told yet
    second = asyncio.create_task(room.wait(lambda: there, 5.0))
    await asyncio.sleep(0.01)
    assert not first.done() and not second.done()
    room.freed()
    assert await first and await second


async def test_nobody_waits_longer_than_the_limit_and_the_next_is_told() -> None:
    room, there = Room(), False
    begun = time.monotonic()
    first = asyncio.create_task(room.wait(lambda: there, 0.05))
    second = asyncio.create_task(room.wait(lambda: there, 5.0))
    assert not await first
    assert time.monotonic() - begun < 2.0
    there = True
    room.freed()
    assert await second


def test_a_rank_is_full_by_the_blocks_that_its_requests_need() -> None:
    rank, text = Rank(100_000, events=False), "x" * 4000
    ask = Ask(tokens=1000, prompt=Prompt({"prompt": text}))
    assert not rank.full(ask), "of what holds no one knows how much"
    rank.kv_tokens = 2500
    assert not rank.full(Ask(tokens=9000)), "a rank that does nothing takes anything: it refuses what it can't hold"
    first = Share(rank.load, held=1000)
    assert not rank.full(ask)
    second = Share(rank.load, held=1000)
    assert rank.full(ask)
    assert ask.prompt is not None
    rank.sent.sent(ask.prompt)
    assert not rank.full(ask), "its blocks are there"
    rank.sent.clear()
    first.grow(100)
    second.release()
    assert (rank.load.taken, rank.full(ask)) == (1100, False)
    first.release()
    first.grow(5)
    assert rank.load.taken == 0


def test_a_full_engine_is_left_for_one_with_room() -> None:
    engines = [Snapshot(url="a", ready=True, tokens=10, full=True), Snapshot(url="b", ready=True, tokens=90)]
    for policy in ("least_loaded", "power_of_two", "prefix_aware"):
        for turn in range(6):
            found = choose(policy, engines, Ask(tokens=5), turn)  # type: ignore[arg-type]
            assert found is not None and found.url == "b"
    found = choose("least_loaded", [engines[0]], Ask(tokens=5), 0)
    assert found is not None and found.url == "a", "better a queue than no engine"
