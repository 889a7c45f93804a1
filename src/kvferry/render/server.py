"""HTTP/1.1 in front of an ASGI app whose every answer is whole: no stream leaves a render worker.

A token costs a worker some tens of microseconds to render; a general server would add several times that to each
request. So: one parser per connection, the answer in one write, and a body is refused as soon as it is too large.
"""

from __future__ import annotations

import asyncio
import http
import logging
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import unquote

import httptools

from kvferry.listener import MAX_HEADER_BYTES
from kvferry.render.asgi import App, Message, Scope, too_large
from kvferry.render.wire import Headers, Refused

log = logging.getLogger("kvferry.render")

MOST_HEAD_BYTES = MAX_HEADER_BYTES + 4096
"""What the router takes of a client, and its own words beside it."""
MOST_WAITING = 16
"""Requests that one connection may have sent ahead; then it is not read."""
IDLE_S = 900.0
WRITE_S = 60.0
"""A client that leaves answers unread for longer is cut off."""
BACKLOG = 2048
_REASONS = {int(status): status.phrase.encode() for status in http.HTTPStatus}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass
class Request:
    """Also the ASGI `receive` and `send` of its own call."""

    gone: asyncio.Future[None]
    url: bytes = b""
    headers: Headers = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)
    nbytes: int = 0
    method: bytes = b""
    keep_alive: bool = True
    refused: Refused | None = None
    status: int = 0
    said: Headers = field(default_factory=list)
    out: list[bytes] = field(default_factory=list)
    _read: bool = False

    async def receive(self) -> Message:
        if not self._read:
            self._read = True
            body, self.parts = b"".join(self.parts), []
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.shield(self.gone)
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.said = message["status"], list(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            self.out.append(message.get("body", b""))

    def answer(self) -> bytes:
        body = b"".join(self.out)
        lines = [b"HTTP/1.1 %d %b" % (self.status, _REASONS.get(self.status, b""))]
        lines += [b"%b: %b" % header for header in self.said]
        if not any(name.lower() == b"content-length" for name, _ in self.said):
            lines.append(b"content-length: %d" % len(body))
        if not self.keep_alive:
            lines.append(b"connection: close")
        return b"\r\n".join(lines) + b"\r\n\r\n" + (b"" if self.method == b"HEAD" else body)


def _head_too_large() -> Refused:
    return Refused(431, "request_too_large", f"headers: larger than {MOST_HEAD_BYTES} bytes")


class Connection(asyncio.Protocol):
    """One client's. Requests are answered in their order, one at a time."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._loop = asyncio.get_running_loop()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._waiting: deque[Request] = deque()
        self.task: asyncio.Task[None] | None = None
        """Answers; None while nothing is asked."""
        self._request: Request | None = None
        self._head_bytes = 0
        self._unseen = 0
        """Bytes since the parser last told of a message's begin, its body or its end."""
        self._ending = False
        """The last request that counts has come; what follows is not read."""
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._addresses: tuple[Any, Any] = (None, None)
        self.active = self._loop.time()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        own, peer = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
        self._addresses = tuple(own[:2]) if own else None, tuple(peer[:2]) if peer else None
        self._server.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)
        if not self._gone.done():
            self._gone.set_result(None)
        self._waiting.clear()
        self._writable.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        if self._ending:
            return
        self.active = self._loop.time()
        self._unseen += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._refuse(Refused(400, "bad_request", "this is no HTTP/1.1 request"))
        except httptools.HttpParserUpgrade:
            # Answered as if it had not asked for that; what follows may be anything.
            self._end()
        else:
            # The parser keeps a header to itself until the next one begins.
            if self._unseen > MOST_HEAD_BYTES:
                self._refuse(_head_too_large())

    # -- httptools

    def on_message_begin(self) -> None:
        self._request = Request(self._gone)
        self._head_bytes = self._unseen = 0

    def on_url(self, url: bytes) -> None:
        assert self._request is not None
        self._request.url += url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._request is not None
        self._request.headers.append((name.lower(), value))
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        request = self._request
        assert request is not None
        self._unseen = 0
        request.method = self._parser.get_method()
        for name, value in request.headers:
            if name == b"content-length" and value.isdigit() and int(value) > self._server.most_bytes:
                self._refuse(too_large(self._server.most_bytes))
            elif name == b"expect" and value.lower() == b"100-continue" and self._transport and not request.refused:
                self._transport.write(_CONTINUE)

    def on_body(self, part: bytes) -> None:
        self._unseen = 0
        request = self._request
        if request is None or request.refused is not None:
            return
        request.nbytes += len(part)
        if request.nbytes > self._server.most_bytes:
            self._refuse(too_large(self._server.most_bytes))
        else:
            request.parts.append(part)

    def on_message_complete(self) -> None:
        request, self._request = self._request, None
        self._unseen = 0
        if request is None or request.refused is not None:
            return
        request.keep_alive = self._parser.should_keep_alive() and not self._parser.should_upgrade()
        self._add(request)

    def _count(self, nbytes: int) -> None:
        self._head_bytes += nbytes
        if self._head_bytes > MOST_HEAD_BYTES:
            self._refuse(_head_too_large())

    def _end(self) -> None:
        self._ending = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    # -- answers

    def _add(self, request: Request) -> None:
        self._waiting.append(request)
        if self.task is None:
            self.task = self._loop.create_task(self._answer())
        elif len(self._waiting) >= MOST_WAITING and self._transport is not None:
            self._transport.pause_reading()

    def _refuse(self, refused: Refused) -> None:
        """After what was asked before; then nothing more is read."""
        request = self._request or Request(self._gone)
        if request.refused is not None:
            return
        request.refused, request.keep_alive, request.parts = refused, False, []
        self._end()
        if self._transport is not None and not self._transport.is_closing():
            self._add(request)

    async def _answer(self) -> None:
        try:
            while self._waiting:
                request = self._waiting.popleft()
                await self._one(request)
                transport = self._transport
                if transport is None or transport.is_closing():
                    return
                transport.write(request.answer())
                if not self._writable.is_set() and not await self._drained():
                    transport.abort()
                    return
                if not request.keep_alive:
                    transport.close()
                    return
                if not self._ending and not transport.is_reading():
                    transport.resume_reading()
        finally:
            self.task = None
            self.active = self._loop.time()

    async def _drained(self) -> bool:
        """False if the client has not read within `WRITE_S`."""
        try:
            async with asyncio.timeout(WRITE_S):
                await self._writable.wait()
        except TimeoutError:
            return False
        return True

    async def _one(self, request: Request) -> None:
        if request.refused is None:
            try:
                await self._server.app(self._scope(request), request.receive, request.send)
            except Exception:
                # Whatever an app of others raises: its client is told, and everybody else is served on.
                log.exception("%s %s failed", request.method.decode(), request.url.decode("latin-1"))
                request.status = 0
            if request.status:
                return
            request.refused = Refused(500, "InternalServerError", "the frontend failed")
        request.status, request.said = request.refused.status, [(b"content-type", b"application/json")]
        request.out = [request.refused.body()]

    def _scope(self, request: Request) -> Scope:
        raw, _, query = request.url.partition(b"?")
        path = raw.decode("latin-1")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": request.method.decode("latin-1"),
            "scheme": "http",
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw,
            "root_path": "",
            "query_string": query,
            "headers": request.headers,
            "client": self._addresses[1],
            "server": self._addresses[0],
            "state": {},
        }


class Server:
    """`most_bytes`: of one body. Loop thread only."""

    def __init__(self, app: App, most_bytes: int, clock: Callable[[], float] | None = None) -> None:
        self.app = app
        self.most_bytes = most_bytes
        self.connections: set[Connection] = set()
        self._clock = clock or asyncio.get_running_loop().time
        self._listening: list[asyncio.Server] = []

    async def listen(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._listening.append(await loop.create_server(lambda: Connection(self), sock=listener, backlog=BACKLOG))

    def sweep(self) -> None:
        """Close connections that nobody has used for long."""
        for connection in list(self.connections):
            if connection.task is None and self._clock() - connection.active > IDLE_S:
                connection.close()

    async def close(self, drain_s: float) -> None:
        """No new connections; requests that run have `drain_s` seconds."""
        for listening in self._listening:
            listening.close()
        running = [connection.task for connection in self.connections if connection.task is not None]
        if running:
            await asyncio.wait(running, timeout=drain_s)
        for connection in list(self.connections):
            connection.close()
