"""A soak: engines under load and under every trouble that signals and links can make, at random but seeded.

`kvferry bench soak` and tests/fault/test_soak.py. Every answer must be the right one, or one typed error; nobody waits
beyond the router's request deadline; and when all is quiet again, nothing may be left of what was.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from kvferry.auth import load_key
from kvferry.bench.soak_asks import Next
from kvferry.bench.soak_client import GOOD, Ending, How, ask
from kvferry.bench.soak_link import Link
from kvferry.bench.soak_trouble import Pace, Troubles
from kvferry.bench.soak_watch import Watch, grown, left_running
from kvferry.bench.witness import engine_metrics
from kvferry.config import parse_address
from kvferry.errors import EngineError, PeerUnreachable
from kvferry.launch.cancel import Cancel
from kvferry.launch.deployment import Deployment, RunningEngine
from kvferry.launch.guard import Guard
from kvferry.launch.ports import LOOPBACK, Ports
from kvferry.launch.process import ManagedProcess
from kvferry.launch.readiness import wait_healthy
from kvferry.launch.routing import router_command
from kvferry.launch.spec import DeploymentSpec, mode_named
from kvferry.launch.tree import end_trees
from kvferry.launch.web import post_json
from kvferry.transfer import inquiry

LIMITS: dict[str, Any] = {
    "lease_s": 3.0,
    "registration_timeout_s": 4.0,
    "connect_timeout_s": 1.5,
    "prefill_timeout_s": 8.0,
    "transfer_timeout_s": 5.0,
}
"""Of the engines' connectors; short, so that every one of them is met with."""
SLOWER = LIMITS | {"lease_s": 5.0, "prefill_timeout_s": 20.0, "transfer_timeout_s": 8.0}
SAY_EVERY_S, SAMPLE_EVERY_S, LOOK_EVERY_S = 15.0, 5.0, 0.5
WELL_AGAIN_S = 20.0
RETRY_S = 1.0
_KEPT_VIOLATIONS = 40
_GAUGES = (
    *("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting", "quarantined_blocks"),
    *("open_sources", "open_landings", "posts_in_flight"),
)
_SMALL = ("--num-gpu-blocks-override", "1024", "--max-model-len", "8192", "--max-num-batched-tokens", "512")


@dataclass(frozen=True)
class Plan:
    """`spec`: of engines in any split mode; `modes`: a router for each. `minutes`: of trouble. `bound_s`: the routers'
    request deadline. `workers` clients each pause up to `pause_s` after an answer; `leaving`: the share of requests
    whose client goes away at a random moment."""

    spec: DeploymentSpec
    modes: tuple[str, ...]
    minutes: float
    seed: int
    pace: Pace
    bound_s: float
    workers: int = 6
    pause_s: float = 1.5
    leaving: float = 0.15

    @property
    def lease_s(self) -> float:
        return float(self.spec.extra_config["lease_s"])


@dataclass(frozen=True)
class House:
    """What one soak runs on. `links`: prefill engine -> the link that its side channel is reached by. `urls`: of the
    routers, by mode."""

    deployment: Deployment
    ports: Ports
    links: dict[str, Link]
    routers: list[ManagedProcess]
    urls: dict[str, str]


