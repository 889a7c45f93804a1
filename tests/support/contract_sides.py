"""One engine and a pair of transport-real engines, side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from contract_case import Case
from contract_check import send
from sim_tier import simulated

from kvferry.launch.deployment import Deployment

BASELINE_S = 5.0


@dataclass(frozen=True)
class Sides:
    one: str
    pair: str
    model: str
    deployments: tuple[Deployment, ...]


@contextmanager
def both(folder: Path, mode: str, **settings: Any) -> Iterator[Sides]:
    """`settings`: of the pair."""
    with (
        simulated(folder / "one", "colocated", router=False) as one,
        simulated(folder / "pair", mode, **settings) as pair,
    ):
        yield Sides(one.engines[0].url, pair.router_url, pair.model_name(), (one, pair))


async def at_baseline(session: aiohttp.ClientSession, sides: Sides) -> None:
    """No request runs and no block is held, on any engine."""
    async with asyncio.timeout(BASELINE_S):
        for engine in (engine for deployment in sides.deployments for engine in deployment.engines):
            while True:
                async with session.get(f"{engine.url}/metrics") as response:
                    lines = (await response.text()).splitlines()
                names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "kvferry:open_")
                left = [line for line in lines if line.startswith(names) and float(line.split()[-1])]
                if not left:
                    break
                # the gauges move when the engine steps: a tiny request makes it
                tiny = Case(name="tiny", body={"prompt": [1], "max_tokens": 1})
                await send(session, engine.url, tiny, sides.model)
