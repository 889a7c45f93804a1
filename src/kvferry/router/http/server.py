"""HTTP/1.1 for the routes that generate: parsed by llhttp (httptools), answered without a task between two sockets.

A token's way through a router is a read and a write, so what a server costs per request and per piece is most of what
the router adds (`kvferry bench router`). A connection whose request is for any other route is handed to `other`, a
protocol of the general HTTP server, with every byte that has come; it is closed after that answer, since it can't come
back.

Owner: the event loop. A client that leaves cancels its handler.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

import httptools
from aiohttp import web
from multidict import CIMultiDict

from kvferry.listener import MAX_HEADER_BYTES
from kvferry.router.http.at_once import begin
from kvferry.router.http.head import head, text
from kvferry.router.http.stream import Stream
from kvferry.router.replies import Refusal, error_response

log = logging.getLogger("kvferry.router")

IDLE_S = 75.0
"""So long a client may send no request, not end a head, send no more of a body, or take nothing of an answer."""
MOST_WAITING = 16
"""Requests behind a running one. With more, or with more bytes than one body may have, the connection ends after it."""
SLOW_BYTES = 64 * 1024
"""What may wait for a slow client."""
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)


class Request:
    """One request, read whole. Answered once, by `send` or `stream`."""

    def __init__(
        self,
        connection: Connection,
        path: str,
        headers: CIMultiDict[str],
        body: bytes,
        *,
        old: bool,
        keep: bool,
        refusal: Refusal | None = None,
    ) -> None:
        self.path, self.headers = path, headers
        self.refusal = refusal
        """Why its body was not kept: its only answer."""
        self.keep = keep
        """The connection may take another request afterwards."""
        self.answered = False
        self._connection, self._body, self._old = connection, body, old

    async def read(self) -> bytes:
        """Once: it is not kept."""
        body, self._body = self._body, b""
        return body

    @property
    def remote(self) -> str:
        """The client's address."""
        return self._connection.remote

    def send(self, response: web.Response) -> None:
        body = response.body
        assert body is None or isinstance(body, bytes | bytearray)
        raw = bytes(body or b"")
        framing = f"Content-Length: {len(raw)}" + ("" if self.keep else "\r\nConnection: close")
        self.answered = True
        self._connection.write(head(response.status, response.headers, framing) + raw)

    def stream(self, headers: Mapping[str, str]) -> Stream:
        self.answered = True
        self.keep = self.keep and not self._old
        return Stream(self._connection, headers, chunked=not self._old)


Handler = Callable[[Request], Awaitable[None]]


class Server:
    """`paths`: those POSTs are ours. `other`: makes the protocol that takes all else. Bytes: of a request's body.

    `admit`: called with path and headers before a body is kept; raises the `Refusal` that is the answer.
    """

    def __init__(
        self,
        paths: frozenset[str],
        handle: Handler,
        other: Callable[[], asyncio.Protocol],
        max_body_bytes: int,
        admit: Callable[[str, Mapping[str, str]], None] = lambda path, headers: None,
    ) -> None:
        self.paths, self.handle, self.other, self.max_body_bytes = paths, handle, other, max_body_bytes
        self.admit = admit
        self.open: set[Connection] = set()

    def __call__(self) -> asyncio.Protocol:
        return Connection(self)

    async def close(self, drain_s: float) -> None:
        """Running requests have so long, then they are cancelled."""
        for connection in tuple(self.open):
            connection.retire()
        tasks = [connection.task for connection in self.open if connection.task is not None]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=drain_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for connection in tuple(self.open):
            connection.abort()


