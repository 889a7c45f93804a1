"""HTTP/1.1 to an engine: kept connections, one request at a time on each, the body handed on as it comes.

Parsed by llhttp (httptools). An answer is read in pieces, or piped: then each piece goes to a function in the very
callback that read it from the socket, with no task woken for it, which is what a relayed token costs least. Nothing is
read ahead of a slow reader beyond `BUFFER_BYTES`: the socket isn't read meanwhile, so that the engine feels it.

Owner: the event loop. A response is closed by whoever holds it; closed before its end it closes its connection, which
is how an engine learns that nobody wants the answer.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections import deque
from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import SplitResult, urlsplit

import httptools
from multidict import CIMultiDict

from kvferry.router.head import text

BUFFER_BYTES = 256 * 1024
MAX_HEAD_BYTES = 256 * 1024
"""Of all header lines of one answer, and of what comes in one piece of no body: trailers, chunk extensions, 1xx."""
IDLE_S = 4.0
"""An idle connection is kept this long: below uvicorn's 5 s, so that the engine is rarely the one that closes."""

Sink = Callable[[bytes], bool]
"""Takes a piece; False if there should come no more after it for now. Must not raise."""


class Unreachable(Exception):
    """No connection could be made; the text says why."""


class Broken(Exception):
    """The connection ended, or spoke no HTTP, before the answer was whole."""


