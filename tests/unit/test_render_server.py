"""The worker's HTTP: whole answers in order, limits, and what becomes of requests that go wrong."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvferry.render import server as server_module
from kvferry.render.asgi import Receive, Scope, Send, answer
from kvferry.render.server import IDLE_S, MOST_HEAD_BYTES, Server


class App:
    """Echoes; `/slow` waits for `gate`, `/fails` raises, `/parts` says its answer in two, `/leaves` awaits the end."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.left = asyncio.Event()
        self.scopes: list[Scope] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        body = (await receive())["body"]
        if scope["path"] == "/slow":
            await self.gate.wait()
        elif scope["path"] == "/fails":
            raise ValueError("nobody expected this")
        elif scope["path"] == "/leaves":
            assert (await receive())["type"] == "http.disconnect"
            self.left.set()
            return
        elif scope["path"] == "/parts":
            await send({"type": "http.response.start", "status": 201, "headers": [(b"x-a", b"b")]})
            await send({"type": "http.response.body", "body": b"one ", "more_body": True})
            await send({"type": "http.response.body", "body": b"two"})
            return
        await answer(send, 200, [], scope["path"].encode() + b" " + body)


@asynccontextmanager
async def serving(most: int = 1000, clock: Any = None) -> AsyncIterator[tuple[App, Server, int]]:
    app = App()
    server = Server(app, most, clock)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        await server.listen(listener)
        try:
            yield app, server, listener.getsockname()[1]
        finally:
            app.gate.set()
            await server.close(1.0)


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, port: int) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def send(self, raw: bytes) -> None:
        self.writer.write(raw)

    async def read(self) -> tuple[int, dict[str, str], bytes]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:-2])
        return int(head[0].split()[1]), headers, await self.reader.readexactly(int(headers["content-length"]))

    async def ended(self) -> bool:
        return await self.reader.read() == b""

    def close(self) -> None:
        self.writer.close()


def post(path: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def test_requests_ahead_are_answered_in_order_on_one_connection() -> None:
    async with serving() as (app, _, port):
        client = await Client.to(port)
        client.send(post("/slow", b"1") + b"".join(post(f"/{number}", b"x") for number in range(40)))
        await asyncio.sleep(0.05)
        assert len(app.scopes) == 1
        app.gate.set()
        assert (await client.read())[2] == b"/slow 1"
        for number in range(40):
            assert (await client.read())[2] == b"/%d x" % number
        client.close()


async def test_what_an_app_is_told() -> None:
    async with serving() as (app, _, port):
        client = await Client.to(port)
        client.send(b"GET /a%20b?c=d HTTP/1.1\r\nHost: x\r\nX-Mixed-Case: Value\r\n\r\n")
        assert (await client.read())[0] == 200
        (scope,) = app.scopes
        assert (scope["method"], scope["path"], scope["query_string"]) == ("GET", "/a b", b"c=d")
        assert (b"x-mixed-case", b"Value") in scope["headers"]
        assert scope["server"] == ("127.0.0.1", port)
        client.close()


async def test_an_answer_in_parts_is_one() -> None:
    async with serving() as (_, _, port):
        client = await Client.to(port)
        client.send(post("/parts"))
        status, headers, body = await client.read()
        assert (status, headers["x-a"], body) == (201, "b", b"one two")
        client.close()


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_too_large_is_refused_before_it_has_come(chunked: bool) -> None:
    async with serving(most=100) as (app, _, port):
        client = await Client.to(port)
        if chunked:
            client.send(b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n65\r\n" + b"x" * 101)
        else:
            client.send(b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 101\r\n\r\n")
        status, headers, body = await client.read()
        assert (status, headers["connection"]) == (413, "close")
        assert "--max-body-bytes" in json.loads(body)["error"]["message"]
        assert await client.ended()
        assert app.scopes == []


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"what?\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X-Much: " + b"x" * MOST_HEAD_BYTES + b"\r\n\r\n", 431),
    ],
)
async def test_what_is_no_request_is_refused_after_what_was_one(raw: bytes, status: int) -> None:
    async with serving() as (_, _, port):
        client = await Client.to(port)
        client.send(post("/a", b"x") + raw)
        assert (await client.read())[2] == b"/a x"
        assert (await client.read())[0] == status
        assert await client.ended()


