"""One request on transport-real engines, held at a stage of its transfer by faults that only delay."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
from sim_tier import Ask, Got, ask_all, inject, right

from kvferry.auth import load_key
from kvferry.bench.witness import engine_metrics
from kvferry.launch.deployment import Deployment
from kvferry.story import read_lines
from kvferry.transfer import inquiry

ASK = Ask(range(1000, 1200), 6)
LONG = Ask(range(1000, 1200), 3000)
STAGES = ("registered", "flying", "decoding")
HELD_S = 1.5
LEASE_S = 2.0
ARGS = ("--enable-faults", "--no-enable-prefix-caching")


async def open_transfers(deployment: Deployment, name: str) -> int:
    engine = deployment.engine(name)
    host, _, port = engine.side_channel.rpartition(":")
    return (await inquiry.describe(host, int(port), key=load_key(str(engine.auth_key_file)))).open_transfers


async def until(holds: Callable[[], Awaitable[bool]], within_s: float, what: str) -> float:
    """Seconds that it took."""
    began = time.monotonic()
    while not await holds():
        assert time.monotonic() - began < within_s, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(0.02)
    return time.monotonic() - began


@asynccontextmanager
async def held_at(deployment: Deployment, stage: str) -> AsyncIterator[asyncio.Task[Got]]:
    """The request's task, while its transfer is there."""
    writer = "decode-0" if deployment.spec.mode == "pull" else "prefill-0"
    story = deployment.state_dir.story
    posted = sum(line["event"] == "posted" for line in read_lines(story))
    if stage == "registered":
        # In pull D is asked when P is done: P holds the blocks, and D's engine has not come to name its own.
        stalls = "decode-0" if deployment.spec.mode == "pull" else "prefill-0"
        await inject(deployment.engine(stalls).url, kind="freeze", seconds=HELD_S)
    elif stage == "flying":
        await inject(deployment.engine(writer).url, kind="slow_link", delay_s=HELD_S)
    streaming = asyncio.Event()
    asked = asyncio.create_task(_ask(deployment, LONG if stage == "decoding" else ASK, streaming))
    if stage == "decoding":
        await streaming.wait()
    elif stage == "flying":

        async def is_posted() -> bool:
            return sum(line["event"] == "posted" for line in read_lines(story)) > posted

        await until(is_posted, 5.0, "posted")
    else:
        side = "prefill-0" if deployment.spec.mode == "pull" else "decode-0"

        async def is_open() -> bool:
            return await open_transfers(deployment, side) == 1

        await until(is_open, 5.0, "registered")
    try:
        yield asked
    finally:
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


async def _ask(deployment: Deployment, ask: Ask, streaming: asyncio.Event) -> Got:
    """Streamed; the tokens so far, and the last event's body if that was an error."""
    body = {"model": deployment.model_name(), "prompt": list(ask.prompt), "max_tokens": ask.max_tokens}
    body |= {"ignore_eos": True, "return_token_ids": True, "stream": True}
    tokens: list[int] = []
    async with aiohttp.ClientSession() as session, session.post(
        f"{deployment.router_url}/v1/completions", json=body
    ) as response:  # fmt: skip
        if response.status != 200:
            return Got(response.status, [], await response.text())
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            facts = json.loads(line[6:])
            if "error" in facts:
                return Got(200, tokens, line.decode())
            tokens += facts["choices"][0]["token_ids"] or []
            streaming.set()
    return Got(200, tokens, "")


async def at_baseline(deployment: Deployment, within_s: float, *names: str) -> float:
    """Seconds until these engines hold nothing of any request."""

    async def is_idle() -> bool:
        for name in names or ("prefill-0", "decode-0"):
            metrics = engine_metrics(deployment.engine(name).url)
            used = [value for metric, _, value in metrics if "kv_cache_usage" in metric]
            if used != [0.0] or await open_transfers(deployment, name):
                return False
        return True

    return await until(is_idle, within_s, "at baseline")


async def clear(deployment: Deployment) -> None:
    for engine in deployment.engines:
        await inject(engine.url, kind="clear")


async def works(deployment: Deployment, within_s: float = 15.0) -> None:
    """The router may need a probe to see that somebody is back."""
    got: list[Got] = []

    async def is_answered() -> bool:
        got[:] = await ask_all(deployment.router_url, deployment.model_name(), [ASK])
        return got[0].status == 200

    await until(is_answered, within_s, f"an answer: {got}")
    assert got[0].tokens == right(ASK), got[0].body
