"""What a soak does to the engines of its deployment, at random: kills, stops, stalls, slow and broken links.

Event loop's thread; whatever starts or ends processes goes to a worker thread, one at a time. Each engine has one
trouble at a time, and only those of `mortal` are killed: the others must bear it without a leak.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.bench.soak_link import Link
from kvferry.errors import EngineError
from kvferry.launch.deployment import Deployment
from kvferry.launch.web import healthy, post_json

TERM_LIMIT_S = 11.0
"""An engine that is asked to end, with requests in transfer, is gone by then."""
SLOW_LINKS = ({"op": "both", "factor": 1.0, "delay_s": 0.2}, {"op": "both", "factor": 20.0, "delay_s": 0.02})


@dataclass(frozen=True)
class Pace:
    """Seconds. `every`: from one trouble to the next, on average. `apart`: two deaths at least; `ready`: an engine is
    ready again within."""

    every_s: float
    apart_s: float
    ready_s: float


@dataclass
class Troubles:
    """`faults`: engines take `POST /fault`. `say`: progress for people."""

    deployment: Deployment
    links: dict[str, Link]
    pace: Pace
    faults: bool
    draw: random.Random
    say: Callable[[str], None]
    mortal: frozenset[str] = frozenset()
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    shm: set[str] = field(default_factory=set)
    """Shared memory that engines had which are dead now."""

    def __post_init__(self) -> None:
        self.dying: set[str] = set()
        """Engines that were asked to end, or are not back yet."""
        self._busy: dict[str, asyncio.Task[None]] = {}
        self._launcher = asyncio.Lock()
        self._died_at = 0.0

    async def run(self, until: float) -> None:
        """Troubles until then (monotonic), and until all of them are over."""
        while (now := time.monotonic()) < until:
            await asyncio.sleep(min(until - now, self.draw.expovariate(1 / self.pace.every_s)))
            if time.monotonic() < until:
                self._one()
        await asyncio.gather(*self._busy.values())

    def _one(self) -> None:
        idle = [engine.name for engine in self.deployment.engines if engine.name not in self._busy]
        if not idle:
            return
        name = self.draw.choice(idle)
        kinds = ["stop", "stop"] + (["slow link", "freeze"] if self.faults else [])
        if name in self.links:
            kinds += ["slow side channel", "frozen side channel", "cut side channel"]
        may_die = self.mortal & set(idle)
        if may_die and time.monotonic() - self._died_at > self.pace.apart_s and self.draw.random() < 0.5:
            name, kinds = self.draw.choice(sorted(may_die)), ["kill", "kill", "terminate"]
        kind = self.draw.choice(kinds)
        self.counts[kind] += 1
        self._busy[name] = asyncio.create_task(self._do(kind, name))

    async def _do(self, kind: str, name: str) -> None:
        seconds = self.draw.uniform(0.3, 5.0)
        try:
            if kind in ("kill", "terminate"):
                self._died_at = time.monotonic()
                await self._die(name, kind == "kill", self.draw.uniform(0.0, 3.0))
                self._died_at = time.monotonic()
            elif kind == "stop":
                await self._stop(name, seconds)
            elif kind == "freeze":
                await self._fault(name, kind="freeze", seconds=seconds)
                await asyncio.sleep(seconds)
            elif kind == "slow link":
                await self._fault(name, kind="slow_link", **self.draw.choice(SLOW_LINKS))
                await asyncio.sleep(seconds)
                await self._fault(name, kind="clear")
            else:
                await self._link(kind, self.links[name], seconds)
        except EngineError as error:
            self.violations.append(f"{name}, {kind}: {error}")
        finally:
            del self._busy[name]

    async def _die(self, name: str, at_once: bool, away_s: float) -> None:
        process, begun = self.deployment.process(name), time.monotonic()
        self.dying.add(name)
        self.say(f"{name}: {'SIGKILL' if at_once else 'SIGTERM'}")
        async with self._launcher:
            await asyncio.to_thread(process.note_shm)
            self.shm |= process.tree.shm
            number = signal.SIGKILL if at_once else signal.SIGTERM
            await asyncio.to_thread(self.deployment.kill, name, number, leader_only=not at_once)
            code = await asyncio.to_thread(process.wait, TERM_LIMIT_S)
            if not at_once and code is None:
                self.violations.append(f"{name} did not end within {TERM_LIMIT_S:g} s of SIGTERM")
            elif not at_once and self.faults and code:
                self.violations.append(f"{name} ended with code {code} on SIGTERM: {process.cause()}")
            if name in self.links:
                self.links[name].down()
            await asyncio.sleep(away_s)
            await asyncio.to_thread(self.deployment.restart, name, wait=False)
        url, begun = self.deployment.engine(name).url, time.monotonic()
        while not await asyncio.to_thread(healthy, url):
            if process.poll() is not None or time.monotonic() - begun > self.pace.ready_s:
                self.violations.append(f"{name} did not come back: {process.died('while starting again')}")
                return
            await asyncio.sleep(0.2)
        if name in self.links:
            await self.links[name].up()
        self.dying.discard(name)

    async def _stop(self, name: str, seconds: float) -> None:
        async with self._launcher:
            await asyncio.to_thread(self.deployment.kill, name, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            async with self._launcher:
                await asyncio.to_thread(self.deployment.kill, name, signal.SIGCONT)

    async def _fault(self, name: str, **fault: object) -> None:
        await asyncio.to_thread(post_json, f"{self.deployment.engine(name).url}/fault", fault)

    async def _link(self, kind: str, link: Link, seconds: float) -> None:
        if kind == "cut side channel":
            link.cut()
            return
        if kind == "slow side channel":
            link.delay_s = self.draw.uniform(0.02, 0.3)
        else:
            link.hold()
        await asyncio.sleep(seconds)
        link.flow()
