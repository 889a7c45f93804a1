"""Connections to engines: kept where they are, so that a request goes out in the moment in which it is asked.

Owner: the event loop.
"""

from __future__ import annotations

import asyncio
import functools
import os
import ssl
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import urlsplit

from kvferry.router.http.connection import Broken, Connection, Response
from kvferry.router.http.turns import Turns

IDLE_S = 4.0
"""An idle connection is taken again for so long: below uvicorn's 5 s, so that the engine is rarely the one that
closes."""
SWEEP_S = 0.5
"""Idle ones are looked through this often. A timer for each would be set and cancelled with every request."""


class Unreachable(Exception):
    """No connection could be made; the text says why."""


class Asking:
    """One request, which is on its way already if a connection was kept for it. `answer` once, or `drop`."""

    def __init__(self, connect: Callable[[], Awaitable[Connection]], raw: bytes, kept: Connection | None) -> None:
        self._connect, self._kept = connect, kept
        self._raw = raw if kept is None else b""
        self._head = kept.send(raw) if kept is not None else None

    async def answer(self) -> Response:
        """See `Connections.request`."""
        connection, head = self._kept, self._head
        if connection is None or head is None:
            connection = await self._connect()
            head = connection.send(self._raw)
        try:
            return await connection.answer(head)
        except Broken as error:
            raise Broken(error.args[0], self._kept is not None, connection.touched) from None

    def listen(self, heard: Callable[[], None]) -> bool:
        """See `Connection.listen`. False, and nothing happens, where it isn't on its way yet."""
        if self._kept is None or self._head is None:
            return False
        self._kept.listen(self._head, heard)
        return True

    @property
    def here(self) -> Response | None:
        """The answer, if its head has come."""
        head = self._head
        return None if head is None or not head.done() or head.cancelled() or head.exception() else head.result()

    def take(self) -> None:
        """The answer that is `here`, in place of `answer`."""
        if self._kept is not None and self._head is not None:
            self._kept.take(self._head)

    def drop(self) -> None:
        """Does nothing where `answer` has begun."""
        if self._kept is not None and self._head is not None:
            self._kept.drop(self._head)


class Kept:
    """Idle connections to one engine, when each became so, on the loop's clock. The last one in is taken first."""

    def __init__(self) -> None:
        self._since: dict[Connection, float] = {}
        self._sweep: asyncio.TimerHandle | None = None

    def put(self, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        self._since[connection] = loop.time()
        if self._sweep is None:
            self._sweep = loop.call_later(SWEEP_S, self._old_ones, loop)

    def take(self) -> Connection | None:
        while self._since:
            connection, since = self._since.popitem()
            if connection.usable:
                if asyncio.get_running_loop().time() - since <= IDLE_S:
                    return connection
                connection.abort()
        return None

    def gone(self, connection: Connection) -> None:
        self._since.pop(connection, None)

    def _old_ones(self, loop: asyncio.AbstractEventLoop) -> None:
        old = [one for one, since in self._since.items() if loop.time() - since > IDLE_S]
        for connection in old:
            del self._since[connection]
            connection.abort()
        self._sweep = loop.call_later(SWEEP_S, self._old_ones, loop) if self._since else None

    def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for connection in tuple(self._since):
            connection.abort()
        self._since.clear()


class Base:
    """An engine's address, read once."""

    def __init__(self, base: str) -> None:
        url = urlsplit(base)
        self.secure = url.scheme == "https"
        self.host, self.port = url.hostname or "", url.port or (443 if self.secure else 80)
        self.path, self.netloc = url.path, url.netloc
        self.kept = Kept()

    def head(self, method: str, route: str, headers: Mapping[str, str], length: int) -> str:
        lines = [f"{method} {self.path}{route} HTTP/1.1", f"Host: {self.netloc}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += [f"Content-Length: {length}"] if length or method == "POST" else []
        return "\r\n".join(lines) + "\r\n\r\n"


class Connections:
    """To any number of engines. `tls`: for https URLs; None: the system's trust."""

    def __init__(self, connect_timeout_s: float, tls: ssl.SSLContext | None = None) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._tls = tls
        self._bases: dict[str, Base] = {}
        self._turns = Turns()

    async def request(
        self, method: str, base: str, route: str, headers: Mapping[str, str], body: bytes = b"", *, fresh: bool = False
    ) -> Response:
        """The answer once its head is there. `fresh`: no kept connection.

        Raises `Unreachable`; `Broken`, its `args[1:]` (kept, touched) saying whether a second try would be the first
        that the engine sees.
        """
        return await self.ask(method, base, route, headers, body, fresh=fresh).answer()

    def ask(
        self, method: str, base: str, route: str, headers: Mapping[str, str], body: bytes = b"", *, fresh: bool = False
    ) -> Asking:
        at = self._bases.get(base)
        if at is None:
            at = self._bases[base] = Base(base)
        raw = at.head(method, route, headers, len(body)).encode("utf-8", "surrogateescape") + body
        return Asking(functools.partial(self._connect, at), raw, None if fresh else at.kept.take())

    async def _connect(self, at: Base) -> Connection:
        if at.secure and self._tls is None:
            self._tls = ssl.create_default_context()
        tls = self._tls if at.secure else None
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(at.kept.put, at.kept.gone, self._turns), at.host, at.port, ssl=tls
                )
        except TimeoutError:
            raise Unreachable(f"no connection within {self._connect_timeout_s:g} s") from None
        except OSError as error:
            raise Unreachable(_why(error)) from error
        return connection

    def close(self) -> None:
        for at in self._bases.values():
            at.kept.close()


def _why(error: OSError) -> str:
    """asyncio's own text repeats host and port, which the caller names; TLS has numbers of its own."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"no TLS with it: {error.reason or error}"
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
