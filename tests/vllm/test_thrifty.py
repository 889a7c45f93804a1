"""Waiting costs nothing: while a request waits at D for its prefill, no thread of D's or P's engine is busy."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from vllm_tier import Legs, asking, deployed, key_of, landing_params, side_channel

from kvferry.ids import new_transfer_id
from kvferry.launch.deployment import Deployment
from kvferry.transfer import inquiry
from kvferry.transfer.thread import OS_THREAD_NAME

SECONDS = 4.0


def cpu_seconds(pids: list[int]) -> dict[tuple[int, str], float]:
    """(thread id, its name) -> CPU seconds so far, of every thread of these processes."""
    out = {}
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            name, rest = (task / "stat").read_text().split(" (", 1)[1].rsplit(") ", 1)
            fields = rest.split()
            out[int(task.name), name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return out


async def shares(pids: list[int]) -> dict[tuple[int, str], float]:
    """Share of one core that each thread used over `SECONDS`."""
    before, started = cpu_seconds(pids), time.monotonic()
    await asyncio.sleep(SECONDS)
    after, took = cpu_seconds(pids), time.monotonic() - started
    return {key: (after[key] - before.get(key, 0.0)) / took for key in after}


async def check(deployment: Deployment, mode: str) -> None:
    async with asking() as session:
        legs = Legs(session, deployment)
        transfer_id = new_transfer_id()
        params = landing_params(transfer_id, mode, legs.prefill)
        waiting = asyncio.create_task(legs.ask(legs.decode, list(range(500, 900)), 4, params))
        async with asyncio.timeout(5):
            while (await inquiry.why(*side_channel(legs.decode), transfer_id, key=key_of(legs.decode))).state != "open":
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)
        used = await shares(legs.prefill.pids() + legs.decode.pids())
        waiting.cancel()
    ours = {key: share for key, share in used.items() if key[1] == OS_THREAD_NAME}
    assert len(ours) == 2, sorted(name for _, name in used)
    busiest = max(used.items(), key=lambda item: item[1])
    print(f"{mode}: transfer threads {[f'{s:.1%}' for s in ours.values()]}, busiest {busiest[0][1]} {busiest[1]:.1%}")
    assert max(ours.values()) < 0.05
    assert busiest[1] < 0.10, f"{busiest[0]} used {busiest[1]:.0%} of a core while waiting"


def test_waiting_for_prefill(tmp_path: Path) -> None:
    with deployed(tmp_path, mode="push") as deployment:
        for mode in ("push", "pull"):
            asyncio.run(check(deployment, mode))
