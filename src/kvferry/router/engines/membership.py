"""Engines that come, go, rest and change sides while the router runs.

Owner: the event loop. Whoever goes is drained first: it gets no new request, and what runs there ends as it would.
"""

from __future__ import annotations

import asyncio
import logging

from kvferry.errors import CompatError, ConfigError
from kvferry.observe.metrics import RouterMetrics
from kvferry.router.config import RouterConfig
from kvferry.router.engines.pool import CANNOT, Engine, Pool, Role
from kvferry.router.replies import Refusal
from kvferry.router.spec import EngineSpec

log = logging.getLogger("kvferry.router")


class Membership:
    """`timeout_s` None: the configuration's `drain_timeout_s`."""

    def __init__(self, config: RouterConfig, pool: Pool) -> None:
        self._config = config
        self._pool = pool

    def find(self, url: str) -> Engine | None:
        return next((engine for engine in self._pool.all() if engine.url == url.rstrip("/")), None)

    def get(self, url: str) -> Engine:
        """Raises `Refusal` 404 that names those there are."""
        engine = self.find(url)
        if engine is None:
            known = ", ".join(engine.url for engine in self._pool.all()) or "none"
            raise Refusal(404, "unknown_engine", f"no engine has the url {url!r} (known: {known})", param="url")
        return engine

    def add(self, spec: EngineSpec, role: Role, source: str) -> Engine:
        """It takes requests when a probe found it well. One that was about to go, unchanged, stays. Raises
        `ConfigError` for what can't be, `Refusal` 409 for a url that is known."""
        known = self.find(spec.url)
        if known is not None and known.leaving and (known.spec, known.role) == (spec, role):
            known.leaving = known.draining = False
            return known
        if known is not None:
            text = f"engine {spec.url} is known already, as {known.role} engine from {known.source}"
            raise Refusal(409, "engine_known", text, param="url", hint="remove it first")
        self._check(spec, role)
        engine = self._pool.make(spec, role, source)
        self._pool.enter(engine)
        log.info("%s engine %s: added from %s", role, spec.url, source)
        return engine

    async def drain(self, url: str, timeout_s: float | None = None) -> bool:
        """No new request goes there; True when the last one has ended, False after so long. Raises `Refusal` 404."""
        engine = self.get(url)
        engine.draining = True
        log.info("%s engine %s: draining, %d requests run there", engine.role, engine.url, engine.in_flight)
        return await self._idle(engine, timeout_s)

    def undrain(self, url: str) -> Engine:
        """It takes requests again; of one that was about to go: it stays. Raises `Refusal` 404."""
        engine = self.get(url)
        engine.draining = engine.leaving = False
        log.info("%s engine %s: takes requests again", engine.role, engine.url)
        return engine

    async def remove(self, url: str, timeout_s: float | None = None) -> bool:
        """Drain it, then forget it; after so long also if requests run there yet, which then run on: False. Raises
        `Refusal` 404."""
        engine = self.get(url)
        engine.leaving = True
        drained = await self.drain(url, timeout_s)
        if engine.leaving and engine in self._pool.all():
            self._pool.leave(engine)
            log.info("%s engine %s: removed, %d requests run there", engine.role, engine.url, engine.in_flight)
        return drained

    async def set_role(self, url: str, role: Role, timeout_s: float | None = None) -> Engine:
        """Drain it, then take it in under the other role. Raises `Refusal` 404; 409 if it isn't idle after so long, and
        `CompatError` or `ConfigError` at once if it can't have that role: it then is what it was."""
        engine = self.get(url)
        if engine.role == role:
            return engine
        self._check(engine.spec, role)
        about = engine.description
        if about is not None and CANNOT[role] in about.role:
            hint = "start it with kv_role kv_both, which allows either"
            raise CompatError(f"{url} runs KVFerryConnector as {about.role} and can't be a {role} engine", hint=hint)
        was = engine.draining
        if not await self.drain(url, timeout_s):
            engine.draining = was
            text = f"{engine.in_flight} requests run on {url} yet; it stays {engine.role} engine"
            raise Refusal(409, "not_drained", text, hint="drain it with a longer timeout_s first")
        if engine.leaving or engine not in self._pool.all():
            raise Refusal(409, "engine_leaves", f"engine {url} is being removed")
        self._pool.leave(engine)
        return self.add(engine.spec, role, engine.source)

    async def _idle(self, engine: Engine, timeout_s: float | None) -> bool:
        try:
            async with asyncio.timeout(self._config.drain_timeout_s if timeout_s is None else timeout_s):
                await engine.idle.wait()
        except TimeoutError:
            return engine.idle.is_set()
        return True

    def _check(self, spec: EngineSpec, role: Role) -> None:
        if role == "decode":
            return
        if self._config.colocated:
            raise ConfigError(f"engine {spec.url}: colocated serving takes no prefill engine")
        self._config.check_prefill(spec)


def show(metrics: RouterMetrics, pool: Pool) -> None:
    """Standing and membership of each engine, as of now; nothing of engines that went."""
    for gauge in (metrics.cb_state, metrics.ejected, metrics.draining):
        gauge.clear()
    for engine in pool.all():
        labels = (engine.role, engine.url)
        metrics.cb_state.labels(*labels).set(engine.standing.state)
        metrics.ejected.labels(*labels).set(pool.ejected_for(engine.role, engine.url) > 0)
        metrics.draining.labels(*labels).set(engine.draining)
    metrics.tasks.set(len(asyncio.all_tasks()))
