"""Engines for the vllm tier, and both legs of a transfer sent straight to them, without a router in between."""

from __future__ import annotations

import asyncio
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from kvferry.auth import AuthKey, load_key
from kvferry.ids import TransferId, new_transfer_id
from kvferry.launch.deployment import Deployment, RunningEngine
from kvferry.launch.ports import LOOPBACK, Ports
from kvferry.launch.routing import router_command
from kvferry.launch.spec import DeploymentSpec
from kvferry.launch.web import healthy


@dataclass(frozen=True)
class Reply:
    status: int
    body: dict[str, Any]

    @property
    def token_ids(self) -> list[int]:
        return list(self.body["choices"][0]["token_ids"])


def asking() -> aiohttp.ClientSession:
    """A connection for each request: a server may close one that was idle at the moment in which it is used again."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))


def side_channel(engine: RunningEngine) -> tuple[str, int]:
    host, _, port = engine.side_channel.rpartition(":")
    return host, int(port)


def key_of(engine: RunningEngine) -> AuthKey | None:
    """Of its side channel."""
    return load_key(str(engine.auth_key_file))


def source_params(transfer_id: TransferId, mode: str, **more: Any) -> dict[str, Any]:
    return {"do_remote_decode": True, "transfer_id": transfer_id, "mode": mode, **more}


def landing_params(transfer_id: TransferId, mode: str, prefill: RunningEngine, **more: Any) -> dict[str, Any]:
    host, port = side_channel(prefill)
    where = {"remote_host": host, "remote_port": port, "remote_engine_id": prefill.name, "remote_tp_size": 1}
    return {"do_remote_prefill": True, "transfer_id": transfer_id, "mode": mode, **where, **more}


class Legs:
    """`prompt`s are token ids; answers are greedy."""

    def __init__(self, session: aiohttp.ClientSession, deployment: Deployment) -> None:
        self.session = session
        self.model = deployment.model_name()
        by_role = {engine.role: engine for engine in deployment.engines}
        self.prefill = by_role.get("prefill") or by_role["colocated"]
        self.decode = by_role.get("decode") or by_role["colocated"]

    async def ask(
        self, engine: RunningEngine, prompt: list[int], tokens: int, params: dict[str, Any] | None = None, **more: Any
    ) -> Reply:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }
        if params is not None:
            body["kv_transfer_params"] = params
        async with self.session.post(f"{engine.url}/v1/completions", json=body) as response:
            return Reply(response.status, await response.json())

    async def transfer(self, mode: str, prompt: list[int], tokens: int, **more: Any) -> tuple[TransferId, Reply, Reply]:
        """(transfer id, prefill's reply, decode's reply): push and stream with both legs at once, pull one
        after the other."""
        transfer_id = new_transfer_id()
        source = self.ask(self.prefill, prompt, 1, source_params(transfer_id, mode), **more)
        if mode in ("push", "stream"):
            params = landing_params(transfer_id, mode, self.prefill)
            landing = self.ask(self.decode, prompt, tokens, params, **more)
            first, second = await asyncio.gather(source, landing)
        else:
            first = await source
            second = await self.ask(self.decode, prompt, tokens, first.body["kv_transfer_params"], **more)
        return transfer_id, first, second


async def metric(legs: Legs, engine: RunningEngine, name: str) -> float:
    """Summed over all its labels. `name`: with its prefix, or without 'vllm:'."""
    full = name if ":" in name else f"vllm:{name}"
    async with legs.session.get(f"{engine.url}/metrics") as response:
        text = await response.text()
    found = re.findall(rf"^{full}(?:{{.*}})? ([0-9.e+-]+)$", text, re.MULTILINE)
    assert found, f"no metric {name}"
    return sum(map(float, found))


async def at_baseline(legs: Legs, engine: RunningEngine, within_s: float) -> None:
    """No request, no KV block in use."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    async with asyncio.timeout(within_s):
        while any([await metric(legs, engine, name) for name in names]):
            # The gauges move when the engine steps: a tiny request makes it.
            await legs.ask(engine, [1], 1)
            await asyncio.sleep(0.1)


@contextmanager
def deployed(state_dir: Path, **spec: Any) -> Iterator[Deployment]:
    """One deployment without a router, stopped with the block."""
    with Deployment(DeploymentSpec(**{"router": False, "state_dir": state_dir, **spec})) as deployment:
        yield deployment


@contextmanager
def router_without_tier(deployment: Deployment) -> Iterator[str]:
    """A second router in front of a deployment's engines, which render themselves; its address."""
    ports = Ports()
    port = ports.free()
    plans = [engine.plan for engine in deployment.engines]
    spec = replace(deployment.spec, render=0)
    argv = router_command(spec, plans, deployment.mode, port, deployment.state_dir)
    url = f"http://{LOOPBACK}:{port}"
    with (deployment.state_dir.logs / "router-without-tier.log").open("wb") as log:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        until = time.monotonic() + 60.0
        while not healthy(url):
            assert process.poll() is None and time.monotonic() < until, Path(log.name).read_text()
            time.sleep(0.1)
        ports.release()
        yield url
    finally:
        process.terminate()
        process.wait(20.0)
