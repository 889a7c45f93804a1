"""Deployments of transport-real engines, and load on them whose right answers are known."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from kvferry.engine.content import answer
from kvferry.engine.profile import load
from kvferry.launch.deployment import Deployment
from kvferry.launch.spec import DeploymentSpec


@contextmanager
def simulated(folder: Path, mode: str = "push", profile: str = "instant", **settings: Any) -> Iterator[Deployment]:
    """What the launcher says goes to the test's output. The engines look for what is left behind. Retries are off, so
    that a failure is seen."""
    settings = {"debug_invariants": True, **settings}
    settings["router_args"] = ("--retries", "0", *settings.get("router_args", ()))
    spec = DeploymentSpec(mode=mode, engine="sim", profile=profile, state_dir=folder / "state", **settings)
    with Deployment(spec, report=print) as deployment:
        yield deployment


@dataclass(frozen=True)
class Ask:
    prompt: Sequence[int]
    max_tokens: int


def asks(count: int, seed: int, longest: int = 400, outputs: int = 24) -> list[Ask]:
    """Random prompts, a third of which share a beginning with others."""
    draw = random.Random(seed)
    stems = [[draw.randrange(256, 30_000) for _ in range(200)] for _ in range(4)]
    made = []
    for _ in range(count):
        stem = draw.choice(stems)[: draw.randrange(200)] if draw.random() < 0.33 else []
        own = [draw.randrange(256, 30_000) for _ in range(draw.randrange(1, longest))]
        made.append(Ask([*stem, *own], draw.randrange(1, outputs)))
    return made


def right(ask: Ask, profile: str = "instant", byte_scale: int = 1) -> list[int]:
    found = load(profile)
    shape = (found.shape.layers, found.shape.kv_heads, found.shape.cell_bytes // byte_scale)
    return answer(ask.prompt, ask.max_tokens, shape, found.limits.vocab_size)


@dataclass(frozen=True)
class Got:
    status: int
    tokens: list[int]
    body: str


async def ask_all(url: str, model: str, what: Sequence[Ask], at_once: int = 32) -> list[Got]:
    """All of them, at most `at_once` at a time; the answers in order."""
    turns = asyncio.Semaphore(at_once)

    async def one(session: aiohttp.ClientSession, ask: Ask) -> Got:
        body = {"model": model, "prompt": list(ask.prompt), "max_tokens": ask.max_tokens}
        body |= {"ignore_eos": True, "return_token_ids": True}
        async with turns, session.post(f"{url}/v1/completions", json=body) as response:
            text = await response.text()
            if response.status != 200:
                return Got(response.status, [], text)
            return Got(200, json.loads(text)["choices"][0]["token_ids"], text)

    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        return list(await asyncio.gather(*(one(session, ask) for ask in what)))


async def inject(url: str, **fault: Any) -> None:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/fault", json=fault) as response:
        assert response.status == 200, await response.text()
