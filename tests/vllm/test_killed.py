"""Real engines killed with WRITEs in flight, and started again: the other one fails that request alone, and goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import aiohttp
import psutil
import pytest
from vllm_tier import Legs, asking, at_baseline, deployed, key_of, landing_params, metric, side_channel, source_params

from kvferry.ids import TransferId, new_transfer_id
from kvferry.launch.deployment import Deployment, RunningEngine
from kvferry.story import read_lines, read_story
from kvferry.transfer import inquiry

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
LEASE_S = 5.0
PROMPT = list(range(1000, 1600))
# Over shared memory a WRITE needs nothing of its target; over TCP it stays in flight while that is stopped.
SPEC = {
    "mode": "push",
    "env": {"UCX_TLS": "tcp,self"},
    "extra_config": {"lease_s": LEASE_S, "debug_invariants": True, "staging": "off"},  # staged, it would wait for slots
    "vllm_args": ("--block-size", "32", "--no-enable-prefix-caching"),
}


@contextmanager
def stopped(engine: RunningEngine) -> Iterator[None]:
    processes = [psutil.Process(pid) for pid in engine.pids()]
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            if process.is_running():
                process.resume()


async def told(deployment: Deployment, transfer_id: TransferId, event: str) -> None:
    """It has come to that."""
    async with asyncio.timeout(60):
        while not any(
            line["event"] == event for line in read_story(Path(deployment.spec.state_dir) / "story", transfer_id)
        ):
            await asyncio.sleep(0.05)


async def registered(legs: Legs, transfer_id: TransferId) -> None:
    async with asyncio.timeout(30):
        while (await inquiry.why(*side_channel(legs.prefill), transfer_id, key=key_of(legs.prefill))).state != "open":
            await asyncio.sleep(0.02)


async def kill_with_writes_in_flight(deployment: Deployment, mode: str, who: str) -> None:
    """Push: decode registers and is stopped, prefill computes and writes. Pull: prefill is done, and is stopped until
    decode has registered and is stopped."""
    transfer_id = new_transfer_id()
    async with asking() as session:
        legs = Legs(session, deployment)
        source = asyncio.create_task(asyncio.sleep(0))
        if mode == "pull":
            assert (await legs.ask(legs.prefill, PROMPT, 1, source_params(transfer_id, mode))).status == 200
        params = landing_params(transfer_id, mode, legs.prefill)
        with ExitStack() as halted:
            with stopped(legs.prefill) if mode == "pull" else nullcontext():
                landing = asyncio.create_task(legs.ask(legs.decode, PROMPT, 4, params))
                await (told(deployment, transfer_id, "registered") if mode == "pull" else registered(legs, transfer_id))
                halted.enter_context(stopped(legs.decode))
            if mode == "push":
                source = asyncio.create_task(legs.ask(legs.prefill, PROMPT, 1, source_params(transfer_id, mode)))
            await told(deployment, transfer_id, "posted")
            killed = time.monotonic()
            deployment.kill(who)
        if who == "prefill-0":
            reply = await asyncio.wait_for(landing, 10)
            assert reply.status == 500 and time.monotonic() - killed < 5.0
            verdict = await inquiry.why(*side_channel(legs.decode), transfer_id, key=key_of(legs.decode))
            assert (verdict.state, verdict.code) == ("failed", "peer_gone")
            await at_baseline(legs, legs.decode, 5.0)
        else:
            with pytest.raises(aiohttp.ClientError):
                await asyncio.wait_for(landing, 10)
            await at_baseline(legs, legs.prefill, LEASE_S + 5.0)
            verdict = await inquiry.why(*side_channel(legs.prefill), transfer_id, key=key_of(legs.prefill))
            assert (verdict.state, verdict.code) in {("failed", "peer_gone"), ("failed", "write_failed")}
        await asyncio.gather(source, return_exceptions=True)


async def works(deployment: Deployment, mode: str) -> None:
    async with asking() as session:
        legs = Legs(session, deployment)
        solo = await legs.ask(legs.prefill, PROMPT, 4)
        _, first, second = await legs.transfer(mode, PROMPT, 4)
        assert (first.status, second.status) == (200, 200), (first.body, second.body)
        assert second.token_ids == solo.token_ids
        await at_baseline(legs, legs.prefill, 5.0)
        await at_baseline(legs, legs.decode, 5.0)


async def pulls_were_written(deployment: Deployment) -> None:
    async with asking() as session:
        legs = Legs(session, deployment)
        assert await metric(legs, legs.prefill, "kvferry:pulls_total") == 2.0
    posts = [line for line in read_lines(Path(deployment.spec.state_dir) / "story") if line["event"] == "posted"]
    assert posts and all((line["side"], line["op"]) == ("prefill", "WRITE") for line in posts)


def test_each_engine_killed_with_writes_in_flight_and_started_again(tmp_path: Path) -> None:
    """C50, C51: the one that lives is the same process before and after. In pull too, where over TCP prefill writes."""
    with deployed(tmp_path, **SPEC) as deployment:
        for mode, who in (("push", "prefill-0"), ("push", "decode-0"), ("pull", "decode-0")):
            other = "decode-0" if who == "prefill-0" else "prefill-0"
            pid = deployment.engine(other).pid
            asyncio.run(kill_with_writes_in_flight(deployment, mode, who))
            deployment.restart(who)
            asyncio.run(works(deployment, mode))
            assert deployment.engine(other).pid == pid
        asyncio.run(pulls_were_written(deployment))
        assert not deployment.dead()
