"""The render workers: who is well, who has the fewest sessions, and whether all split an answer alike.

Owner: the event loop. One task per worker asks for its settings each interval, which shows that it lives, what it
renders with, and, behind a shared address, who it is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvferry.errors import CompatError, PeerUnreachable
from kvferry.router.config import RouterConfig
from kvferry.router.http.upstream import Upstream
from kvferry.router.render.answers import Final, Full, Opened, RenderUnavailable, WorkerLost
from kvferry.router.render.client import Client
from kvferry.router.render.metrics import RenderMetrics
from kvferry.router.render.settings import Told, agree, ask
from kvferry.router.render.worker import Worker, by_load, own_address

log = logging.getLogger("kvferry.router")

UNREADY_INTERVAL_S = 0.25
SILENT_PROBES = 3
"""A worker may be busy for a moment; one that refuses a connection is gone at once."""
MOST_LOSSES = 2
"""Workers that one request may take along: one that kills or blocks whoever renders it must end."""
FORGET_S = 30.0
"""A worker behind a shared address that was silent for so long has been replaced by another."""


class Tier:
    """`changed`: called when what the workers render with has become known, or is another."""

    def __init__(
        self,
        config: RouterConfig,
        upstream: Upstream,
        metrics: RenderMetrics,
        changed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._upstream, self.metrics = config, upstream, metrics
        self.changed = changed
        self._clock = clock
        self.client = Client(upstream, config)
        self.workers = [Worker(url) for url in config.render]
        self._doors: set[str] = set()
        """Shared addresses: a worker asked there named another of its own."""
        self._told: Told | None = None
        self._turn = 0
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._ended: set[asyncio.Task[None]] = set()
        self._kicks: dict[Worker, asyncio.Event] = {}
        self._news = asyncio.Event()

    @property
    def settings(self) -> Told | None:
        """Of all workers that are well, or were last: one stands for those that agree with it."""
        return self._told

    @property
    def ready(self) -> bool:
        return any(one.takes for one in self.workers)

    async def until_ready(self) -> None:
        while not self.ready:
            self._news.clear()
            await self._news.wait()

    def start(self) -> None:
        for worker in self.workers:
            self._attend(worker)

    async def close(self) -> None:
        tasks = [*self._tasks.values(), *self._ended]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- a session

    async def open(
        self,
        raw: bytes,
        headers: Mapping[str, str],
        avoid: frozenset[str] = frozenset(),
        like: object | None = None,
        losses: int = 0,
    ) -> tuple[Opened | Final, Worker]:
        """On the least loaded worker that takes it. Raises `RenderUnavailable`; `Refusal` 429 if all are full.

        `avoid`: addresses of workers that were lost. `like`: settings that the worker's must agree with. `losses`:
        workers that had it and are lost. The session counts on the worker that comes back, until `release`.
        """
        said: list[str] = []
        full: Full | None = None
        for worker in self.able():
            if worker.url in avoid:
                continue
            try:
                agree(worker.url, worker.settings, [("the worker that began this answer", like)])
            except CompatError as error:
                said.append(str(error))
                continue
            worker.sessions += 1
            kept = False
            begun = self._clock()
            try:
                answer = await self.client.open(worker.url, raw, headers)
                kept = isinstance(answer, Opened)
                self.metrics.opens.labels("open" if kept else "done").inc()
                self.metrics.opening.observe(self._clock() - begun)
                return answer, worker
            except WorkerLost as lost:
                self.metrics.opens.labels("failed").inc()
                said.append(f"{worker.url}: {lost}")
                self.suspect(worker, str(lost))
                losses += lost.reached
                if losses >= MOST_LOSSES:
                    raise RenderUnavailable(f"{losses} render workers were lost over it: {'; '.join(said)}") from None
            except Full as refusal:
                self.metrics.opens.labels("full").inc()
                full = refusal
            finally:
                if not kept:
                    worker.sessions -= 1
        if full is not None:
            raise full
        raise RenderUnavailable(f"no render worker can be used: {'; '.join(said) or self.why_not}")

    def release(self, worker: Worker) -> None:
        worker.sessions -= 1

    def leave(self, opened: Opened, headers: Mapping[str, str]) -> None:
        """A session that went on elsewhere is deleted, in a task of its own: its worker may live."""
        self._end(asyncio.create_task(self.client.delete(opened, headers), name=f"leave {opened.session}"))

    def suspect(self, worker: Worker, reason: str) -> None:
        """A request found it gone."""
        if worker.ready:
            log.warning("render worker %s not usable: %s", worker.url, reason)
        worker.ill(reason, self._clock())
        if worker in self._kicks:
            self._kicks[worker].set()

    def at(self, url: str) -> Worker | None:
        return next((one for one in self.workers if one.url == url), None)

    def able(self) -> list[Worker]:
        """Those that may be asked, the least loaded first."""
        self._turn += 1
        return by_load(self.workers, frozenset(self._doors), self._turn)

    @property
    def why_not(self) -> str:
        return "; ".join(f"{one.url}: {one.reason}" for one in self.workers if not one.takes) or "none is left"

    def facts(self) -> list[dict[str, Any]]:
        """For people: each worker in a few words. Without the shared addresses whose workers are known."""
        behind = {one.door for one in self.workers}
        return [
            {
                "url": one.url,
                "ready": one.takes,
                "reason": one.reason,
                "sessions": one.sessions,
            }
            for one in self.workers
            if not (one.url in self._doors and one.url in behind)
        ]

    def show(self) -> None:
        """Into the gauges, as of now."""
        self.metrics.health.clear()
        self.metrics.sessions.clear()
        for one in self.facts():
            self.metrics.health.labels(one["url"]).set(one["ready"])
            self.metrics.sessions.labels(one["url"]).set(one["sessions"])

    # -- probing

    def _attend(self, worker: Worker) -> None:
        self._kicks[worker] = asyncio.Event()
        self._tasks[worker] = asyncio.create_task(self._watch(worker), name=f"probe {worker.url}")

    async def _watch(self, worker: Worker) -> None:
        silent = 0
        while not self._forgotten(worker):
            kick = self._kicks[worker]
            kick.clear()
            try:
                told = await ask(worker.url, self._upstream, self._config.api_key)
                silent = 0
                self._learn(worker, told)
            except PeerUnreachable as error:
                silent += 1
                if not (worker.ready and silent < SILENT_PROBES and isinstance(error.__context__, TimeoutError)):
                    self.suspect(worker, error.message)
            interval = self._config.probe_interval_s
            try:
                async with asyncio.timeout(interval if worker.ready else min(interval, UNREADY_INTERVAL_S)):
                    await kick.wait()
            except TimeoutError:
                pass
        self._drop(worker)

    def _learn(self, worker: Worker, told: Told) -> None:
        try:
            agree(worker.url, told, self._compared(worker))
        except CompatError as error:
            if not worker.unusable:
                log.error("render worker %s not usable: %s", worker.url, error)
            worker.refused(str(error))
            return
        if not worker.ready:
            log.info("render worker %s: ready", worker.url)
        worker.unusable = False
        worker.settings = told
        worker.well()
        self._news.set()
        try:
            own = own_address(told.worker, worker.url) if told.worker else worker.url
        except ValueError:
            own = worker.url
        if own != worker.url and not worker.door:
            self._doors.add(worker.url)
            if self.at(own) is None:
                found = Worker(own, door=worker.url)
                found.settings = told
                found.well()
                self.workers.append(found)
                log.info("render worker %s: found behind %s", own, worker.url)
                self._attend(found)
        if self._told is None or not self._told.agrees(told):
            self._told = told
            self.changed()

    def _compared(self, worker: Worker) -> Iterator[tuple[str, object]]:
        """Whose settings those of `worker` must be. One that is silent for a moment still counts, or another would
        take its place; but none behind a shared address where `worker` is found in its stead."""
        now = self._clock()
        for one in self.workers:
            since = one.silent_since
            replaced = one.door and one.door in (worker.url, worker.door)
            if one is not worker and (since is None or (now - since <= FORGET_S and not replaced)):
                yield one.url, one.settings

    def _forgotten(self, worker: Worker) -> bool:
        since = worker.silent_since
        return bool(worker.door) and since is not None and self._clock() - since > FORGET_S and not worker.sessions

    def _drop(self, worker: Worker) -> None:
        self.workers.remove(worker)
        del self._kicks[worker]
        self._end(self._tasks.pop(worker))
        log.info("render worker %s: forgotten, it was silent for %g s", worker.url, FORGET_S)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._ended.add(task)
        task.add_done_callback(self._ended.discard)