@pytest.mark.parametrize("trailer", [False, True])
async def test_a_header_without_an_end_is_refused_while_it_comes(trailer: bool) -> None:
    async with serving() as (app, _, port):
        client = await Client.to(port)
        if trailer:
            client.send(b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nX-Much: ")
        else:
            client.send(b"GET /a HTTP/1.1\r\nHost: x\r\nX-Much: ")
        await asyncio.sleep(0.02)
        for _ in range(MOST_HEAD_BYTES // 8192 + 1):
            client.send(b"x" * 8192)
            await client.writer.drain()
            await asyncio.sleep(0.001)
        assert (await asyncio.wait_for(client.read(), 5))[0] == 431
        assert app.scopes == []


async def test_nothing_is_read_after_a_refusal_that_waits_for_its_turn() -> None:
    async with serving() as (app, server, port):
        client = await Client.to(port)
        client.send(post("/slow", b"1") + post("/slow", b"2") + b"what?\r\n\r\n")
        await asyncio.sleep(0.05)
        (connection,) = server.connections
        app.gate.set()
        assert [(await client.read())[0] for _ in range(3)] == [200, 200, 400]
        assert connection._ending
        assert len(app.scopes) == 2


async def test_a_body_and_a_head_in_many_parts_are_not_taken_for_one_head() -> None:
    async with serving(most=4 * MOST_HEAD_BYTES) as (_, _, port):
        client = await Client.to(port)
        body = b"x" * (3 * MOST_HEAD_BYTES)
        for _ in range(2):
            raw = post("/a", body)
            for start in range(0, len(raw), 20_000):
                client.send(raw[start : start + 20_000])
                await client.writer.drain()
                await asyncio.sleep(0)
            assert (await client.read())[2] == b"/a " + body
        client.close()


async def test_another_protocol_is_not_spoken() -> None:
    async with serving() as (_, _, port):
        client = await Client.to(port)
        client.send(b"GET /a HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\nanything")
        assert (await client.read())[1]["connection"] == "close"
        assert await client.ended()


async def test_an_app_that_fails_is_a_500_and_the_connection_goes_on() -> None:
    async with serving() as (_, _, port):
        client = await Client.to(port)
        client.send(post("/fails") + post("/b", b"y"))
        status, _, body = await client.read()
        assert (status, json.loads(body)["error"]["type"]) == (500, "InternalServerError")
        assert (await client.read())[2] == b"/b y"
        client.close()


async def test_a_client_that_waits_to_be_asked_for_its_body() -> None:
    async with serving() as (_, _, port):
        client = await Client.to(port)
        client.send(b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"abc")
        assert (await client.read())[2] == b"/a abc"
        client.close()


async def test_an_app_learns_that_its_client_left() -> None:
    async with serving() as (app, server, port):
        client = await Client.to(port)
        client.send(post("/leaves"))
        await asyncio.sleep(0.05)
        client.close()
        await asyncio.wait_for(app.left.wait(), 2)
        await asyncio.sleep(0.01)
        assert not server.connections


async def test_connection_close_is_kept() -> None:
    async with serving() as (_, _, port):
        client = await Client.to(port)
        client.send(post("/a", b"", "Connection: close") + post("/b"))
        assert (await client.read())[1]["connection"] == "close"
        assert await client.ended()


async def test_a_client_that_never_reads_is_not_written_to_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "WRITE_S", 0.2)
    body = b"x" * 500_000
    async with serving(most=len(body)) as (app, server, port):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            with pytest.raises((ConnectionError, TimeoutError)):
                async with asyncio.timeout(10):
                    for _ in range(200):
                        await loop.sock_sendall(client, post("/a", body))
            assert 0 < len(app.scopes) < 100
            assert not server.connections


async def test_a_client_that_reads_late_gets_all() -> None:
    body = b"x" * 500_000
    async with serving(most=len(body)) as (_, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1000)
        client = Client(reader, writer)
        for _ in range(12):
            client.send(post("/a", body))
        await asyncio.sleep(0.1)
        for _ in range(12):
            assert (await client.read())[2] == b"/a " + body
        client.close()


async def test_idle_connections_are_closed_and_busy_ones_are_not() -> None:
    now = asyncio.get_running_loop().time
    ahead = 0.0
    async with serving(clock=lambda: now() + ahead) as (app, server, port):
        busy, idle = await Client.to(port), await Client.to(port)
        busy.send(post("/slow", b"x"))
        idle.send(post("/a"))
        await idle.read()
        server.sweep()
        assert len(server.connections) == 2
        ahead = IDLE_S + 1
        server.sweep()
        assert await idle.ended()
        app.gate.set()
        assert (await busy.read())[2] == b"/slow x"
        busy.close()


async def test_closing_lets_running_requests_end() -> None:
    async with serving() as (app, server, port):
        client = await Client.to(port)
        client.send(post("/slow", b"x"))
        await asyncio.sleep(0.05)
        closing = asyncio.create_task(server.close(5.0))
        await asyncio.sleep(0.02)
        app.gate.set()
        assert (await client.read())[2] == b"/slow x"
        assert await client.ended()
        await closing