class Connection(asyncio.Protocol):
    def __init__(self, server: Server) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._raw = b""
        """All that came since the last request ended, or the last piece of a body of ours."""
        self._target, self._path = b"", ""
        self._head_bytes = 0
        self._headers: CIMultiDict[str] = CIMultiDict()
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._ours: bool | None = None
        self._ended_in_feed = self._mixed = False
        self._refusal: Refusal | None = None
        self._turned_away: Refusal | None = None
        self._ready: Request | None = None
        """To be begun as soon as the read that brought it is parsed."""
        self._waiting: list[Request] = []
        self._waiting_bytes = 0
        self._idle: asyncio.TimerHandle | None = None
        self._last = False
        self._room: asyncio.Future[None] | None = None
        """Done once the client has taken what was written; None: there is room."""
        self.task: asyncio.Task[None] | None = None
        self._running = False

    @property
    def _busy(self) -> bool:
        return self._running or self._ready is not None

    @property
    def remote(self) -> str:
        peer = self._transport.get_extra_info("peername") if self._transport is not None else None
        return str(peer[0]) if isinstance(peer, tuple) else ""

    # -- for requests and streams

    def write(self, raw: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(raw)

    @property
    def full(self) -> bool:
        return self._room is not None

    async def drained(self) -> None:
        if self._room is not None:
            await asyncio.wait({self._room})
        if self._transport is None:
            raise ConnectionResetError("the client left")

    def retire(self) -> None:
        """No further request; closed at once if there is none."""
        self._last = True
        if not self._busy and self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses
        self._transport.set_write_buffer_limits(high=SLOW_BYTES)
        self._server.open.add(self)
        self._wait()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._server.open.discard(self)
        self._waiting.clear()
        self._stop_waiting()
        if self.task is not None:
            self.task.cancel()
        self.resume_writing()

    def pause_writing(self) -> None:
        if self._room is None:
            self._room = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._room is not None:
            self._room.set_result(None)
            self._room = None

    def data_received(self, data: bytes) -> None:
        if self._last:
            return
        self._feed(data)
        if self._ready is not None:
            request, self._ready = self._ready, None
            self._begin(request)

    def _feed(self, data: bytes) -> None:
        self._raw += data
        self._ended_in_feed = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # nothing that we speak: the request is read as if it had not asked
            asked, end, rest = self._raw.partition(b"\r\n\r\n")
            plain, self._raw = _UPGRADE.sub(b"", asked), b""
            if plain == asked:
                self._refuse(Refusal(400, "invalid_http", "this server is no proxy"))
            else:
                self._restart()
                self._feed(plain + end + rest)
            return
        except httptools.HttpParserError as error:
            if self._ours is not False:
                self._refuse(self._refusal or Refusal(400, "invalid_http", f"not a request of HTTP/1.1: {error}"))
                return
        if self._ours is False:
            self._hand_over()
        elif len(self._raw) > MAX_HEADER_BYTES:
            self._refuse(_too_long())
        elif self._ours and not self._busy:
            self._wait()

    # -- llhttp's calls

    def on_message_begin(self) -> None:
        self._target, self._headers = b"", CIMultiDict()
        self._head_bytes, self._body, self._body_bytes = 0, [], 0
        self._ours, self._mixed, self._turned_away = None, self._ended_in_feed, None
        if not self._busy:
            self._wait()

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._ours:
            return  # a trailer: it comes after what headers decide
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEADER_BYTES:
            self._fail(_too_long())
        self._headers.add(text(name), text(value))

    def on_headers_complete(self) -> None:
        self._path = path = self._target.partition(b"?")[0].decode("latin-1")
        self._ours = self._parser.get_method() == b"POST" and path in self._server.paths
        if not self._ours:
            if self._parser.should_upgrade():
                return
            raise ValueError("not ours: all that comes from here on is the general server's")
        length = self._headers.get("Content-Length", "")
        if length.isdecimal() and int(length) > self._server.max_body_bytes:
            self._fail(self._too_large())
        waits = self._headers.get("Expect", "").lower() == "100-continue"
        try:
            self._server.admit(path, self._headers)
        except Refusal as refusal:
            if waits:
                self._fail(refusal)
            self._turned_away = refusal
        if waits and not self._busy:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, piece: bytes) -> None:
        if self._ours:
            self._body_bytes += len(piece)
            if self._body_bytes > self._server.max_body_bytes:
                self._fail(self._too_large())
            if self._turned_away is None:
                self._body.append(piece)
            self._raw = b""  # it will not be handed over

    def on_message_complete(self) -> None:
        if not self._ours or self._parser.should_upgrade():
            return
        self._raw, self._ours, self._ended_in_feed = b"", None, True
        request = Request(
            self,
            self._path,
            self._headers,
            b"".join(self._body),
            old=self._parser.get_http_version() == "1.0",
            keep=self._parser.should_keep_alive(),
            refusal=self._turned_away,
        )
        self._body = []
        if not self._busy:
            self._ready = request
        elif not self._last:
            # reading goes on, or a client that leaves would not be noticed
            self._waiting.append(request)
            self._waiting_bytes += self._body_bytes
            if len(self._waiting) > MOST_WAITING or self._waiting_bytes > self._server.max_body_bytes:
                self._last = True

    # -- one request after the other

    def _begin(self, request: Request) -> None:
        self._stop_waiting()
        self._running = True
        task = begin(self._run(request))
        if self._running and self.task is None:  # else it has ended, or has begun the next
            self.task = task

    async def _run(self, request: Request) -> None:
        try:
            if request.refusal is not None:
                request.send(error_response(request.refusal))
            else:
                await self._server.handle(request)
        except ConnectionError:
            self.abort()
        except Exception:
            log.exception("POST %s failed", request.path)
            if request.answered:
                self.abort()
            else:
                request.keep = False
                request.send(error_response(Refusal(500, "internal_error", "internal error of the router")))
        finally:
            self.task, self._running = None, False
            self._next(request)

    def _next(self, done: Request) -> None:
        if self._transport is None:
            return
        if self._last or not done.keep or not done.answered:
            self._close()
        elif self._waiting:
            self._begin(self._waiting.pop(0))
            if not self._waiting:
                self._waiting_bytes = 0
        elif self._ours is False:
            self._hand_over()
        else:
            self._wait()

    def _hand_over(self) -> None:
        transport = self._transport
        if transport is None:
            return
        if self._busy:
            self._last = len(self._raw) > self._server.max_body_bytes
            return
        if self._mixed:
            self._close()  # it came in one read with the end of another: where it begins is not known
            return
        self._stop_waiting()
        self._server.open.discard(self)
        other = self._server.other()
        other.connection_made(transport)
        transport.set_protocol(other)
        if self.full:
            other.pause_writing()
        line, rest = self._raw.lstrip(b"\r\n").split(b"\r\n", 1)
        if "Transfer-Encoding" not in self._headers:  # a request behind it stays unanswered
            rest = rest[: rest.index(b"\r\n\r\n") + 4 + int(self._headers.get("Content-Length", 0))]
        other.data_received(line + b"\r\nConnection: close\r\n" + rest)
        self._transport, self._raw = None, b""

    def _restart(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._ours, self._mixed = None, False

    def _fail(self, refusal: Refusal) -> None:
        """Ends the parsing, from within a call of llhttp's."""
        self._refusal = refusal
        raise ValueError(refusal.message)

    def _refuse(self, refusal: Refusal) -> None:
        """The last answer of this connection."""
        self._last = True
        if not self._busy and self._transport is not None:
            request = Request(self, "", CIMultiDict(), b"", old=False, keep=False)
            request.send(error_response(refusal))
            if self._transport.can_write_eof():
                # closed with bytes unread, a socket is reset, and the answer lost with it
                self._transport.write_eof()
                self._wait()
            else:
                self._close()

    def _too_large(self) -> Refusal:
        return Refusal(413, "body_too_large", f"the body is above {self._server.max_body_bytes} bytes")

    def _close(self) -> None:
        """Once the client has taken what was written."""
        assert self._transport is not None
        self._transport.close()
        self._wait()

    def _wait(self) -> None:
        self._stop_waiting()
        self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._give_up, self._unsent())

    def _give_up(self, unsent: int) -> None:
        if self._unsent() < unsent:
            self._wait()
        else:
            self.abort()

    def _unsent(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def _stop_waiting(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None


def _too_long() -> Refusal:
    return Refusal(431, "headers_too_large", f"the headers are above {MAX_HEADER_BYTES} bytes")
