"""Asks the engines: HTTP, and the side channel of every rank. Each question ends within `LIMIT_S`."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvferry.auth import AuthKey
from kvferry.doctor.findings import Finding, fail, ok, warn
from kvferry.doctor.target import Target, address
from kvferry.errors import KeyRefused, PeerUnreachable
from kvferry.protocol.messages import Inspection
from kvferry.transfer import inquiry

LIMIT_S = 5.0


@dataclass
class Engine:
    """What is known of one engine. `ranks`: by rank, as far as they answered. `ahead_s`, `give_or_take_s`: its clock
    less ours. `models`: as it serves them; None where not asked or not told."""

    target: Target
    ranks: dict[int, Inspection] = field(default_factory=dict)
    ahead_s: float = 0.0
    give_or_take_s: float = 0.0
    models: list[str] | None = None

    @property
    def complete(self) -> bool:
        """Every rank answered."""
        return bool(self.ranks) and len(self.ranks) == next(iter(self.ranks.values())).tp_size

    @property
    def name(self) -> str:
        """For people: its id, once it is known."""
        return str(self.ranks[0].engine_id) if 0 in self.ranks else self.target.name


async def ask(target: Target, api_key: str, key: AuthKey | None = None) -> tuple[Engine, list[Finding]]:
    """One engine, and what is wrong with reaching it. `api_key`: of its HTTP side, `key`: of its side channel."""
    engine, findings = Engine(target), []
    if target.url:
        findings += await _http(engine, api_key)
    findings.append(await _rank(engine, 0, key))
    if 0 in engine.ranks:
        others = range(1, engine.ranks[0].tp_size)
        findings += await asyncio.gather(*(_rank(engine, rank, key) for rank in others))
    if engine.complete:
        said = f"it has this side's {key}" if key else "none: its side channel is on loopback, open to all users there"
        findings.append(ok("key", target.name, said))
    return engine, findings


async def _http(engine: Engine, api_key: str) -> list[Finding]:
    target = engine.target
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
            async with session.get(f"{target.url}/health") as answer:
                if answer.status != 200:
                    said = f"/health answered {answer.status}"
                    return [fail("http", target.name, said, "see the engine's log: it does not take requests")]
            async with session.get(f"{target.url}/v1/models") as answer:
                if answer.status in (401, 403):
                    said = f"/health answers 200, /v1/models answered {answer.status}"
                    return [warn("http", target.name, said, "give the engines' key with --api-key")]
                body: Any = await answer.json() if answer.status == 200 else {}
    except TimeoutError:
        said = f"no answer within {LIMIT_S:g} s"
        return [fail("http", target.name, said, "is the engine still starting, or does a firewall drop the port?")]
    except (aiohttp.ClientError, ValueError) as error:
        return [fail("http", target.name, f"no answer: {error}", "start the engine, or correct its URL")]
    try:
        engine.models = [str(entry["id"]) for entry in body["data"]]
    except (KeyError, TypeError):
        return [warn("http", target.name, "/v1/models gave no list of models", "is it an OpenAI-compatible engine?")]
    return [ok("http", target.name, f"healthy, serves {', '.join(engine.models)}")]


async def _rank(engine: Engine, rank: int, key: AuthKey | None) -> Finding:
    """Ask one rank, and note its answer in `engine`."""
    target = engine.target
    host, port = target.host, target.port + rank
    where = f"{target.name} rank {rank}" if rank else target.name
    place = address(host, port)
    closed = await _closed(host, port)
    if closed:
        todo = "start the engine with KVFerryConnector; rank r listens on side_channel_port + r"
        if "no answer" in closed:
            todo = "open the port in the firewall between the machines"
        if "not known" in closed:
            todo = "correct the host's name"
        return fail("side channel", where, f"{place}: {closed}", todo)
    began, wall = time.perf_counter(), time.time()
    try:
        about = await inquiry.inspect(host, port, LIMIT_S, key)
    except KeyRefused as error:
        return fail(
            "key", where, error.message, "one key for all engines and routers; the doctor takes it with --auth-key-file"
        )
    except PeerUnreachable as error:
        said = error.message if "refuses" in error.message else f"{place} takes connections but does not answer"
        todo = "is it the side channel of KVFerryConnector, of this kvferry's version, and not the HTTP port?"
        return fail("side channel", where, said, todo)
    took = time.perf_counter() - began
    if about.rank != rank:
        said = f"{place} is rank {about.rank} of {about.engine_id}, not rank {rank}"
        return fail("side channel", where, said, "name the side channel of rank 0: its port is the lowest")
    first = engine.ranks.get(0, about)
    if (about.engine_id, about.tp_size) != (first.engine_id, first.tp_size):
        said = f"{place} is {about.engine_id} with TP {about.tp_size}, rank 0 is {first.engine_id} with {first.tp_size}"
        return fail("side channel", where, said, "give each engine a range of ports of its own")
    engine.ranks[rank] = about
    if rank == 0:
        engine.ahead_s, engine.give_or_take_s = about.wall_s - (wall + took / 2), took / 2
    return ok("side channel", where, f"{place} answers in {took * 1e3:.1f} ms: {about.engine_id} rank {rank}")


async def _closed(host: str, port: int) -> str:
    """Why no TCP connection can be made; '' if one can."""
    try:
        async with asyncio.timeout(LIMIT_S):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return f"no answer within {LIMIT_S:g} s"
    except socket.gaierror as error:
        return f"the host is not known: {error.strerror}"
    except OSError as error:
        return "nothing listens there" if isinstance(error, ConnectionRefusedError) else str(error)
    writer.close()
    return ""
