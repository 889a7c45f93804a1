"""C13: engines with two data-parallel ranks, KV for real.

A rank is a transport-real engine of its own, as vLLM's are; the front before them does what vLLM's does: it sends a
request to the rank that its header names.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from sim_tier import ask_all, asks, right

from kvferry.launch.deployment import Deployment
from kvferry.launch.engine import Engine
from kvferry.launch.spec import DeploymentSpec
from kvferry.router.config import RouterConfig
from kvferry.router.main import Running
from kvferry.router.spec import parse_spec
from kvferry.story import read_lines

RANKS = 2
HEADER = "X-data-parallel-rank"
READY_S = 10.0


class InRows(Deployment):
    """The side channels of the ranks of one engine are in a row, each with a port per tensor-parallel rank."""

    def _plan(self) -> list[Engine]:
        plans = super()._plan()
        width = {plan.role: plan.tp for plan in plans}
        first = {role: self._ports.free(RANKS * tp) for role, tp in width.items()}
        number = Counter[str]()
        made = []
        for plan in plans:
            made.append(replace(plan, side_port=first[plan.role] + number[plan.role] * plan.tp))
            number[plan.role] += 1
        return made


class Front:
    """One engine's address. `seen`: rank of each request, by its transfer."""

    def __init__(self, ranks: list[str]) -> None:
        self._ranks = ranks
        self.seen: dict[str, int] = {}
        self.url = ""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{tail:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        try:
            yield
        finally:
            await self._session.close()
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.Response:
        raw, rank = await request.read(), 0
        if request.method == "POST":
            rank = int(request.headers[HEADER])
            params = (await request.json())["kv_transfer_params"]
            self.seen[params["transfer_id"]] = rank
        kind = {"Content-Type": request.content_type}
        url = self._ranks[rank] + request.path
        async with self._session.request(request.method, url, data=raw, headers=kind) as response:
            return web.Response(status=response.status, body=await response.read(), content_type=response.content_type)


@pytest.mark.parametrize(("mode", "tp"), [("push", 1), ("pull", 2)])
def test_kv_goes_between_the_ranks_that_both_legs_were_pinned_to(mode: str, tp: int, tmp_path: Path) -> None:
    spec = DeploymentSpec(
        mode=mode,
        engine="sim",
        profile="instant",
        prefill=RANKS,
        decode=RANKS,
        router=False,
        debug_invariants=True,
        prefill_args=(f"--tp={tp}",),
        state_dir=tmp_path,
    )
    asked = asks(40, seed=3)
    with InRows(spec) as deployment:
        fronts = {
            role: Front([engine.url for engine in deployment.engines if engine.role == role])
            for role in ("prefill", "decode")
        }
        side = {role: next(e for e in deployment.engines if e.role == role).side_channel for role in fronts}

        async def run() -> list[list[int]]:
            async with fronts["prefill"].listening(), fronts["decode"].listening():
                specs = {
                    role: (parse_spec(f"{front.url},side_channel={side[role]},dp={RANKS}"),)
                    for role, front in fronts.items()
                }
                key = str(deployment.state_dir.auth_key)
                config = RouterConfig(mode=mode, port=0, retries=0, auth_key_file=key, **specs)
                async with Running(config) as running:
                    async with asyncio.timeout(READY_S):
                        await running.pool.until_ready()
                    return [one.tokens for one in await ask_all(running.url, deployment.model_name(), asked, 8)]

        assert asyncio.run(run()) == [right(ask) for ask in asked]
    pairs = Counter((fronts["prefill"].seen[one], rank) for one, rank in fronts["decode"].seen.items())
    assert pairs.total() == len(asked) and len(pairs) == RANKS * RANKS, pairs
    moved = {line["transfer_id"] for line in read_lines(tmp_path / "story") if line["event"] == "landed"}
    assert len(moved) > len(asked) // 2, "the answers came of KV that was moved"
