"""The router's rows of the failure matrix, for real: a router that is killed, a client that leaves, at each stage."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from sim_stages import ARGS, HELD_S, LEASE_S, STAGES, at_baseline, clear, held_at, works
from sim_tier import simulated

from kvferry.launch.deployment import Deployment

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(120)]
LIMITS = {"lease_s": LEASE_S}


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_router_killed(mode: str, tmp_path: Path) -> None:
    """Both engines see their connections close; nothing is held beyond the lease, and another router goes on."""

    async def kill_it_at(deployment: Deployment, stage: str) -> None:
        async with held_at(deployment, stage):
            deployment.kill("router")
            await at_baseline(deployment, HELD_S + LEASE_S + 1.0)
        await clear(deployment)

    with simulated(tmp_path, mode, vllm_args=ARGS, extra_config=LIMITS) as deployment:
        for stage in STAGES:
            asyncio.run(kill_it_at(deployment, stage))
            deployment.restart("router")
            asyncio.run(works(deployment))


@pytest.mark.parametrize("mode", ["push", "stream", "pull"])
def test_client_leaves_at_each_stage(mode: str, tmp_path: Path) -> None:
    """C30, C31: the router closes both legs and tells P; nobody waits for the lease."""

    async def run(deployment: Deployment) -> None:
        for stage in STAGES:
            async with held_at(deployment, stage) as asked:
                asked.cancel()
                await at_baseline(deployment, HELD_S + 1.5)
            await clear(deployment)
            await works(deployment)

    with simulated(tmp_path, mode, vllm_args=ARGS, extra_config={"lease_s": 20.0}) as deployment:
        asyncio.run(run(deployment))
