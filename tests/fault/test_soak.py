"""A soak of half a minute: what `kvferry bench soak` does for twenty, and that it sees what it shall see."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from kvferry.bench.soak_client import Ask, How, ask
from kvferry.bench.soak_watch import Held, Life, grown
from kvferry.cli import main

WHAT = Ask([1, 2, 3], [7, 8, 9])


@pytest.mark.nixl
@pytest.mark.timeout(240)
def test_half_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2P2D, all modes at once, killed, stopped, stalled, slowed and cut off."""
    facts = tmp_path / "soak.json"
    monkeypatch.chdir(tmp_path)
    code = main(["bench", "soak", "--minutes", "0.5", "--seed", "3", "--json", str(facts), "--workers", "5"])
    told = json.loads(facts.read_text())
    assert told["violations"] == [] and code == 0
    assert told["endings"]["right"] > 50 and sum(told["troubles"].values()) >= 8
    assert set(told["endings_by_mode"]) == {"push", "stream", "pull"}
    assert told["slowest_s"] <= told["bound_s"] + 1.0
    assert list(tmp_path.iterdir()) == [facts], "its logs are not left where it was started"


# -- what it says of answers ------------------------------------------------------------------------------------------


def completion(*tokens: int) -> str:
    return json.dumps({"choices": [{"token_ids": list(tokens)}]})


def event(text: str) -> str:
    return f"data: {text}\n\n"


ERROR = json.dumps({"error": {"message": "no KV", "code": "transfer_failed"}})
UNTYPED = json.dumps({"error": {"message": "oh", "code": 500}})
DONE = event("[DONE]")


@pytest.fixture
def said() -> Iterator[dict[str, object]]:
    yield {"status": 200, "text": "", "wait_s": 0.0}


async def ending_of(
    said: dict[str, object], *, stream: bool = False, leave_s: float = 0.0, bound_s: float = 5.0
) -> str:
    async def answer(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(float(str(said["wait_s"])))
        return web.Response(status=int(str(said["status"])), text=str(said["text"]))

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        async with aiohttp.ClientSession() as session:
            how = How("push", f"http://{host}:{port}", "m", stream, leave_s, bound_s)
            return (await ask(session, WHAT, how)).kind
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        (200, completion(7, 8, 9), "right"),
        (200, completion(7, 8, 1), "wrong"),
        (200, completion(7, 8), "wrong"),
        (200, "", "wrong"),
        (502, ERROR, "error"),
        (500, UNTYPED, "untyped"),
        (502, "<html>", "untyped"),
    ],
)
async def test_whole_answers(said: dict[str, object], status: int, text: str, kind: str) -> None:
    said |= {"status": status, "text": text}
    assert await ending_of(said) == kind


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ((completion(7), completion(8, 9)), "right"),
        ((completion(7), completion(8)), "wrong"),
        ((completion(7), ERROR), "error"),
        ((completion(6), ERROR), "wrong"),
        ((ERROR, ERROR), "untyped"),
        ((UNTYPED,), "untyped"),
    ],
)
async def test_streamed_answers(said: dict[str, object], events: tuple[str, ...], kind: str) -> None:
    said["text"] = "".join(map(event, events)) + DONE
    assert await ending_of(said, stream=True) == kind


async def test_a_stream_that_ends_without_a_word_is_broken(said: dict[str, object]) -> None:
    said["text"] = event(completion(7))
    assert await ending_of(said, stream=True) == "broken"


async def test_who_waits_beyond_the_bound_and_who_leaves(said: dict[str, object]) -> None:
    said |= {"text": completion(7, 8, 9), "wait_s": 1.3}
    assert await ending_of(said, bound_s=0.1) == "late"
    assert await ending_of(said, leave_s=0.1) == "left"


# -- what it says of processes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mib_per_minute", "flat"), [(0.0, True), (0.3, True), (2.0, False)])
def test_memory_is_flat_or_it_is_not(mib_per_minute: float, flat: bool) -> None:
    """100 MiB over ten minutes, of which the first three grow by 50 MiB: a warm-up."""
    life = Life("one", 1, 0.0)
    for second in range(0, 600, 5):
        warm = 50 * min(1.0, second / 150)
        life.samples.append((second, int((50 + warm + mib_per_minute * second / 60) * 2**20)))
    told = life.verdict()
    assert told["judged"] and told["flat"] is flat
    assert told["slope_mib_per_minute"] == pytest.approx(mib_per_minute, abs=0.01)


def test_what_is_kept_when_nothing_runs() -> None:
    before = {"one": Held(0, 50, 10), "two": Held(0, 50, 10)}
    assert grown(before, before) == []
    told = grown(before, {"one": Held(0, 90, 10), "two": Held(0, 50, 14)})
    assert told == [
        "one has 90 descriptors open when idle, 50 at the start",
        "two has 14 threads when idle, 10 at the start",
    ]
