"""One kept connection to a server that is measured: every byte on it is counted, and little else is done."""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Self

from kvferry.errors import EngineError
from kvferry.launch.ports import LOOPBACK

TIMEOUT_S = 300.0


class Answer:
    """`headers`: names in lower case."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body


class Line:
    """Blocking, one request after the other. `sent`, `received`: bytes, headers and framing included."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection((LOOPBACK, port), timeout=TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._host = f"{LOOPBACK}:{port}"
        self._rest = b""
        self.sent = self.received = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._socket.close()

    @property
    def moved(self) -> int:
        return self.sent + self.received

    def ask(self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> Answer:
        """Raises `EngineError` if the server closes the connection instead of answering."""
        more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        head = f"{method} {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
        raw = f"{head}content-length: {len(body)}\r\n{more}\r\n".encode() + body
        self._socket.sendall(raw)
        self.sent += len(raw)
        lines = self._until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        pairs = [line.partition(":") for line in lines[1:] if line]
        answered = {name.strip().lower(): value.strip() for name, _, value in pairs}
        status = int(lines[0].split()[1])
        if answered.get("transfer-encoding", "").lower() == "chunked":
            return Answer(status, answered, self._chunks())
        return Answer(status, answered, self._exactly(int(answered.get("content-length", "0"))))

    def _chunks(self) -> bytes:
        parts = []
        while size := int(self._until(b"\r\n").split(b";")[0], 16):
            parts.append(self._exactly(size))
            self._exactly(2)
        self._until(b"\r\n")
        return b"".join(parts)

    def _until(self, mark: bytes) -> bytes:
        while (at := self._rest.find(mark)) < 0:
            self._more()
        found, self._rest = self._rest[:at], self._rest[at + len(mark) :]
        return found

    def _exactly(self, size: int) -> bytes:
        if size > len(self._rest):
            parts, there = [self._rest], len(self._rest)
            while there < size:
                self._rest = b""
                self._more()
                parts.append(self._rest)
                there += len(self._rest)
            self._rest = b"".join(parts)
        found, self._rest = self._rest[:size], self._rest[size:]
        return found

    def _more(self) -> None:
        data = self._socket.recv(1 << 18)
        if not data:
            raise EngineError("a render server closed its connection in the middle of an answer")
        self.received += len(data)
        self._rest += data