@dataclass
class Soak:
    plan: Plan
    asks: Next
    say: Callable[[str], None]
    cancel: Cancel
    endings: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    by_mode: dict[str, Counter[str]] = field(default_factory=dict)
    slowest_s: float = 0.0
    violations: list[str] = field(default_factory=list)

    def run(self) -> dict[str, Any]:
        """The facts of the run. Raises `LaunchError` and `Stopped`."""
        plan, ports = self.plan, Ports()
        with Deployment(plan.spec, report=self.say, cancel=self.cancel) as deployment:
            links = {
                engine.name: Link(engine.plan.side_port, ports)
                for engine in deployment.engines
                if engine.role == "prefill"
            }
            guard = Guard()
            routers, urls = self._routers(deployment, links, ports, guard)
            try:
                facts = asyncio.run(self._over_links(House(deployment, ports, links, routers, urls)))
            finally:
                end_trees([one.tree for one in routers if one.pid], grace=lambda: 3.0, reap=_reap(routers))
                for router in routers:
                    router.ended()
                guard.close()
                ports.release()
            processes = [*routers, *(engine.process for engine in deployment.engines)]
            shm = self._shm | set().union(*(process.tree.shm for process in processes))
        self.violations += left_running(processes)
        self.violations += [f"{path} was left in shared memory" for path in sorted(shm) if os.path.exists(path)]
        return facts | {"violations": self.violations}

    def _routers(
        self, deployment: Deployment, links: dict[str, Link], ports: Ports, guard: Guard
    ) -> tuple[list[ManagedProcess], dict[str, str]]:
        """One per mode, not started; they know the prefill engines' side channels by their links."""
        plans = [
            replace(engine.plan, side_port=links[engine.name].port) if engine.name in links else engine.plan
            for engine in deployment.engines
        ]
        routers, urls = [], {}
        for mode in self.plan.modes:
            args = ("--request-timeout", f"{self.plan.bound_s:g}")
            spec, port = replace(deployment.spec, mode=mode, router_args=args), ports.free()
            argv = router_command(spec, plans, mode_named(mode), port, deployment.state_dir)
            env = {**os.environ, "PYTHONUNBUFFERED": "1"}
            log = deployment.state_dir.logs / f"router-{mode}.log"
            routers.append(ManagedProcess(f"router-{mode}", argv, env, log, guard))
            urls[mode] = f"http://{LOOPBACK}:{port}"
        return routers, urls

    async def _over_links(self, house: House) -> dict[str, Any]:
        try:
            for link in house.links.values():
                await link.up()
            return await self._soak(house)
        finally:
            for link in house.links.values():
                await link.close()

    async def _soak(self, house: House) -> dict[str, Any]:
        plan, deployment, routers, urls = self.plan, house.deployment, house.routers, house.urls
        for router in routers:
            router.start()
        names = {router.name: url for router, url in zip(routers, urls.values(), strict=True)}
        await asyncio.to_thread(
            wait_healthy, routers, names, timeout_s=60.0, report=self.say, cancel=self.cancel
        )  # they know the engines now
        house.ports.release()
        watch = Watch([*routers, *(engine.process for engine in deployment.engines)])
        faults = plan.spec.engine == "sim"
        draw = random.Random(plan.seed)
        troubles = Troubles(deployment, house.links, plan.pace, faults, draw, self.say)
        self._shm, self._troubles, self._urls = troubles.shm, troubles, urls
        model = deployment.model_name()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, limit=0)) as session:
            await self._well(session, model, 3)
            await asyncio.sleep(plan.lease_s + 1.0)
            before = watch.now()
            begun = time.monotonic()
            stop = asyncio.Event()
            beside = [asyncio.create_task(self._look(deployment, watch, stop, begun))]
            beside += [
                asyncio.create_task(self._client(session, model, draw.random(), stop)) for _ in range(plan.workers)
            ]
            try:
                await self._halves(troubles, begun)
            finally:
                stop.set()
                await asyncio.gather(*beside)
            seconds = time.monotonic() - begun
            self.say("quiet now")
            await self._well(session, model, 3)
        await asyncio.sleep(plan.lease_s + 1.0)
        await self._left(deployment)
        after = watch.now()
        self.violations += [*troubles.violations, *grown(before, after)]
        lives = watch.verdicts()
        self.violations += [
            f"{one['name']} (pid {one['pid']}) grew by {one['rise_mib']} MiB"
            for one in lives
            if one.get("flat") is False
        ]
        return {
            "engine": plan.spec.engine,
            "prefill": plan.spec.prefill,
            "decode": plan.spec.decode,
            "modes": list(plan.modes),
            "seed": plan.seed,
            "seconds": round(seconds, 1),
            "bound_s": plan.bound_s,
            "requests": self.endings.total(),
            "endings": dict(self.endings),
            "endings_by_mode": {mode: dict(counts) for mode, counts in sorted(self.by_mode.items())},
            "errors_by_code": dict(self.codes.most_common()),
            "slowest_s": round(self.slowest_s, 2),
            "troubles": dict(troubles.counts),
            "idle_before": {name: asdict(held) for name, held in before.items()},
            "idle_after": {name: asdict(held) for name, held in after.items()},
            "memory": lives,
        }

    async def _halves(self, troubles: Troubles, begun: float) -> None:
        """One engine of each role survives the first half, the others the second; of one of each, P dies first."""
        names = {
            role: [e.name for e in troubles.deployment.engines if e.role == role] for role in ("prefill", "decode")
        }
        second = {name for of_role in names.values() for name in of_role[1:]} or set(names["prefill"])
        first = {name for of_role in names.values() for name in of_role} - second
        for share, mortal in ((0.5, second), (1.0, first)):
            troubles.mortal = frozenset(mortal)
            self.say(f"from now on {', '.join(sorted(mortal))} may be killed")
            running = asyncio.create_task(troubles.run(begun + share * self.plan.minutes * 60.0))
            while not running.done():
                await asyncio.wait({running}, timeout=0.5)
                if self.cancel.count:
                    running.cancel()
                    await asyncio.wait({running})
                    self.cancel.check()
            running.result()

    async def _client(self, session: aiohttp.ClientSession, model: str, seed: float, stop: asyncio.Event) -> None:
        draw, bound_s = random.Random(seed), self.plan.bound_s
        while not stop.is_set():
            mode = draw.choice(self.plan.modes)
            leave_s = draw.uniform(0.0, 1.0) if draw.random() < self.plan.leaving else 0.0
            how = How(mode, self._urls[mode], model, draw.random() < 0.5, leave_s, bound_s)
            ending = await ask(session, self.asks(), how)
            self._count(ending)
            await asyncio.sleep(draw.uniform(0.0, self.plan.pause_s) + (RETRY_S if ending.kind == "error" else 0.0))

    def _count(self, ending: Ending) -> None:
        self.endings[ending.kind] += 1
        self.by_mode.setdefault(ending.mode, Counter())[ending.kind] += 1
        if ending.kind == "error":
            self.codes[ending.code] += 1
        if ending.kind != "left":
            self.slowest_s = max(self.slowest_s, ending.seconds)
        if ending.kind not in GOOD:
            self._violated(
                f"{ending.kind}: {ending.mode} {ending.transfer_id}, status {ending.status}, {ending.seconds:.1f} s, "
                f"{ending.code} {ending.detail}"
            )

    def _violated(self, text: str) -> None:
        if len(self.violations) < _KEPT_VIOLATIONS:
            self.violations.append(text)
        self.say(f"VIOLATION {text}")

    async def _look(self, deployment: Deployment, watch: Watch, stop: asyncio.Event, begun: float) -> None:
        """Samples, deaths that nobody asked for, a word now and then."""
        said = sampled = begun
        reported: set[int] = set()
        while not stop.is_set():
            now = time.monotonic()
            if now - sampled >= SAMPLE_EVERY_S:
                sampled = now
                await asyncio.to_thread(watch.sample)
            for process in deployment.dead():
                if process.name not in self._troubles.dying and process.pid not in reported:
                    reported.add(process.pid)
                    self._violated(str(process.died("though nobody asked it to")))
            if now - said >= SAY_EVERY_S:
                said = now
                told = ", ".join(f"{count} {kind}" for kind, count in sorted(self.endings.items()))
                self.say(f"{now - begun:6.0f} s: {told}; troubles: {self._troubles.counts.total()}")
            await asyncio.sleep(LOOK_EVERY_S)

    async def _well(self, session: aiohttp.ClientSession, model: str, count: int) -> None:
        """Every mode answers rightly, so often in a row, within moments: the router may need a probe to see it."""
        for mode, url in self._urls.items():
            until, right = time.monotonic() + WELL_AGAIN_S, 0
            while right < count:
                ending = await ask(session, self.asks(), How(mode, url, model, False, 0.0, self.plan.bound_s))
                right = right + 1 if ending.kind == "right" else 0
                if ending.kind not in GOOD or (not right and time.monotonic() > until):
                    return self._violated(f"without trouble, {mode}: {ending}")
        return None

    async def _left(self, deployment: Deployment) -> None:
        """What engines hold though nothing runs."""
        for engine in deployment.engines:
            if not engine.process.running():
                continue
            body = {"model": deployment.model_name(), "prompt": [300], "max_tokens": 1}
            try:  # gauges move with a step
                await asyncio.to_thread(post_json, f"{engine.url}/v1/completions", body, 10.0)
            except EngineError as error:
                self._violated(f"{engine.name} alone: {error}")
            await asyncio.sleep(0.3)
            self.violations += [f"{engine.name} still has {what}" for what in await _holds(engine)]


