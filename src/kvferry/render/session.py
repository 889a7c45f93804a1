"""A session: one call of vLLM's handler, fed with the tokens that engines elsewhere generate.

The handler runs in a task of its own and awaits outputs; `feed` lets it have them one at a time and waits until it has
said all that it has to say about them. So what comes out is a function of the chunks, whatever their timing.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from kvferry.render import identity, metered
from kvferry.render.leg import Item, Leg, Process
from kvferry.render.reply import Reply
from kvferry.render.wire import Choice, Chunk, Headers, Refused

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

CURRENT: contextvars.ContextVar[Session] = contextvars.ContextVar("kvferry_render_session")
"""Whose call of the engine this is."""


class Session:
    """Loop thread only."""

    def __init__(self, *, path: str, seed: str, said: int = 0, created: int | None = None) -> None:
        self.path = path
        self.seed = seed
        self.resumed = said > 0
        self.reply = Reply(said, created)
        self.prompts = 0
        self._requests: list[bytes] = []
        self.seq = 0
        self.last_reply: tuple[int, Headers, bytes] | None = None
        self.turn = asyncio.Lock()
        self.meter = metered.Meter()
        self.done = False
        self.opened = False
        self._legs: list[Leg] = []
        self._pending: deque[Item] = deque()
        self._serving: Leg | None = None
        self._stopped: list[str] = []
        self._settled: asyncio.Future[None] | None = None
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self._body: bytes | None = None

    # -- the call of vLLM's app

    async def open(self, app: App, headers: Headers, body: bytes, server: Any) -> None:
        """Runs the app until it has asked for all it wants of an engine, or is done."""
        scope: Scope = {
            "type": "http",
            # From 2.4 on a server says by an error that its client is gone: no task has to wait for it.
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": headers,
            "client": None,
            "server": server,
            "state": {},
        }
        self._body = body
        self._settled = asyncio.get_running_loop().create_future()
        self._task = metered.spawn(self._run(app, scope), self.meter)
        self._task.add_done_callback(self._finished)
        await self._settled
        self.opened = True

    async def _run(self, app: App, scope: Scope) -> None:
        CURRENT.set(self)
        identity.use(self.seed)
        await app(scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.shield(self._gone)
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._gone.done():
            raise OSError("the client has left")
        self.reply.take(message)

    def _finished(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None and self.reply.status is None:
            self.reply.fail()
        self.done = True
        # A task that failed holds all that its frames held.
        self._task = self._body = None
        self._pending.clear()
        if self._settled is not None and not self._settled.done():
            self._settled.set_result(None)

    def cancel(self) -> None:
        """The client has left: the handler ends, and lets go of what it holds. Idempotent."""
        if self._gone.done():
            return
        self._gone.set_result(None)
        for leg in self._legs:
            leg.leave()
        if self._task is not None and self.reply.status is not None:
            self._task.cancel()

    def take_requests(self) -> list[bytes]:
        """Bodies for `/inference/v1/generate`, one per prompt; not kept here."""
        requests, self._requests = self._requests, []
        return requests

    # -- the engine's side

    def ask(self) -> Leg:
        """A prompt that the handler is going to iterate. Raises `Refused` once the session is open: what the router was
        told is all that it dispatches.
        """
        if self.opened or self._gone.done():
            raise Refused(400, "BadRequestError", "a second generation for one request: not served by the render tier")
        leg = Leg(self, len(self._legs))
        self._legs.append(leg)
        self._requests.append(b"")
        self.prompts += 1
        return leg

    def admitted(self, leg: Leg, request: bytes, process: Process) -> None:
        self._requests[leg.index] = request
        leg.process = process

    def left(self, leg: Leg, *, failed: bool) -> None:
        """The handler iterates this one no more."""
        leg.ended, leg.failed = True, failed
        # The session stays for a lost reply; what was asked and made need not.
        leg.process = None
        leg.outbox.clear()
        if self._serving is leg:
            self._serving = None
        self._wake_next()
        self.look()

    def advance(self, leg: Leg) -> Any:
        """The next output of this leg, whose last one has been consumed; None if it is not its turn. Processes what is
        pending up to there.
        """
        if self._serving is leg:
            self._serving = None
        if self._serving is None:
            while not leg.outbox and self._pending:
                if self._legs[self._pending[0].leg].ended:
                    self._pending.popleft()
                elif self._pending[0].leg == leg.index:
                    self._process(leg, self._pending.popleft())
                else:
                    self._wake_next()
                    return None
            if leg.outbox:
                self._serving = leg
                return leg.outbox.popleft()
        return None

    def _process(self, leg: Leg, item: Item) -> None:
        assert leg.process is not None
        for choice in leg.process(item):
            self._stopped.append(f"{leg.index}.{choice}")

    def _wake_next(self) -> None:
        """Whoever the first pending item is for, if all has been consumed."""
        while self._pending and self._serving is None:
            leg = self._legs[self._pending[0].leg]
            if not leg.ended:
                leg.wake()
                return
            self._pending.popleft()

    def look(self) -> None:
        """Whether all that can be said has been said: the handler waits for every prompt that it has not ended."""
        settled = self._settled
        if settled is not None and not settled.done() and self._idle():
            settled.set_result(None)

    def _idle(self) -> bool:
        """With a leg that failed the handler is about to end."""
        live = [leg for leg in self._legs if not leg.ended]
        return (
            bool(live)
            and not self._pending
            and all(leg.waiting for leg in live)
            and not any(leg.failed for leg in self._legs)
        )

    # -- the router's side

    async def feed(self, chunks: list[tuple[int, Chunk]]) -> None:
        """Returns when the handler has said everything about them. One at a time (`turn`)."""
        if self.done:
            return
        for index, chunk in chunks:
            if chunk.error is not None:
                self._pending.append(Item(index, None, chunk))
            elif chunk.choices:
                first, *others = chunk.choices
                self._pending.append(Item(index, first, chunk))
                # What is P's goes in once.
                self._pending.extend(Item(index, choice, _NOTHING) for choice in others)
            elif chunk.prompt_logprobs is not None or chunk.num_cached_tokens is not None:
                self._pending.append(Item(index, Choice(index=-1), chunk))
        self._settled = asyncio.get_running_loop().create_future()
        self._wake_next()
        self.look()
        await self._settled

    def take_stopped(self) -> list[str]:
        stopped, self._stopped = self._stopped, []
        return stopped


_NOTHING = Chunk()
