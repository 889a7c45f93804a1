"""Load for a router, at the price of a socket: streamed completions at fixed times, timed to the first chunk.

No HTTP library, since that would cost more than the router. Every answer is counted to its end: a stream that lacks a
chunk is an error. Owner: one event loop.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence

import msgspec

from kvferry.bench.router_engines import MODEL
from kvferry.launch.ports import LOOPBACK

PROMPT = "word " * 1000
_END = b"0\r\n\r\n"


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Seconds; `error` "" if it came whole. `late_s`: sent so long after its time."""

    late_s: float
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    error: str = ""


def request_of(port: int) -> bytes:
    body = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 64, "stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {LOOPBACK}:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class _Stream(asyncio.Protocol):
    """One connection, used for one request after another."""

    def __init__(self) -> None:
        self.done: asyncio.Future[None] | None = None
        self.first = 0.0
        self.events = 0
        self.head = b""
        self._tail = b""
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def ask(self, request: bytes) -> asyncio.Future[None]:
        self.first, self.events, self.head, self._tail = 0.0, 0, b"", b""
        self.done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self.done

    def data_received(self, data: bytes) -> None:
        seen = self._tail + data
        if not self.first:
            self.head = seen[:400]
            if b"data:" not in seen:
                self._tail = seen
                if not seen.startswith(b"HTTP/1.1 200"[: len(seen)]):
                    self._end()
                return
            self.first = time.perf_counter()
            self.events = seen.count(b"data:")
        else:
            # the tail's own events were counted: only what became whole by this read is new
            self.events += seen.count(b"data:") - self._tail.count(b"data:")
        self._tail = seen[-16:]
        if seen.endswith(_END):
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_result(None)


class Client:
    """Keeps connections. `events`: of a whole answer."""

    def __init__(self, port: int, events: int, timeout_s: float) -> None:
        self._port, self._events, self._timeout_s = port, events, timeout_s
        self._request = request_of(port)
        self._idle: list[_Stream] = []

    async def at_times(self, due: Sequence[float]) -> list[Seen]:
        """Request i leaves `due[i]` seconds after now, whatever became of the others."""
        begun = time.perf_counter() + 0.05
        tasks = []
        for offset in due:
            await asyncio.sleep(begun + offset - time.perf_counter())
            tasks.append(asyncio.create_task(self.one(begun + offset)))
        return list(await asyncio.gather(*tasks))

    async def one(self, at: float) -> Seen:
        stream = self._idle.pop() if self._idle else None
        if stream is None or stream.transport.is_closing():
            loop = asyncio.get_running_loop()
            _, stream = await loop.create_connection(_Stream, LOOPBACK, self._port)
        sent = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                await stream.ask(self._request)
        except TimeoutError:
            stream.transport.abort()
            return Seen(late_s=sent - at, error=f"no end within {self._timeout_s:g} s")
        ended = time.perf_counter()
        if stream.events != self._events:
            stream.transport.abort()
            said = stream.head.decode("latin-1") if not stream.first else ""
            return Seen(late_s=sent - at, error=f"{stream.events} of {self._events} events {said}".strip())
        self._idle.append(stream)
        return Seen(late_s=sent - at, ttft_s=stream.first - sent, e2e_s=ended - sent)

    def close(self) -> None:
        for stream in self._idle:
            stream.transport.abort()
