"""Tasks that begin at once, and what they go on from."""

from __future__ import annotations

import asyncio
import contextvars

import pytest

from kvferry.router.http.at_once import Now, begin

TURN = contextvars.ContextVar("turn", default="outside")


async def test_a_task_has_begun_when_it_is_made() -> None:
    seen: list[str] = []

    async def work() -> str:
        seen.append("begun")
        assert asyncio.current_task() is not None
        await asyncio.sleep(0)
        seen.append("gone on")
        return "made"

    outer = asyncio.current_task()
    task = begin(work())
    assert (seen, asyncio.current_task()) == (["begun"], outer)
    assert await task == "made" and seen == ["begun", "gone on"]


async def test_one_that_never_waits_ends_with_what_it_made() -> None:
    async def work(fails: bool) -> int:
        if fails:
            raise ValueError("wrong")
        return 7

    assert await begin(work(False)) == 7
    with pytest.raises(ValueError, match="wrong"):
        await begin(work(True))


async def test_it_is_cancelled_where_it_waits_though_the_loop_has_not_run_it_yet() -> None:
    cleaned = False

    async def work() -> None:
        nonlocal cleaned
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned = True

    task = begin(work())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned


async def test_a_timeout_of_its_first_step_is_its_own() -> None:
    async def work() -> str:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            return "late"
        return "never"

    task = begin(work())
    assert await task == "late"


async def test_several_begin_within_each_other() -> None:
    async def inner() -> int:
        await asyncio.sleep(0)
        return 1

    async def outer() -> int:
        task = begin(inner())
        mine = asyncio.current_task()
        assert mine is not None and mine is not task
        return 1 + await task

    assert await begin(outer()) == 2


def now_told(news: Now) -> None:
    """From a callback of the loop's, as a socket's is."""
    asyncio.get_running_loop().call_soon(news.tell)


async def test_a_task_goes_on_within_tell() -> None:
    seen: list[str] = []
    news = Now()

    async def work() -> None:
        TURN.set("inside")
        await news
        seen.append(f"told {TURN.get()}")

    task = asyncio.create_task(work())
    await asyncio.sleep(0)

    def tell() -> None:
        news.tell()
        seen.append("after tell")

    asyncio.get_running_loop().call_soon(tell)
    await task
    news.tell()
    assert seen == ["told inside", "after tell"] and TURN.get() == "outside"


async def test_told_before_anyone_waits() -> None:
    news = Now()
    news.tell()
    await asyncio.wait_for(news, 1)


async def test_told_by_another_task_it_waits_for_its_turn() -> None:
    seen: list[str] = []
    news = Now()

    async def work() -> None:
        await news
        seen.append("told")

    task = begin(work())
    await asyncio.sleep(0)
    news.tell()
    assert seen == []
    await task
    assert seen == ["told"]


async def test_a_waiter_that_is_cancelled_is_not_told() -> None:
    news = Now()

    async def work() -> None:
        await news

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    now_told(news)
    await asyncio.sleep(0)
    assert news.cancelled()


async def test_begun_and_told_in_the_same_pass() -> None:
    """The loop hasn't seen yet what the task waits for."""
    news = Now()

    async def work() -> str:
        await news
        return "told"

    task = begin(work())
    now_told(news)
    assert await asyncio.wait_for(task, 1) == "told"
