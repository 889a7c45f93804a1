"""An answer in pieces, on a connection of `server.Server`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvferry.router.http.head import head

if TYPE_CHECKING:
    from kvferry.router.http.server import Connection


class Stream:
    """An answer in pieces. Chunked; to a client of HTTP/1.0 the end of the connection is its end."""

    def __init__(self, connection: Connection, headers: Mapping[str, str], *, chunked: bool) -> None:
        self.status = 200
        self._connection, self._chunked = connection, chunked
        framing = "Transfer-Encoding: chunked" if chunked else "Connection: close"
        self._head = head(200, headers, framing)

    @property
    def full(self) -> bool:
        """The client is slower than what is written."""
        return self._connection.full

    def write(self, piece: bytes) -> None:
        """To a client that left it goes nowhere: its handler is being cancelled."""
        if piece:
            framed = b"%x\r\n%b\r\n" % (len(piece), piece) if self._chunked else piece
            self._connection.write(self._head + framed if self._head else framed)
            self._head = b""

    async def drained(self) -> None:
        """Until the client has taken most of what was written. Raises `ConnectionResetError` if it left."""
        await self._connection.drained()

    def end(self) -> None:
        self._connection.write(self._head + (b"0\r\n\r\n" if self._chunked else b""))
