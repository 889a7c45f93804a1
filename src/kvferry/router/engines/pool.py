"""The engines: what each is, whether it can take work, and why not.

Owner: the event loop. One task per engine probes it: `/health` each interval; the side channel (connector kvferry) and
`/v1/models` when it comes up and then each longer interval. An engine is ready when all of them are right.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from kvferry.auth import AuthKey, load_key
from kvferry.errors import CompatError, KeyRefused, KVFerryError, PeerUnreachable
from kvferry.observe.metrics import RouterMetrics
from kvferry.protocol.messages import Description
from kvferry.router.choice.ask import Ask
from kvferry.router.choice.kv_events import listen
from kvferry.router.choice.policy import MATCHING, Policy, Snapshot, choose, eligible, known_models
from kvferry.router.choice.rank import Rank
from kvferry.router.choice.room import Room
from kvferry.router.choice.sessions import Sessions
from kvferry.router.config import RouterConfig
from kvferry.router.engines.breaker import BreakerSettings
from kvferry.router.engines.dialect import Dialect
from kvferry.router.engines.outliers import Outliers, OutlierSettings
from kvferry.router.engines.standing import Leg, Standing
from kvferry.router.engines.survey import Build, survey
from kvferry.router.http.upstream import Upstream
from kvferry.router.replies import Refusal
from kvferry.router.spec import DEFAULT_SIDE_CHANNEL_PORT, EngineSpec
from kvferry.transfer import inquiry

log = logging.getLogger("kvferry.router")

Role = Literal["prefill", "decode"]
PROBE_TIMEOUT_S = 2.0
UNREADY_INTERVAL_S = 0.25
JUDGE_INTERVAL_S = 1.0
PREFIX_TOKENS = 400_000
"""Of an engine that tells nothing of its cache: 50 GB of KV at 128 KiB per token."""
SILENT_PROBES = 3
"""An engine that refuses or answers wrongly takes no request from then on; one that says nothing, after so many."""
CANNOT: dict[Role, str] = {"prefill": "consumer", "decode": "producer"}


class Engine:
    """One engine. Changed by its probe task, and by `suspect`. `key`: of its side channel. `source`: who named it."""

    def __init__(
        self,
        spec: EngineSpec,
        role: Role,
        key: AuthKey | None = None,
        prefix_tokens: int = 0,
        standing: Standing | None = None,
        source: str = "command line",
    ) -> None:
        self.standing = standing or Standing(BreakerSettings(), OutlierSettings())
        self.source = source
        self.draining = False
        """Takes no new request; what runs there runs on."""
        self.leaving = False
        """And goes when the last has ended."""
        self.idle = asyncio.Event()
        self.idle.set()
        self.spec = spec
        self._prefix_tokens = prefix_tokens
        self.ranks: list[Rank] = []
        self._listeners: list[asyncio.Task[None]] = []
        self.descriptions: list[Description] = []
        self.set_ranks(spec.dp or 1)
        self.key = key
        self.role: Role = role
        self.ready = False
        self.reason = "not probed yet"
        self.description: Description | None = None
        self.models: dict[str, Any] | None = None
        self._names: tuple[dict[str, Any] | None, frozenset[str] | None] = (None, None)
        self.in_flight = 0
        self.kick = asyncio.Event()
        self.described_at = -float("inf")

    @property
    def url(self) -> str:
        return self.spec.url

    @property
    def load(self) -> tuple[int, int] | None:
        """Transfers open on its first rank, and bytes that wait there to be written, when it was described last; None
        while it isn't ready, or has no side channel."""
        about = self.description if self.ready else None
        return None if about is None else (about.open_transfers, about.backlog_bytes)

    @property
    def takes(self) -> bool:
        """A new request may be sent there."""
        return self.ready and not self.draining and self.standing.allows

    @property
    def why_not(self) -> str:
        """Empty if it may."""
        return self.reason or ("it is draining" if self.draining else self.standing.why_not)

    def begin(self) -> Leg:
        """A request goes there; it is in flight until `end`."""
        self.in_flight += 1
        self.idle.clear()
        return self.standing.begin()

    def end(self, leg: Leg) -> None:
        leg.end()
        self.in_flight -= 1
        if self.in_flight == 0:
            self.idle.set()

    @property
    def names(self) -> frozenset[str] | None:
        """Of its models; None where it didn't say."""
        models, names = self._names
        if models is not self.models:
            names = None if self.models is None else frozenset(self.models)
            self._names = (self.models, names)
        return names

    @property
    def max_model_len(self) -> int | None:
        """The least that it told of its models; None where it told none."""
        told = [one.get("max_model_len") for one in (self.models or {}).values() if isinstance(one, dict)]
        return min((limit for limit in told if isinstance(limit, int)), default=None)

    def snapshot(self, ask: Ask, last: str = "", *, matching: bool = True) -> Snapshot:
        """`matching`: how much of its prefix is here matters. `last`: the URL where its session was last."""
        adapter = self._adapter(ask)
        loads = [rank.load.prefill if self.role == "prefill" else rank.load.held for rank in self.ranks]
        return Snapshot(
            url=self.url,
            ready=self.takes,
            models=self.names,
            in_flight=self.in_flight,
            tokens=sum(loads) // len(loads),
            full=self.role == "decode" and all(rank.full(ask, adapter) for rank in self.ranks),
            matched=max(rank.matched(ask, adapter) for rank in self.ranks) if matching else 0,
            sticky=bool(last) and last == self.url,
            topology=self.spec.topology,
        )

    # -- data-parallel ranks

    def set_ranks(self, count: int) -> None:
        """Their number can only grow: legs may be running on each."""
        while len(self.ranks) < count:
            self.ranks.append(Rank(self._prefix_tokens or PREFIX_TOKENS, bool(self.spec.events_host)))

    def built(self, build: Build | None) -> None:
        """What its metrics tell; what the command line says goes before it. From here on its KV events are read."""
        if build is not None:
            self.set_ranks(self.spec.dp or build.ranks)
            for rank in self.ranks:
                rank.caches, rank.kv_tokens = build.caches, build.prefix_tokens
                if build.prefix_tokens and not self._prefix_tokens:
                    rank.sent.resize(build.prefix_tokens)
        for number, rank in enumerate(self.ranks[len(self._listeners) :], len(self._listeners)):
            if rank.blocks is not None:
                reading = listen(self.spec.events_host, self.spec.events_port + number, rank.blocks)
                self._listeners.append(asyncio.create_task(reading, name=f"KV events {self.url}"))

    async def close(self) -> None:
        """Its KV events are read no more."""
        for task in self._listeners:
            task.cancel()
        await asyncio.gather(*self._listeners, return_exceptions=True)
        self._listeners.clear()

    def side_port(self, number: int) -> int:
        """Of a data-parallel rank's first tensor-parallel rank: ours keep a port for each of these, vLLM's one."""
        width = 1 if self.description is None else self.description.tp_size
        return self.spec.side_port + number * width

    def matched(self, number: int, ask: Ask) -> int:
        """Leading tokens of the prompt that this rank is thought to hold."""
        return self.ranks[number].matched(ask, self._adapter(ask))

    def _adapter(self, ask: Ask) -> str:
        entry = (self.models or {}).get(ask.model or "")
        return ask.model or "" if isinstance(entry, dict) and entry.get("parent") else ""

    def pin(self, ask: Ask) -> int:
        """The data-parallel rank that has the least to do when it takes this."""
        if len(self.ranks) == 1:
            return 0
        loads = [rank.load.prefill + rank.load.held for rank in self.ranks]
        numbers = range(len(loads))
        return min(numbers, key=lambda n: (loads[n] - self.matched(n, ask), self.ranks[n].load.requests))


