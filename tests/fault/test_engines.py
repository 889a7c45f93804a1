"""Engines that are killed or stall, behind the router: what the client gets, and that the pair works afterwards."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from sim_stages import ARGS, ASK, LEASE_S, LONG, STAGES, at_baseline, clear, held_at, works
from sim_tier import Got, ask_all, inject, right, simulated

from kvferry.launch.deployment import Deployment

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(120)]
LIMITS = {"lease_s": LEASE_S, "connect_timeout_s": 1.0}


@pytest.mark.parametrize("who", ["prefill-0", "decode-0"])
def test_killed_at_each_stage(who: str, tmp_path: Path) -> None:
    """One error within 3 s, or the answer if it needs the dead no more; the other engine holds nothing, and goes on."""
    other = "decode-0" if who == "prefill-0" else "prefill-0"

    async def kill_at(deployment: Deployment, stage: str) -> tuple[Got, float]:
        async with held_at(deployment, stage) as asked:
            began = time.monotonic()
            deployment.kill(who)
            got = await asyncio.wait_for(asked, 10.0)
            took = time.monotonic() - began
            await at_baseline(deployment, LEASE_S + 3.0, other)
        return got, took

    with simulated(tmp_path, "push", vllm_args=ARGS, extra_config=LIMITS) as deployment:
        pid = deployment.engine(other).pid
        for stage in STAGES:
            got, took = asyncio.run(kill_at(deployment, stage))
            if stage != "decoding":
                assert got.status in (502, 503) and '"code"' in got.body and took < 3.0, (stage, got, took)
            elif who == "prefill-0":
                assert got.tokens == right(LONG)
            else:
                assert 0 < len(got.tokens) < LONG.max_tokens and "error" in got.body and took < 3.0
            deployment.restart(who)
            asyncio.run(works(deployment))
            asyncio.run(clear(deployment))
        assert deployment.engine(other).pid == pid and not deployment.dead()


def test_an_engine_that_stalls(tmp_path: Path) -> None:
    """Both engine loops stand still for 5 s, longer than the lease: their transfer threads don't, and nobody is given
    up."""

    async def run(deployment: Deployment) -> tuple[Got, float]:
        for name in ("prefill-0", "decode-0"):
            await inject(deployment.engine(name).url, kind="freeze", seconds=5.0)
        began = time.monotonic()
        [got] = await ask_all(deployment.router_url, deployment.model_name(), [ASK])
        return got, time.monotonic() - began

    with simulated(tmp_path, "push", vllm_args=ARGS, extra_config=LIMITS) as deployment:
        got, took = asyncio.run(run(deployment))
        assert got.tokens == right(ASK), got.body
        assert 5.0 <= took < 8.0
        asyncio.run(at_baseline(deployment, 2.0))