class Response:
    """One answer, from its head on."""

    def __init__(self, connection: Connection) -> None:
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.ended = False
        self._connection = connection
        self._pieces: deque[bytes] = deque()
        self._held = 0
        self._error: Broken | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None

    @property
    def content_type(self) -> str:
        """Without its parameters, in lower case."""
        return self.headers.get("Content-Type", "application/octet-stream").partition(";")[0].strip().lower()

    @property
    def framed(self) -> bool:
        """The end of the body is told by its framing, so that a missing part is an error."""
        return "Content-Length" in self.headers or "chunked" in self.headers.get("Transfer-Encoding", "").lower()

    async def some(self) -> bytes:
        """What has come, at once; b"" at the end. Raises `Broken`."""
        while not self._pieces and not self.ended:
            await self._news()
        if self._pieces:
            taken = b"".join(self._pieces) if len(self._pieces) > 1 else self._pieces[0]
            self._pieces.clear()
            self._held = 0
            self._connection.resume()
            return taken
        self._check()
        return b""

    async def read(self, limit: int | None = None) -> tuple[bytes, bool]:
        """The body, at most `limit` bytes of it, and whether it was longer. Raises `Broken`."""
        parts: list[bytes] = []
        size = 0
        while piece := await self.some():
            parts.append(piece)
            size += len(piece)
            if limit is not None and size > limit:
                return b"".join(parts)[:limit], True
        return b"".join(parts), False

    async def pipe(self, sink: Sink) -> bool:
        """Each piece to `sink`. True when that wants no more for now, False at the end. Raises `Broken`."""
        while self._pieces:
            piece = self._pieces.popleft()
            self._held -= len(piece)
            if not sink(piece):
                return True
        self._connection.resume()
        self._sink = sink
        try:
            while not self.ended and self._sink is not None:
                await self._news()
            full = self._sink is None
        finally:
            self._sink = None
        if full:
            return True
        self._check()
        return False

    def close(self) -> None:
        self._connection.let_go(self)

    def _check(self) -> None:
        if self._error is not None:
            raise Broken(*self._error.args)  # a new one: frames that it went through would hold this

    async def _news(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- told by the connection

    def fed(self, piece: bytes) -> None:
        if self._sink is not None:
            if not self._sink(piece):
                self._sink = None
                self._connection.pause()
                self._wake()
            return
        self._pieces.append(piece)
        self._held += len(piece)
        if self._held > BUFFER_BYTES:
            self._connection.pause()
        self._wake()

    def finished(self, error: Broken | None) -> None:
        self.ended, self._error = True, error
        self._wake()


class Connection(asyncio.Protocol):
    """`idle`: called when it can take another request; `gone`: when it has closed."""

    def __init__(self, idle: Callable[[Connection], None], gone: Callable[[Connection], None]) -> None:
        self._idle, self._gone = idle, gone
        self._transport: asyncio.Transport | None = None
        self._response: Response | None = None
        self._head: asyncio.Future[Response] | None = None
        self._head_bytes = 0
        self._bare = 0
        """Bytes since the last of a body."""
        self._parser = httptools.HttpResponseParser(self)
        self._paused = False
        self.touched = False
        """A byte of the answer has come."""
        self.closing: asyncio.TimerHandle | None = None

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, raw: bytes) -> Response:
        """The answer, once its head is there. Raises `Broken`."""
        assert self._transport is not None and self._response is None
        head: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._head = head
        self._head_bytes, self._bare, self.touched = 0, 0, False
        self._response = Response(self)
        self._transport.write(raw)
        try:
            return await head
        except BaseException:
            self.abort()
            raise
        finally:
            if self._head is head:  # else another asks here already
                self._head = None  # its result knows this connection: nothing may wait for the collector

    def let_go(self, response: Response) -> None:
        if self._response is response:
            self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        if not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and self.usable:
            self._paused = False
            assert self._transport is not None
            self._transport.resume_reading()

    # -- asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses

    def data_received(self, data: bytes) -> None:
        if self._response is None:
            self.abort()  # nobody asked
            return
        self.touched = True
        self._bare += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail("it speaks no HTTP any more: 101 Switching Protocols")
            self.abort()
        except httptools.HttpParserError as error:
            self._fail(f"it speaks no HTTP: {error}")
            self.abort()
        else:
            if self._bare > MAX_HEAD_BYTES and self._response is not None:
                self._fail(f"it speaks no HTTP: above {MAX_HEAD_BYTES} bytes without a body")
                self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._gone(self)
        response = self._response
        if error is None and response is not None and response.status and not response.framed:
            self._response = None
            response.finished(None)  # a body without framing ends with its connection
            return
        self._fail(str(error) or type(error).__name__ if error is not None else "the connection was closed")

    def _fail(self, why: str) -> None:
        response, self._response = self._response, None
        if response is None:
            return
        broken = Broken(why)
        if self._head is not None and not self._head.done():
            self._head.set_exception(broken)
        response.finished(broken)

    # -- llhttp's calls

    def on_message_begin(self) -> None:
        if self._response is None:
            raise ValueError("more than was asked for: it would be the beginning of the next answer")
        self._response.headers.clear()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError(f"the head of its answer is above {MAX_HEAD_BYTES} bytes")
        if self._response is not None and not self._response.status:  # no trailer
            self._response.headers.add(text(name), text(value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._response is None or status < 200:
            return  # 100 Continue and its kind: the answer is still to come
        self._response.status = status
        if self._head is not None and not self._head.done():
            self._head.set_result(self._response)

    def on_body(self, piece: bytes) -> None:
        self._bare = 0
        if self._response is not None:
            self._response.fed(piece)

    def on_message_complete(self) -> None:
        response = self._response
        if response is None or not response.status:
            return
        self._response = None
        if self._parser.should_keep_alive() and self.usable:
            self.resume()
            self._idle(self)
        elif self._transport is not None:
            self._transport.close()
        response.finished(None)


class Connections:
    """To any number of engines. `tls`: for https URLs; None: the system's trust."""

    def __init__(self, connect_timeout_s: float, tls: ssl.SSLContext | None = None) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._tls = tls
        self._bases: dict[str, SplitResult] = {}
        self._kept: dict[tuple[str, int, bool], dict[Connection, None]] = {}

    async def request(
        self, method: str, base: str, route: str, headers: Mapping[str, str], body: bytes = b"", *, fresh: bool = False
    ) -> Response:
        """The answer once its head is there. `fresh`: no kept connection.

        Raises `Unreachable`; `Broken`, its `args[1:]` (kept, touched) saying whether a second try would be the first
        that the engine sees.
        """
        url = self._bases.get(base)
        if url is None:
            url = self._bases[base] = urlsplit(base)
        secure = url.scheme == "https"
        where = (url.hostname or "", url.port or (443 if secure else 80), secure)
        connection = None if fresh else self._take(where)
        kept = connection is not None
        if connection is None:
            connection = await self._connect(where)
        lines = [f"{method} {url.path}{route} HTTP/1.1", f"Host: {url.netloc}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += [f"Content-Length: {len(body)}"] if body or method == "POST" else []
        head = "\r\n".join(lines) + "\r\n\r\n"
        try:
            return await connection.ask(head.encode("utf-8", "surrogateescape") + body)
        except Broken as error:
            raise Broken(error.args[0], kept, connection.touched) from None

    def _take(self, where: tuple[str, int, bool]) -> Connection | None:
        kept = self._kept.get(where)
        while kept:
            connection, _ = kept.popitem()
            if connection.closing is not None:
                connection.closing.cancel()
            if connection.usable:
                return connection
        return None

    async def _connect(self, where: tuple[str, int, bool]) -> Connection:
        host, port, secure = where
        loop, kept = asyncio.get_running_loop(), self._kept.setdefault(where, {})

        def idle(connection: Connection) -> None:
            connection.closing = loop.call_later(IDLE_S, connection.abort)
            kept[connection] = None

        def gone(connection: Connection) -> None:
            if kept.pop(connection, 0) is None and connection.closing is not None:
                connection.closing.cancel()

        if secure and self._tls is None:
            self._tls = ssl.create_default_context()
        tls = self._tls if secure else None
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(lambda: Connection(idle, gone), host, port, ssl=tls)
        except TimeoutError:
            raise Unreachable(f"no connection within {self._connect_timeout_s:g} s") from None
        except OSError as error:
            raise Unreachable(_why(error)) from error
        return connection

    def close(self) -> None:
        for kept in self._kept.values():
            for connection in tuple(kept):
                if connection.closing is not None:
                    connection.closing.cancel()
                connection.abort()
        self._kept.clear()


def _why(error: OSError) -> str:
    """asyncio's own text repeats host and port, which the caller names; TLS has numbers of its own."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"no TLS with it: {error.reason or error}"
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