async def _holds(engine: RunningEngine) -> list[str]:
    rows = await asyncio.to_thread(engine_metrics, engine.url)
    found = [
        f"{name.partition(':')[2]} {value:g}" for name, _, value in rows if name.partition(":")[2] in _GAUGES and value
    ]
    if not rows:
        found.append("no metrics")
    host, port = parse_address(engine.side_channel, "side channel")
    try:
        told = await inquiry.describe(host, port, key=load_key(str(engine.auth_key_file)))
    except PeerUnreachable as error:
        return [*found, str(error)]
    return found + ([f"{told.open_transfers} transfers open"] if told.open_transfers else [])


def _reap(processes: list[ManagedProcess]) -> Callable[[], object]:
    return lambda: [process.poll() for process in processes]


def sim_spec(profile: str, state_dir: Path) -> DeploymentSpec:
    """Two of each role; small pools, so that they are full now and then."""
    return DeploymentSpec(
        mode="push",
        engine="sim",
        profile=profile,
        prefill=2,
        decode=2,
        router=False,
        debug_invariants=True,
        vllm_args=("--enable-faults", *_SMALL),
        extra_config=LIMITS,
        decode_extra_config={"peers": []},
        state_dir=state_dir,
    )


def vllm_spec(model: str, state_dir: Path) -> DeploymentSpec:
    """One of each role. In float32 and without prefix caching: greedy tokens must not hang on rounding, and in bfloat16
    they change with the batch."""
    return DeploymentSpec(
        mode="push",
        engine="vllm",
        model=model,
        dtype="float32",
        router=False,
        debug_invariants=True,
        vllm_args=("--no-enable-prefix-caching",),
        extra_config=SLOWER,
        decode_extra_config={"peers": []},
        state_dir=state_dir,
    )