class Pool:
    """Raises `ConfigError` for a key that can't be read."""

    def __init__(
        self,
        config: RouterConfig,
        dialect: Dialect | None,
        upstream: Upstream,
        metrics: RouterMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._metrics = metrics or RouterMetrics()
        self._clock = clock
        self.outliers: dict[Role, Outliers] = {
            "prefill": Outliers(config.outliers),
            "decode": Outliers(config.outliers),
        }
        self._judged_at: dict[Role, float] = {}
        self._dialect = dialect
        self._upstream = upstream
        prefill = () if config.colocated else config.prefill
        self._key = load_key(config.auth_key_file) if dialect is not None and dialect.side_channel else None
        self.engines: dict[Role, list[Engine]] = {
            "prefill": [self.make(spec, "prefill") for spec in prefill],
            "decode": [self.make(spec, "decode") for spec in config.decode],
        }
        self.sessions = Sessions(config.session_ttl_s)
        self.room = Room()
        """Of decode engines, for who is bound late."""
        self.told_freed: Callable[[], None] = lambda: None
        """Called when an engine has less to do than before."""
        self.fits: Callable[[Engine], Awaitable[None]] | None = None
        """Asked of each engine before it is ready; raises `KVFerryError` if it mustn't be."""
        self._turns: dict[Role, int] = {"prefill": 0, "decode": 0}
        self._started = False
        self._tasks: dict[Engine, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def start(self) -> None:
        self._started = True
        for engine in self.all():
            self._attend(engine)

    async def close(self) -> None:
        tasks = [*self._tasks.values(), *self._ending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *(engine.close() for engine in self.all()), return_exceptions=True)

    # -- members; `membership.py` says who comes and goes

    def make(self, spec: EngineSpec, role: Role, source: str = "command line") -> Engine:
        config = self._config
        standing = Standing(config.breaker, config.outliers, self._clock, lambda: self._judge(role))
        return Engine(spec, role, self._key, config.prefix_tokens, standing, source)

    def enter(self, engine: Engine) -> None:
        self.engines[engine.role].append(engine)
        if self._started:
            self._attend(engine)
        self._changed.set()

    def leave(self, engine: Engine) -> None:
        self.engines[engine.role].remove(engine)
        self.outliers[engine.role].forget(engine.url)
        task = self._tasks.pop(engine, None)
        if task is not None:
            task.cancel()
            ending = asyncio.create_task(engine.close())
            for one in (task, ending):
                self._ending.add(one)
                one.add_done_callback(self._ending.discard)
        self._changed.set()

    def _attend(self, engine: Engine) -> None:
        self._tasks[engine] = asyncio.create_task(self._watch(engine), name=f"probe {engine.url}")

    def _judge(self, role: Role) -> None:
        """Requests have had news of some engine: whether one does far worse than the others, once a second."""
        now = self._clock()
        if now - self._judged_at.get(role, -JUDGE_INTERVAL_S) < JUDGE_INTERVAL_S:
            return
        self._judged_at[role] = now
        samples = {engine.url: engine.standing.sample() for engine in self.engines[role] if engine.takes}
        for url, reason in self.outliers[role].judge(now, samples).items():
            log.warning("%s engine %s is left out for %.0f s: %s", role, url, self.ejected_for(role, url), reason)
            self._metrics.ejections.labels(role, url).inc()

    def ejected_for(self, role: Role, url: str) -> float:
        """Seconds that it is left out for yet, for doing worse than the others; 0: it isn't."""
        return self.outliers[role].ejected_for(url, self._clock())

    def all(self) -> list[Engine]:
        return [*self.engines["prefill"], *self.engines["decode"]]

    @property
    def has_side_channel(self) -> bool:
        return self._dialect is not None and self._dialect.side_channel

    @property
    def roles(self) -> tuple[Role, ...]:
        return ("decode",) if self._dialect is None else ("prefill", "decode")

    def missing(self) -> list[Role]:
        return [role for role in self.roles if not any(engine.takes for engine in self.engines[role])]

    async def until_ready(self) -> None:
        """Returns when every role has a ready engine."""
        while self.missing():
            await self.change()

    async def change(self) -> None:
        """Returns when a probe or a request has had something new to say of an engine."""
        self._changed.clear()
        await self._changed.wait()

    # -- choosing

    def freed(self) -> None:
        """An engine has less to compute, or to hold, than before."""
        self.told_freed()
        self.room.freed()

    def has_room(self, ask: Ask) -> bool:
        """Some decode engine that could take it would not have to wait for blocks; so, too, if there is none."""
        able = self.able("decode", ask)
        return not able or not all(engine.full for engine in able)

    def require(self, *, local_prefill: bool) -> None:
        """Raises `Refusal` 503 naming every role that has no ready engine, and what its engines said."""
        missing = [role for role in self.missing() if not (role == "prefill" and local_prefill)]
        if missing:
            said = "; ".join(no_engine(role, self.engines[role]).message for role in missing)
            raise Refusal(503, f"no_{missing[0]}_engine", said)

    def pick(self, role: Role, ask: Ask | str | None, *, avoid: frozenset[str] = frozenset()) -> Engine:
        """By the role's policy; `ask` may be just a model's name. `avoid`: URLs that are taken only if no other can be.
        Raises `Refusal` 503 naming the role and what each of its engines said."""
        if not isinstance(ask, Ask):
            ask = Ask(model=ask)
        matching = self._policy(role) in MATCHING
        if avoid and self.able(role, others := msgspec.structs.replace(ask, avoid=ask.avoid | avoid)):
            chosen = self.peek(role, others, matching=matching)
        else:
            chosen = self.peek(role, ask, matching=matching)
        if not avoid:  # a second try takes nobody's turn, or of two engines one would always be first
            self._turns[role] += 1
        self.sessions.keep(ask.session, role, chosen.url)
        return next(engine for engine in self.engines[role] if engine.url == chosen.url)

    def peek(self, role: Role, ask: Ask, *, matching: bool = True) -> Snapshot:
        """What `pick` would take: one that doesn't do worse than the others, where there is one. Raises `Refusal`."""
        snapshots, turn = self._snapshots(role, ask, matching), self._turns[role]
        ejected = frozenset(engine.url for engine in self.engines[role] if self.ejected_for(role, engine.url))
        for one in (msgspec.structs.replace(ask, avoid=ask.avoid | ejected), ask) if ejected else (ask,):
            chosen = choose(self._policy(role), snapshots, one, turn)
            if chosen is not None:
                return chosen
        raise no_engine(role, self.engines[role], ask.avoid)

    def able(self, role: Role, ask: Ask) -> list[Snapshot]:
        """The engines that could take it."""
        return eligible(self._snapshots(role, ask), ask)

    def _policy(self, role: Role) -> Policy:
        return self._config.prefill_policy if role == "prefill" else self._config.decode_policy

    def _snapshots(self, role: Role, ask: Ask, matching: bool = True) -> list[Snapshot]:
        last = self.sessions.last(ask.session, role) if ask.session else ""
        return [engine.snapshot(ask, last, matching=matching) for engine in self.engines[role]]

    def known(self, model: str | None) -> str | None:
        """`model` where both sides serve it. None otherwise: then any engine says itself that it doesn't."""
        names = self.model_names()
        return model if model is None or names is None or model in names else None

    def model_names(self) -> frozenset[str] | None:
        names: frozenset[str] | None = None
        for role in self.roles:
            told = [(engine.takes, engine.names) for engine in self.engines[role]]
            if not any(takes for takes, _ in told):
                continue
            served = known_models(told)
            if served is not None:
                names = served if names is None else names & served
        return names

    def model_entries(self) -> list[Any]:
        """As the decode engines list them, those that prefill engines serve too."""
        names = self.model_names()
        entries: dict[str, Any] = {}
        for engine in self.engines["decode"]:
            if engine.ready:
                for name, entry in (engine.models or {}).items():
                    if names is None or name in names:
                        entries.setdefault(name, entry)
        return list(entries.values())

    # -- probing

    def suspect(self, engine: Engine, reason: str) -> None:
        """A request found it gone: no new one until a probe says otherwise."""
        self._set(engine, reason, "not reachable")
        self.refresh(engine)

    def refresh(self, engine: Engine) -> None:
        """Ask everything again, now."""
        engine.described_at = -float("inf")
        engine.kick.set()

    def recheck(self, reason: str) -> None:
        """None takes a request before it has been asked everything again."""
        for engine in self.all():
            if engine.ready:
                engine.ready, engine.reason = False, reason
            self.refresh(engine)
        self._changed.set()

    def _set(self, engine: Engine, reason: str, what: str) -> None:
        """`reason` "" is ready; `what` sums it up for the log."""
        if engine.ready != (not reason) or engine.reason != reason:
            if reason:
                again = f"{what}; asked again every {self._unready_interval_s:g} s"
                log.warning("%s engine %s %s: %s", engine.role, engine.url, again, reason)
            else:
                log.info("%s engine %s: %s", engine.role, engine.url, what)
        engine.ready, engine.reason = not reason, reason
        self._changed.set()
        self.room.freed()

    @property
    def _unready_interval_s(self) -> float:
        return min(self._config.probe_interval_s, UNREADY_INTERVAL_S)

    async def _watch(self, engine: Engine) -> None:
        silent = 0
        while True:
            engine.kick.clear()
            life = engine.description.life if engine.description is not None else None
            try:
                await self._probe(engine)
                if not engine.ready or (engine.description is not None and engine.description.life != life):
                    engine.standing.renewed()
                self._set(engine, "", "ready")
                silent = 0
            except KVFerryError as error:
                engine.described_at = -float("inf")
                silent += 1
                if engine.ready and silent < SILENT_PROBES and isinstance(error.__context__, TimeoutError):
                    continue  # it, or this process, or the machine may be busy: asked again at once
                broken = isinstance(error, CompatError | KeyRefused)
                self._set(engine, str(error), "not usable" if broken else "not reachable")
            interval = self._config.probe_interval_s if engine.ready else self._unready_interval_s
            try:
                async with asyncio.timeout(interval):
                    await engine.kick.wait()
            except TimeoutError:
                pass

    async def _probe(self, engine: Engine) -> None:
        health = await self._upstream.get(engine.url, "/health", self._config.api_key, PROBE_TIMEOUT_S)
        _expect(engine, "/health", health.status)
        now = time.monotonic()
        if now - engine.described_at < self._config.describe_interval_s:
            return
        if not engine.ready:
            engine.built(await survey(engine.url, self._upstream, self._config.api_key))
        if self._dialect is not None and self._dialect.side_channel:
            try:
                await self._describe_ranks(engine)
            except KVFerryError as error:
                error.hint = "; ".join(filter(None, (_defaulted(engine.spec), error.hint)))
                raise
        if self.fits is not None:
            await self.fits(engine)
        engine.models = await self._models(engine)
        engine.described_at = now

    async def _describe_ranks(self, engine: Engine) -> None:
        """Of each data-parallel rank. One that lives anew has an empty cache."""
        found = [await self._describe(engine, 0)]
        engine.description = found[0]
        for number in range(1, len(engine.ranks)):
            found.append(await self._describe(engine, number))
        for rank, old, new in zip(engine.ranks, engine.descriptions, found, strict=False):
            if old.life != new.life:
                rank.forget()
        engine.descriptions = found

    async def _describe(self, engine: Engine, number: int) -> Description:
        spec, port = engine.spec, engine.side_port(number)
        suffix = f"_dp{number}" if len(engine.ranks) > 1 else ""
        about = await inquiry.describe(spec.side_host, port, PROBE_TIMEOUT_S, engine.key)
        if CANNOT[engine.role] in about.role:
            raise CompatError(
                f"{engine.role} engine {engine.url} runs KVFerryConnector as {about.role}",
                hint="swap --prefill and --decode, or start it with the other kv_role",
            )
        for name, told, found in (
            ("engine_id", spec.engine_id and spec.engine_id + suffix, about.engine_id),
            ("tp", spec.tp, about.tp_size),
        ):
            if told and told != found:
                raise CompatError(
                    f"{engine.role} engine {engine.url}: told {name}={told}, its side channel says {found}",
                    hint=f"is {spec.side_host}:{port} the side channel of that engine?",
                )
        return about

    async def _models(self, engine: Engine) -> dict[str, Any] | None:
        answer = await self._upstream.get(engine.url, "/v1/models", self._config.api_key, PROBE_TIMEOUT_S)
        if answer.status == 404:
            return None
        _expect(engine, "/v1/models", answer.status)
        try:
            return {entry["id"]: entry for entry in json.loads(answer.body)["data"]}
        except (ValueError, KeyError, TypeError):
            raise PeerUnreachable(f"{engine.url}/v1/models answered no list of models") from None


def _defaulted(spec: EngineSpec) -> str:
    """That the side channel asked is the default one, for an error; "" where another was named."""
    if (spec.side_host, spec.side_port) != (urlsplit(spec.url).hostname, DEFAULT_SIDE_CHANNEL_PORT):
        return ""
    address = inquiry.endpoint(spec.side_host, spec.side_port).removeprefix("tcp://")
    return f"asked its side channel at {address}, the default: side_channel=HOST:PORT sets it"


def _expect(engine: Engine, route: str, status: int) -> None:
    if status in (401, 403):
        raise PeerUnreachable(f"{engine.url}{route} answered {status}", hint="set --api-key to the engine's key")
    if status != 200:
        raise PeerUnreachable(f"{engine.url}{route} answered {status}")


def no_engine(role: Role, engines: list[Engine], avoid: frozenset[str] = frozenset()) -> Refusal:
    def why(engine: Engine) -> str:
        return engine.why_not or ("was tried already" if engine.url in avoid else "does not serve this model")

    said = ", ".join(f"{engine.url}: {why(engine)}" for engine in engines)
    return Refusal(503, f"no_{role}_engine", f"no {role} engine is ready: {said or 'none is known'}")
