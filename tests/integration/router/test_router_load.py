"""What engines say of their load on the side channel shows on the router's /metrics."""

from __future__ import annotations

import asyncio

from scripted import Engine, Pair, serving


async def shown(pair: Pair) -> dict[str, float]:
    async with pair.session.get(pair.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    found = (line.rsplit(" ", 1) for line in lines if line.startswith("kvferry_router_engine_"))
    return {name: float(value) for name, value in found}


def names(engine: Engine, role: str) -> tuple[str, str]:
    labels = f'{{engine="{engine.url}",role="{role}"}}'
    return f"kvferry_router_engine_open_transfers{labels}", f"kvferry_router_engine_backlog_bytes{labels}"


async def test_load_of_each_engine_as_it_last_said() -> None:
    busy, other = Engine("prefill"), Engine("prefill")
    busy.side.load = {"open_transfers": 3, "backlog_bytes": 4096}
    async with serving(prefill=[busy, other], describe_interval_s=0.05, probe_interval_s=0.05) as pair:
        pool = pair.running.pool
        async with asyncio.timeout(5):
            while not all(engine.ready for engine in pool.all()):
                await pool.change()
            transfers, backlog = names(busy, "prefill")
            assert (await shown(pair))[transfers] == 3 and (await shown(pair))[backlog] == 4096
            for engine, role in ((other, "prefill"), (pair.d, "decode")):
                assert [(await shown(pair))[name] for name in names(engine, role)] == [0, 0]
            busy.side.load = {"open_transfers": 1}
            while await shown(pair) != {name: 0 for name in await shown(pair)} | {transfers: 1}:
                await pool.change()
            busy.health = 503
            while pool.engines["prefill"][0].ready:
                await pool.change()
            assert not {transfers, backlog} & (await shown(pair)).keys(), "what it said before is old"


async def test_other_connectors_have_no_load() -> None:
    async with serving(connector="upstream-pull") as pair:
        assert await shown(pair) == {}
