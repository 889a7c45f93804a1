"""A transfer that one router began is ended by another, by its id; and a router that is killed strands nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from sim_stages import ARGS, HELD_S, LEASE_S, at_baseline, clear, held_at, works
from sim_tier import simulated

from kvferry.ids import TransferId
from kvferry.launch.deployment import Deployment
from kvferry.router.config import RouterConfig
from kvferry.router.dispatch.cancel import cancel
from kvferry.router.main import Running
from kvferry.router.spec import parse_spec
from kvferry.story import read_lines

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(120)]


def second_router(deployment: Deployment) -> Running:
    spec = {role: [] for role in ("prefill", "decode")}
    for engine in deployment.engines:
        spec[engine.role].append(parse_spec(f"{engine.url},side_channel={engine.side_channel}"))
    key = str(deployment.engines[0].auth_key_file)
    roles = {role: tuple(specs) for role, specs in spec.items()}
    return Running(RouterConfig(port=0, auth_key_file=key, **roles))


def last_transfer(deployment: Deployment) -> TransferId:
    lines = [line for line in read_lines(deployment.state_dir.story) if line["event"] == "dispatched"]
    return TransferId(max(lines, key=lambda line: line["t"])["transfer_id"])


@pytest.mark.parametrize("first_is_killed", [False, True])
def test_another_router_cancels(first_is_killed: bool, tmp_path: Path) -> None:
    """C31, C40: both engines are at baseline at once, with no thought of the lease of 20 s, and serve on."""

    async def run(deployment: Deployment, stage: str) -> None:
        async with second_router(deployment) as second:
            await second.pool.until_ready()
            async with held_at(deployment, stage) as asked:
                if first_is_killed:
                    deployment.kill("router")
                told = await cancel(second.pool, last_transfer(deployment), "the other router is gone")
                if not first_is_killed:  # D may hear of it from P before it hears of it from us
                    assert {one.role for one in told} == {"prefill", "decode"}
                    assert [one.outcome for one in told if one.role == "prefill"] == ["released"]
                    got = await asyncio.wait_for(asked, HELD_S + 3.0)
                    assert got.status == 502 and "the other router is gone" in got.body
                await at_baseline(deployment, HELD_S + 2.0)
                assert all(one.outcome == "unknown" for one in await cancel(second.pool, TransferId("none"), "x"))

    with simulated(tmp_path, "push", vllm_args=ARGS, extra_config={"lease_s": 20.0}) as deployment:
        for stage in ("registered", "flying"):
            asyncio.run(run(deployment, stage))
            asyncio.run(clear(deployment))
            if first_is_killed:
                deployment.restart("router")
            asyncio.run(works(deployment))


def test_a_killed_router_strands_nothing_of_a_stream(tmp_path: Path) -> None:
    async def run(deployment: Deployment) -> None:
        async with held_at(deployment, "flying"):
            deployment.kill("router")
            await at_baseline(deployment, HELD_S + LEASE_S + 1.0)

    with simulated(tmp_path, "stream", vllm_args=ARGS, extra_config={"lease_s": LEASE_S}) as deployment:
        asyncio.run(run(deployment))
        asyncio.run(clear(deployment))
        deployment.restart("router")
        asyncio.run(works(deployment))
