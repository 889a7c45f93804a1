"""The routes of sessions: raw ASGI, in front of vLLM's app."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from kvferry.render import identity, wire
from kvferry.render.asgi import JSON, App, Receive, Scope, Send, answer, client_gone, read_body, refuse
from kvferry.render.fair import FairQueue, QueueFull
from kvferry.render.metrics import RenderMetrics
from kvferry.render.session import Session
from kvferry.render.sessions import SessionTable, TableFull
from kvferry.render.wire import Headers, Refused

RETRY_S = 1
STATE = b"x-kvferry-state"
_NOT_THE_APPS = (b"content-length", b"connection", b"host", b"transfer-encoding", b"expect")
_PASSED_ON = ("/health", "/version", "/v1/models", "/tokenize", "/detokenize", "/openapi.json", "/docs", "/redoc")
_PASSED_ON_ENDS = ("/render", "/derender")


@dataclass(frozen=True)
class Limits:
    """`big_bytes`: bodies from here up render in a lane of their own, `big_at_once` at a time."""

    session_ttl_s: float = 600.0
    max_sessions: int = 4096
    session_cpu_s: float = 120.0
    max_body_bytes: int = 64 << 20
    max_queue: int = 512
    big_bytes: int = 128 << 10
    small_at_once: int = 16
    big_at_once: int = 1


class Front:
    """An ASGI app. `port`: the worker's own. `settings`: the body of the settings route. `keys`: clients have one."""

    def __init__(
        self,
        app: App,
        limits: Limits,
        port: int,
        settings: bytes,
        keys: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._limits = limits
        self._port = port
        self._settings = settings
        self._keys = [hashlib.sha256(key.encode()).digest() for key in keys]
        self.table: SessionTable[Session] = SessionTable(
            most=limits.max_sessions, ttl_s=limits.session_ttl_s, clock=clock
        )
        self._queue = FairQueue(
            big_bytes=limits.big_bytes,
            small_at_once=limits.small_at_once,
            big_at_once=limits.big_at_once,
            most_waiting=limits.max_queue,
        )
        self.metrics = RenderMetrics(
            lambda: sum(not session.done for session in self.table), lambda: self._queue.waiting
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path: str = scope["path"]
        try:
            if path == wire.PREFIX or path.startswith(wire.PREFIX + "/"):
                await self._route(path[len(wire.PREFIX) + 1 :], scope, receive, send)
            elif path == "/metrics":
                await answer(send, 200, [(b"content-type", b"text/plain; version=0.0.4")], self.metrics.text())
            elif path in _PASSED_ON or path.endswith(_PASSED_ON_ENDS):
                await self._app(scope, receive, send)
            else:
                raise Refused(
                    404, "not_served_here", f"{path}: a render worker has no engine; ask the router, or open a session"
                )
        except Refused as refused:
            self.metrics.refused.labels(refused.kind).inc()
            await refuse(send, refused)

    def sweep(self) -> None:
        before = self.table.expired
        self.table.sweep()
        self.metrics.expired.inc(self.table.expired - before)

    async def _route(self, rest: str, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"]
        if not rest and method == "POST":
            return await self._open(scope, receive, send)
        if not self._has_key(scope):
            raise _unauthorized()
        if rest == "settings" and method == "GET":
            return await answer(send, 200, [JSON], self._told(scope))
        name, _, part = rest.partition("/")
        if part == "tokens" and method == "POST":
            return await self._feed(name, scope, receive, send)
        if not part and method == "GET":
            return await answer(send, 200, [JSON], wire.encode(_told(name, self._session(name))))
        if not part and method == "DELETE":
            self._session(name)
            self.table.remove(name)
            return await answer(send, 200, [JSON], wire.encode({"session": name, "state": "done"}))
        raise Refused(405, "method_not_allowed", f"{method} {scope['path']}: not served")

    def _has_key(self, scope: Scope) -> bool:
        if not self._keys:
            return True
        said = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = said.partition(b" ")
        # As vLLM's app reads it.
        found = hashlib.sha256(key.strip().decode("latin-1").encode()).digest()
        return scheme.lower() == b"bearer" and any([hmac.compare_digest(found, one) for one in self._keys])

    def _session(self, name: str) -> Session:
        session = self.table.get(name)
        if session is None:
            raise Refused(404, "session_unknown", f"session {name}: unknown here, or expired")
        return session

    async def _open(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        given = {name: value for name, value in scope["headers"] if name.startswith(wire.OURS)}
        path = given.get(wire.PATH_HEADER, b"").decode("latin-1")
        if path not in wire.PATHS:
            raise Refused(400, "bad_header", f"x-kvferry-path: {path!r}, expected one of {', '.join(wire.PATHS)}")
        said = wire.number(given, wire.SAID_HEADER, 0) or 0
        created = wire.number(given, wire.CREATED_HEADER, None)
        if not self._has_key(scope):
            return await self._refuse_key(path, scope, send)
        self._check_room()
        body = await read_body(scope, receive, self._limits.max_body_bytes)
        headers = _for_app(scope["headers"], len(body))
        request_id = next((value for name, value in headers if name == b"x-request-id"), None)
        seed = identity.seed_for(given.get(wire.SEED_HEADER), request_id, path, body)
        session = Session(path=path, seed=seed, said=said, created=created)
        rendering = asyncio.ensure_future(self._render(session, headers, body, scope))
        leaving = asyncio.ensure_future(receive())
        try:
            await asyncio.wait((rendering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if rendering.done():
                rendering.result()
            if leaving.done():
                # Nobody will ever know its name.
                session.cancel()
                raise client_gone()
        finally:
            rendering.cancel()
            leaving.cancel()
        self.metrics.seconds.observe(time.perf_counter() - began)
        self.metrics.cpu_open.inc(session.meter.cpu_s)
        if session.done:
            return await _verbatim(send, session)
        try:
            name = self.table.add(session)
        except TableFull:
            session.cancel()
            raise self._full() from None
        self._check_cpu(name, session)
        self.metrics.opened.labels(path).inc()
        if session.resumed:
            self.metrics.resumed.inc()
        opened = wire.opened(name, self._address(scope), session.take_requests())
        await answer(send, 200, [JSON, (STATE, b"open")], opened)

    async def _render(self, session: Session, headers: Headers, body: bytes, scope: Scope) -> None:
        """In its turn. Raises `Refused`."""
        try:
            async with self._queue.turn(len(body)):
                wire.refuse_other_tiers(body)
                await session.open(self._app, headers, body, scope.get("server"))
        except QueueFull:
            waiting = f"{self._queue.waiting} requests wait to be rendered (--max-queue)"
            raise Refused(429, "render_busy", waiting, retry_after=RETRY_S) from None
        finally:
            if not session.opened:
                session.cancel()

    async def _refuse_key(self, path: str, scope: Scope, send: Send) -> None:
        """In the words of vLLM's app, which needs no body for that: nobody waits for a request without a key."""
        session = Session(path=path, seed="")
        try:
            await session.open(self._app, _for_app(scope["headers"], 0), b"", scope.get("server"))
        finally:
            session.cancel()
        self.metrics.refused.labels("unauthorized").inc()
        if session.reply.status == 401:
            return await _verbatim(send, session)
        refused = _unauthorized()
        await answer(send, refused.status, [JSON, (STATE, b"done")], refused.body())

    async def _feed(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        session = self._session(name)
        headers = {key: value for key, value in scope["headers"] if key.startswith(wire.OURS)}
        seq = wire.number(headers, wire.SEQ_HEADER, None)
        if seq is None:
            raise Refused(400, "bad_header", "x-kvferry-seq: missing, expected 0, 1, 2, ...")
        body = await read_body(scope, receive, self._limits.max_body_bytes)
        async with session.turn:
            if seq == session.seq - 1 and session.last_reply is not None:
                return await answer(send, *session.last_reply)
            if seq != session.seq:
                raise Refused(409, "bad_seq", f"x-kvferry-seq: {seq}, expected {session.seq}")
            chunks = wire.decode_chunks(body, session.prompts)
            spent = session.meter.cpu_s
            await session.feed(chunks)
            self.metrics.cpu_feed.inc(session.meter.cpu_s - spent)
            self.metrics.tokens.inc(sum(len(choice.token_ids or ()) for _, chunk in chunks for choice in chunk.choices))
            self._check_cpu(name, session)
            session.seq += 1
            session.last_reply = _said(session)
            await answer(send, *session.last_reply)

    def _address(self, scope: Scope) -> str:
        """This worker's own, at the address that it was reached at."""
        host = scope["server"][0]
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    def _told(self, scope: Scope) -> bytes:
        """The settings, and who tells them: behind the shared address that may be any worker."""
        settings = msgspec.json.decode(self._settings, type=dict[str, msgspec.Raw])
        return wire.encode({**settings, "worker": self._address(scope)})

    def _check_room(self) -> None:
        try:
            self.table.check_room()
        except TableFull:
            raise self._full() from None

    def _full(self) -> Refused:
        most = self._limits.max_sessions
        return Refused(429, "render_busy", f"{most} sessions are open (--max-sessions)", retry_after=RETRY_S)

    def _check_cpu(self, name: str, session: Session) -> None:
        if session.meter.cpu_s > self._limits.session_cpu_s and not session.done:
            self.table.remove(name)
            most = self._limits.session_cpu_s
            raise Refused(400, "render_too_slow", f"session {name}: took more than {most:g} s (--session-cpu-s)")


def _unauthorized() -> Refused:
    return Refused(401, "unauthorized", "authorization: expected 'Bearer KEY' with a key of --api-key")


def _for_app(headers: Headers, nbytes: int) -> Headers:
    kept = [(name, value) for name, value in headers if name not in _NOT_THE_APPS and not name.startswith(wire.OURS)]
    return [*kept, (b"content-length", str(nbytes).encode())]


async def _verbatim(send: Send, session: Session) -> None:
    reply = session.reply
    kept = [(name, value) for name, value in reply.headers if name.lower() != b"content-length"]
    await answer(send, reply.status or 500, [*kept, (STATE, b"done")], reply.drain())


def _said(session: Session) -> tuple[int, Headers, bytes]:
    body = session.reply.drain()
    headers: Headers = [
        (STATE, b"done" if session.done else b"open"),
        (b"x-kvferry-events", str(session.reply.events).encode()),
    ]
    stopped = session.take_stopped()
    if stopped:
        headers.append((b"x-kvferry-stop", ",".join(stopped).encode()))
    if body or session.done:
        headers += session.reply.first()
    return 200, headers, body


def _told(name: str, session: Session) -> dict[str, object]:
    return {
        "session": name,
        "state": "done" if session.done else "open",
        "path": session.path,
        "requests": session.prompts,
        "seq": session.seq,
        "events": session.reply.events,
        "cpu_s": round(session.meter.cpu_s, 6),
    }
