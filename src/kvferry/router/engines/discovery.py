"""Engines that come and go by themselves: a source says which there are, the router follows.

A source that can't be read leaves everything as it is, and is asked again. Who is gone from it is drained and removed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from kvferry.errors import ConfigError, KVFerryError, unknown_name
from kvferry.observe.metrics import RouterMetrics
from kvferry.router.config import RouterConfig
from kvferry.router.engines.found import Found, SourceOptions, options_of
from kvferry.router.engines.membership import Membership
from kvferry.router.engines.pool import Role
from kvferry.router.services import Services
from kvferry.router.spec import EngineSpec

log = logging.getLogger("kvferry.router")

DISCOVER = (
    "file:PATH (names both roles), or for one role prefill=dns:NAME:PORT or decode=k8s:NAMESPACE/SERVICE:PORT, with "
    "[,side_channel_port=N][,tp=N][,scheme=https][,interval_s=S]"
)
KINDS = ("file", "dns", "k8s")
AGAIN_S = 1.0


class Discovery(Protocol):
    where: str
    """As the command line says it."""

    async def look(self) -> Found:
        """All engines that there are now. Raises `KVFerryError` if that can't be told."""

    async def wait(self) -> None:
        """Returns when another look is worth it. Raises `KVFerryError`."""

    async def close(self) -> None: ...


def source_of(text: str) -> Discovery:
    """Raises `ConfigError` that names the part and the right spelling."""
    head, _, tail = text.partition("=")
    role: Role | None = "prefill" if head == "prefill" else "decode" if head == "decode" else None
    kind, colon, rest = (tail if role else text).partition(":")
    if kind not in KINDS:
        raise unknown_name(f"--discover {text!r}: source", kind, KINDS)
    where, *parts = rest.split(",")
    if not colon or not where:
        raise ConfigError(f"--discover {text!r}: nothing after {kind!r}", hint=f"expected {DISCOVER}")
    if kind == "file":
        if role or parts:
            hint = "--discover file:PATH"
            raise ConfigError(f"--discover {text!r}: a file names roles and options itself", hint=hint)
        from kvferry.router.engines.discover_file import FileSource

        try:
            return FileSource(text, where)
        except ConfigError as error:
            raise ConfigError(f"--discover {text!r}: {error.message}", hint=error.hint) from None
    if role is None:
        raise ConfigError(f"--discover {text!r}: which role?", hint=f"prefill={text} or decode={text}")
    options = options_of(f"--discover {text!r}", parts)
    return _dns(text, role, where, options) if kind == "dns" else _k8s(text, role, where, options)


def _dns(text: str, role: Role, where: str, options: SourceOptions) -> Discovery:
    from kvferry.router.engines.discover_dns import DnsSource

    return DnsSource(text, role, where, options)


def _k8s(text: str, role: Role, where: str, options: SourceOptions) -> Discovery:
    from kvferry.router.engines.discover_k8s import KubernetesSource

    return KubernetesSource(text, role, where, options)


class Follower:
    """Keeps the router's engines as one source says. `spawn`: runs a coroutine beside."""

    def __init__(
        self,
        source: Discovery,
        members: Membership,
        metrics: RouterMetrics,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._source = source
        self._members = members
        self._metrics = metrics
        self._spawn = spawn
        self._mine: dict[str, tuple[EngineSpec, Role]] = {}
        self._going: set[str] = set()
        self._refused: dict[str, str] = {}
        self._wanted: dict[str, tuple[EngineSpec, Role]] = {}

    @property
    def where(self) -> str:
        return self._source.where

    async def follow(self) -> None:
        """Until it is cancelled."""
        said = ""
        try:
            while True:
                try:
                    found = await self._source.look()
                    self._wanted = {spec.url: (spec, role) for role, specs in found.items() for spec in specs}
                    self.apply()
                    self._metrics.discoveries.labels(self.where, "ok").inc()
                    if said:
                        log.info("%s: can be read again", self.where)
                    said = ""
                    await self._source.wait()
                except KVFerryError as error:
                    self._metrics.discoveries.labels(self.where, "failed").inc()
                    if str(error) != said:
                        log.warning("%s: the engines known from it stay: %s", self.where, error)
                    said = str(error)
                    await asyncio.sleep(AGAIN_S)
        finally:
            await self._source.close()

    def apply(self) -> None:
        """Bring what is there towards what is wanted."""
        for url in [url for url, is_now in self._mine.items() if self._wanted.get(url) != is_now]:
            del self._mine[url]
            self._going.add(url)
            self._spawn(self._remove(url))
        for url, (spec, role) in self._wanted.items():
            if url in self._mine:
                continue
            try:
                self._members.add(spec, role, self.where)
                self._mine[url] = (spec, role)
                self._refused.pop(url, None)
            except KVFerryError as error:
                if url not in self._going and self._refused.get(url) != str(error):
                    log.warning("%s: %s", self.where, error)
                self._refused[url] = str(error)

    async def _remove(self, url: str) -> None:
        try:
            if self._members.find(url) is not None:
                await self._members.remove(url)
        finally:
            self._going.discard(url)
        self.apply()  # it may be wanted again, under another role or as another


def followers(config: RouterConfig, services: Services) -> list[Follower]:
    """One for each source. Raises `ConfigError`."""
    return [Follower(source_of(text), services.members, services.metrics, services.spawn) for text in config.discover]
