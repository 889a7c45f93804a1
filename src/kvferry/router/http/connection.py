"""HTTP/1.1 to an engine: one request at a time on a connection, the body handed on as it comes.

Parsed by llhttp (httptools). An answer is read in pieces, or piped: then the pieces go to a function without a task
woken for them, which is what a relayed token costs least, in turn with other answers (`turns.py`). Nothing is read
ahead of a slow reader beyond `BUFFER_BYTES`: the socket isn't read meanwhile, so that the engine feels it.

Owner: the event loop. A response is closed by whoever holds it; closed before its end it closes its connection, which
is how an engine learns that nobody wants the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools
from multidict import CIMultiDict

from kvferry.router.http.head import text
from kvferry.router.http.turns import Turns

BUFFER_BYTES = 256 * 1024
MAX_HEAD_BYTES = 256 * 1024
"""Of all header lines of one answer, and of what comes in one piece of no body: trailers, chunk extensions, 1xx."""
Sink = Callable[[list[bytes]], bool]
"""Takes what has come since it last took some; False if there should come no more for now. What it raises
ends the answer as broken."""


class Broken(Exception):
    """The connection ended, or spoke no HTTP, before the answer was whole."""


class Response:
    """One answer, from its head on."""

    def __init__(self, connection: Connection) -> None:
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.ended = False
        self._connection = connection
        self._pieces: list[bytes] = []
        self._held = 0
        self._error: Broken | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self._in_turn = False

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
            return self.take()
        self._check()
        return b""

    def take(self) -> bytes:
        """What is there."""
        taken = b"".join(self._taken())
        self._resume()
        return taken

    @property
    def here(self) -> bytes:
        """What `some` would give at once. It stays."""
        return b"".join(self._pieces)

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
        """All pieces to `sink`. True when that wants no more for now, False at the end. Raises `Broken`."""
        if self._pieces and not sink(self._taken()):
            return True
        self._resume()
        self._sink = sink
        try:
            while not self.ended and self._sink is not None:
                await self._news()
            full = not (self._error or self._sink)
        finally:
            self._sink = None
        if full or (self._pieces and not sink(self._taken())):
            return True
        self._check()
        return False

    def close(self) -> None:
        self._connection.let_go(self)

    def _taken(self) -> list[bytes]:
        taken, self._pieces, self._held = self._pieces, [], 0
        return taken

    def _resume(self) -> None:
        if not self.ended:
            self._connection.resume()

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
        self._pieces.append(piece)
        self._held += len(piece)

    def parsed(self) -> None:
        """What one read from the socket brought has been fed: several pieces cost a sink hardly more than one."""
        if not self._pieces:
            return
        if self._held > BUFFER_BYTES and not self.ended:  # else the connection is another's already
            self._connection.pause()
        if self._sink is None:
            self._wake()
        elif not self._in_turn:
            self._in_turn = True
            self._connection.turns.ask(self._turn)

    def _turn(self) -> None:
        self._in_turn = False
        if self._sink is None or self.ended:
            self._wake()  # `some`, or the end of `pipe`, takes it
        elif self._pieces:
            try:
                more = self._sink(self._taken())
            except Exception as error:
                self._sink = None
                self._connection.give_up(f"what came of it could not be passed on: {error!r}")
                raise
            if more:
                self._connection.resume()
            else:
                self._sink = None
                self._connection.pause()
                self._wake()

    def finished(self, error: Broken | None) -> None:
        self.ended, self._error = True, error
        self._wake()


class Connection(asyncio.Protocol):
    """`idle`: called when it can take another request; `gone`: when it has closed. `turns`: of what is piped."""

    def __init__(self, idle: Callable[[Connection], None], gone: Callable[[Connection], None], turns: Turns) -> None:
        self._idle, self._gone, self.turns = idle, gone, turns
        self._transport: asyncio.Transport | None = None
        self._response: Response | None = None
        self._head: asyncio.Future[Response] | None = None
        self._heard: Callable[[], None] | None = None
        self._head_bytes = 0
        self._bare = 0
        """Bytes since the last of a body."""
        self._parser = httptools.HttpResponseParser(self)
        self._paused = False
        self.touched = False
        """A byte of the answer has come."""

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, raw: bytes) -> asyncio.Future[Response]:
        """What `answer` is to wait for; or `drop`."""
        assert self._transport is not None and self._response is None
        self._head = head = asyncio.get_running_loop().create_future()
        self._head_bytes, self._bare, self.touched = 0, 0, False
        self._response = Response(self)
        self._transport.write(raw)
        return head

    async def answer(self, head: asyncio.Future[Response]) -> Response:
        """Once its head is there. Raises `Broken`."""
        try:
            return await head
        except BaseException:
            self.abort()
            raise
        finally:
            if self._head is head:  # else another asks here already
                self._head = None  # its result knows this connection: nothing may wait for the collector

    def listen(self, head: asyncio.Future[Response], heard: Callable[[], None]) -> None:
        """`heard` is called in the very callback in which the head came, or in which it became known that none will.

        All that came with it can be read then.
        """
        if head.done():
            heard()
        elif self._head is head:
            self._heard = heard

    def take(self, head: asyncio.Future[Response]) -> None:
        """In place of `answer`, where it is there."""
        if self._head is head:
            self._head = None

    def drop(self, head: asyncio.Future[Response]) -> None:
        """Nobody will wait for it. Does nothing where somebody has."""
        if self._head is head:
            self._head = self._heard = None
            if not head.cancel() and not head.cancelled():
                head.exception()  # else it is told of as one that nobody looked at
            self.abort()

    def let_go(self, response: Response) -> None:
        if self._response is response:
            self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def give_up(self, why: str) -> None:
        """Its answer ends here, as broken."""
        self._fail(why)
        self.abort()

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
        response = self._response
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.give_up("it speaks no HTTP any more: 101 Switching Protocols")
        except httptools.HttpParserError as error:
            self.give_up(f"it speaks no HTTP: {error}")
        else:
            if self._bare > MAX_HEAD_BYTES and self._response is not None:
                self.give_up(f"it speaks no HTTP: above {MAX_HEAD_BYTES} bytes without a body")
        response.parsed()
        if self._heard is not None and response.status:
            self._tell()

    def _tell(self) -> None:
        heard, self._heard = self._heard, None
        if heard is not None:
            heard()

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
        self._tell()

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
