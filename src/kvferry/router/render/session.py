"""One client's answer in the making, on one render worker, or on another after that one died.

Tokens go there in requests that are numbered. A reply that was lost is asked for again by the same number; a worker
that was lost is replaced: another makes the answer anew from all the tokens so far, says what was not said yet, and
goes on. So nothing is said twice, and nothing is lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping

from kvferry.router.config import RouterConfig
from kvferry.router.render.answers import Final, Full, Opened, RenderUnavailable, Said, WorkerLost, joined
from kvferry.router.render.client import opening_headers
from kvferry.router.render.history import History
from kvferry.router.render.tier import MOST_LOSSES, Tier
from kvferry.router.render.worker import Worker
from kvferry.router.requests.openai import Route

log = logging.getLogger("kvferry.router")

FULL_AGAIN_S = 1.0
"""So long after a refusal for want of room an answer that has begun asks again."""
MOST_MOVES = 4
"""Workers that one request tries, one after the other: a request that kills each of them must end."""


class Session:
    """Owner: one request's task. `close` must follow, always."""

    def __init__(self, tier: Tier, config: RouterConfig, route: Route, raw: bytes, headers: Mapping[str, str]) -> None:
        self._tier, self._raw, self._patience_s = tier, raw, config.render_timeout_s
        self._headers = opening_headers(headers, config, route, uuid.uuid4().hex)
        names = ("Authorization", "Accept-Encoding")
        self._brief = {name: self._headers[name] for name in names if name in self._headers}
        self._at = ""
        self._opened: Opened | None = None
        self._worker: Worker | None = None
        self._settings: object | None = None
        self._history = History()
        self._seq = self._events = 0
        self._created = ""
        self._moves = 0
        self.done = False
        self.opening_s = 0.0

    @property
    def worker(self) -> str:
        """Where it is, or was last; "" if nowhere yet."""
        return self._opened.worker if self._opened is not None else self._at

    async def open(self) -> Opened | Final:
        """Raises `RenderUnavailable`, `Refusal` 429."""
        begun = time.monotonic()
        answer, worker = await self._tier.open(self._raw, self._headers)
        self.opening_s, self._at = time.monotonic() - begun, worker.url
        if isinstance(answer, Opened):
            self._opened, self._worker = answer, worker
            self._settings = worker.settings
        return answer

    async def feed(self, entries: list[bytes]) -> Said:
        """What they give. Raises `RenderUnavailable`, `Refusal` 429, and `LegFailed` where the worker refuses."""
        assert self._opened is not None
        self._history.add(entries)
        body = b"[" + b",".join(entries) + b"]"
        begun = time.monotonic()
        try:
            said = await self._ask(self._opened, body)
        except WorkerLost as lost:
            said = await self._move(lost)
        self._tier.metrics.feeding.observe(time.monotonic() - begun)
        self._seq += 1
        self._events, self.done = said.events, said.done
        self._created = said.created or self._created
        return said

    def close(self) -> Opened | None:
        """The session that is to be deleted, if one is open yet."""
        self._at = self.worker
        opened, self._opened = self._opened, None
        self._release()
        return None if self.done else opened

    async def delete(self, opened: Opened) -> None:
        await self._tier.client.delete(opened, self._brief)

    async def _ask(self, opened: Opened, body: bytes) -> Said:
        """Raises `WorkerLost`."""
        client = self._tier.client
        try:
            return await client.feed(opened, self._seq, body, self._brief)
        except WorkerLost as lost:
            if not lost.again:
                raise
        try:
            said = await client.feed(opened, self._seq, body, self._brief)
        except WorkerLost as lost:
            lost.reached = True  # the first time
            raise
        self._tier.metrics.resumes.labels("asked_again").inc()
        return said

    async def _move(self, lost: WorkerLost) -> Said:
        avoid: frozenset[str] = frozenset()
        losses = 0
        while True:
            assert self._opened is not None
            gone = self._opened.worker
            if not lost.lives:
                avoid |= {gone}
                worker = self._tier.at(gone)
                if worker is not None and not lost.late:
                    self._tier.suspect(worker, str(lost))
            self._tier.leave(self._opened, self._brief)
            self._release()
            self._moves += 1
            losses += lost.reached and not lost.lives
            if self._moves > MOST_MOVES or losses >= MOST_LOSSES:
                raise RenderUnavailable(f"{self._moves} render workers were lost, the last one at {gone}: {lost}")
            log.warning("a session of render worker %s goes on elsewhere: %s", gone, lost)
            resumed = {**self._headers, "X-Kvferry-Said": str(self._events)}
            if self._created:
                resumed["X-Kvferry-Created"] = self._created
            answer, self._worker = await self._reopen(resumed, avoid, losses)
            if isinstance(answer, Final):
                self._worker = None
                raise RenderUnavailable(f"another render worker answered {answer.status} to what {gone} had taken")
            self._opened, self._seq = answer, 0
            try:
                said = await self._retold(answer)
            except WorkerLost as again:
                lost = again
                continue
            self._tier.metrics.resumes.labels("moved").inc()
            return said

    async def _reopen(
        self, headers: Mapping[str, str], avoid: frozenset[str], losses: int
    ) -> tuple[Opened | Final, Worker]:
        """Many sessions move at once when a worker dies: where all others are full, room is waited for."""
        end = time.monotonic() + self._patience_s
        while True:
            try:
                return await self._tier.open(self._raw, headers, avoid, self._settings, losses)
            except Full:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(FULL_AGAIN_S)

    async def _retold(self, opened: Opened) -> Said:
        """What all tokens so far give there, beyond what was said. Raises `WorkerLost`."""
        parts: list[Said] = []
        for seq, body in enumerate(self._history.bodies()):
            self._seq = seq
            parts.append(await self._ask(opened, body))
            if parts[-1].done:
                break
        return joined(parts)

    def _release(self) -> None:
        if self._worker is not None:
            self._tier.release(self._worker)
            self._worker = None
