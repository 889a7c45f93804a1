"""Turns: small work is never behind more than so many big ones; the queue is bounded; nobody's turn is lost."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.render.fair import FairQueue, QueueFull


class Work:
    """Tasks that hold their turn until they are let go."""

    def __init__(self, queue: FairQueue) -> None:
        self.queue = queue
        self.running: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, name: str, nbytes: int) -> None:
        self.ends[name] = asyncio.Event()

        async def one() -> None:
            async with self.queue.turn(nbytes):
                self.running.append(name)
                try:
                    await self.ends[name].wait()
                finally:
                    self.running.remove(name)

        self.tasks[name] = asyncio.create_task(one())
        await asyncio.sleep(0)

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await self.tasks[name]
        await asyncio.sleep(0)


def queue(**given: int) -> FairQueue:
    return FairQueue(**({"big_bytes": 100, "small_at_once": 2, "big_at_once": 1, "most_waiting": 3} | given))


async def test_small_ones_pass_big_ones_that_wait() -> None:
    work = Work(queue())
    for name in ("big1", "big2", "big3"):
        await work.start(name, 100)
    await work.start("small", 99)
    assert work.running == ["big1", "small"]
    await work.end("big1")
    assert work.running == ["small", "big2"]
    for name in ("small", "big2", "big3"):
        await work.end(name)
    assert work.queue.waiting == 0


async def test_each_lane_is_first_come_first_served() -> None:
    work = Work(queue(small_at_once=1))
    for name in ("a", "b", "c"):
        await work.start(name, 1)
    seen = []
    for name in ("a", "b", "c"):
        seen += work.running
        await work.end(name)
    assert seen == ["a", "b", "c"]


async def test_a_full_queue_refuses_at_once_only_who_would_wait() -> None:
    work = Work(queue(most_waiting=1))
    await work.start("big1", 100)
    await work.start("big2", 100)
    with pytest.raises(QueueFull):
        async with work.queue.turn(100):
            pass
    await work.start("small", 1)
    assert work.running == ["big1", "small"]
    for name in ("small", "big1", "big2"):
        await work.end(name)


@pytest.mark.parametrize("granted", [False, True])
async def test_a_turn_that_nobody_wants_any_more_is_passed_on(granted: bool) -> None:
    work = Work(queue(small_at_once=1))
    for name in ("a", "b", "c"):
        await work.start(name, 1)
    if granted:
        work.ends["a"].set()
        await asyncio.sleep(0)  # a ends and hands its turn to b, which has not run yet
    work.tasks["b"].cancel()
    await asyncio.gather(work.tasks["b"], return_exceptions=True)
    work.ends["a"].set()
    await work.tasks["a"]
    await asyncio.sleep(0)
    assert work.running == ["c"]
    await work.end("c")
    await work.start("d", 1)
    assert work.running == ["d"]
    await work.end("d")
