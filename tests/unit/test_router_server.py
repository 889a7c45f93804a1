"""The router's own HTTP server, spoken to byte by byte; all other routes are an aiohttp application's."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from kvferry.router.http import server as module
from kvferry.router.http.server import Request, Server
from kvferry.router.replies import Refusal

LIMIT = 1000
ROUTE = "/v1/completions"


class House:
    """Echoes bodies; `stream` in one, its words come as pieces; `wait` in one, it waits until the client leaves."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.cancelled = asyncio.Event()
        self.go = asyncio.Event()

    async def handle(self, request: Request) -> None:
        body = await request.read()
        self.bodies.append(body)
        if body.startswith(b"wait"):
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        if body.startswith(b"stream"):
            stream = request.stream({"Content-Type": "text/event-stream"})
            for word in body.split():
                stream.write(word)
            stream.end()
        elif body.startswith(b"flood"):
            stream = request.stream({})
            while not stream.full:
                stream.write(b"x" * 10_000)
            await stream.drained()
            stream.end()
        elif body.startswith(b"bug"):
            raise ValueError("a bug")
        else:
            request.send(web.Response(body=body, headers={"X-Path": request.path}))


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def say(self, raw: bytes) -> None:
        self.writer.write(raw)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        async with asyncio.timeout(5.0):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
            body = b""
            if "chunked" in headers.get("transfer-encoding", ""):
                while size := int(await self.reader.readline(), 16):
                    body += await self.reader.readexactly(size)
                    await self.reader.readline()
                await self.reader.readline()
            else:
                body = await self.reader.readexactly(int(headers.get("content-length", 0)))
            return int(first.split()[1]), headers, body

    async def closed(self) -> bytes:
        async with asyncio.timeout(5.0):
            return await self.reader.read()


@asynccontextmanager
async def running() -> AsyncIterator[tuple[House, Server, int]]:
    async def other(request: web.Request) -> web.Response:
        return web.Response(text=f"{request.method} {request.path} {len(await request.read())}")

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", other)
    runner = web.AppRunner(app)
    await runner.setup()
    house = House()
    server = Server(frozenset({ROUTE}), house.handle, runner.server, LIMIT)
    listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    try:
        yield house, server, listening.sockets[0].getsockname()[1]
    finally:
        listening.close()
        await server.close(0.1)
        await runner.cleanup()


async def connect(port: int) -> Client:
    return Client(*await asyncio.open_connection("127.0.0.1", port))


def post(body: bytes, *headers: str, path: str = ROUTE, version: str = "1.1") -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: x", *headers]
    if not any(line.lower().startswith("transfer-encoding") for line in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def test_a_request_and_its_answer_on_a_kept_connection() -> None:
    async with running() as (house, _, port):
        client = await connect(port)
        for body in (b"one", b"", b"three"):
            client.say(post(body))
            status, headers, got = await client.answer()
            assert (status, got, headers["x-path"]) == (200, body, ROUTE)
            assert re.fullmatch(r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT", headers["date"])
            assert "connection" not in headers
        assert house.bodies == [b"one", b"", b"three"]


@pytest.mark.parametrize("step", [1, 2, 7, 50])
async def test_requests_cut_anywhere_chunked_ones_too(step: int) -> None:
    async with running() as (_, _, port):
        client = await connect(port)
        raw = post(b"hello") + post(b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", "Transfer-Encoding: chunked")
        raw += post(b"last", path=ROUTE + "?x=1")
        for at in range(0, len(raw), step):
            client.say(raw[at : at + step])
            await client.writer.drain()
            await asyncio.sleep(0)
        assert [(await client.answer())[2] for _ in range(3)] == [b"hello", b"abcde", b"last"]


async def test_a_stream_is_chunked_and_old_clients_get_it_bare() -> None:
    async with running() as (_, _, port):
        client = await connect(port)
        client.say(post(b"stream a bc"))
        status, headers, body = await client.answer()
        assert (status, headers["content-type"], body) == (200, "text/event-stream", b"streamabc")
        client.say(post(b"still here"))
        assert (await client.answer())[2] == b"still here"
        old = await connect(port)
        old.say(post(b"stream a bc", version="1.0"))
        raw = await old.closed()
        assert raw.endswith(b"\r\n\r\nstreamabc") and b"chunked" not in raw


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with running() as (house, _, port):
        client = await connect(port)
        client.say(post(b"wait 1") + post(b"2") + post(b"3"))
        await asyncio.sleep(0.05)
        assert house.bodies == [b"wait 1"]
        house.go.set()
        assert [(await client.answer())[2] for _ in range(3)] == [b"wait 1", b"2", b"3"]


async def test_other_routes_go_to_the_general_server_which_closes() -> None:
    async with running() as (house, _, port):
        client = await connect(port)
        client.say(post(b"ours"))
        assert (await client.answer())[2] == b"ours"
        client.say(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: keep-alive\r\n\r\n")
        _, headers, body = await client.answer()
        assert (headers["connection"], body) == ("close", b"GET /v1/models 0")
        assert await client.closed() == b""
        client = await connect(port)
        for piece in (b"POST /else", b"where HTTP/1.1\r\nHost: x\r\nContent-Le", b"ngth: 5\r\n\r\n12", b"345"):
            client.say(piece)
            await asyncio.sleep(0.01)
        assert (await client.answer())[2] == b"POST /elsewhere 5"
        assert house.bodies == [b"ours"]


async def test_one_for_another_route_behind_a_running_one_waits_for_it() -> None:
    async with running() as (house, _, port):
        client = await connect(port)
        client.say(post(b"wait"))
        await asyncio.sleep(0.05)
        client.say(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(0.05)
        house.go.set()
        assert (await client.answer())[2] == b"wait"
        assert (await client.answer())[2] == b"GET /health 0"
        mixed = await connect(port)
        mixed.say(post(b"ours") + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await mixed.answer())[2] == b"ours"
        assert await mixed.closed() == b""  # unanswered, so a client asks again


async def test_a_client_that_leaves_cancels_its_handler() -> None:
    async with running() as (house, server, port):
        client = await connect(port)
        client.say(post(b"wait"))
        await asyncio.sleep(0.05)
        client.writer.transport.abort()
        await asyncio.wait_for(house.cancelled.wait(), 2.0)
        assert not server.open


async def test_a_slow_client_is_waited_for_and_memory_is_bounded() -> None:
    async with running() as (_, server, port):
        client = await connect(port)
        client.writer.transport.pause_reading()
        client.say(post(b"flood"))
        async with asyncio.timeout(2.0):
            while not any(one.full for one in server.open):
                await asyncio.sleep(0.01)
        (one,) = server.open
        assert one._transport.get_write_buffer_size() < module.SLOW_BYTES + 20_000
        client.writer.transport.resume_reading()
        assert set((await client.answer())[2]) == {ord("x")}


@pytest.mark.parametrize(
    ("raw", "status", "code"),
    [
        (post(b"x" * (LIMIT + 1)), 413, "body_too_large"),
        (post(b"401\r\n" + b"x" * 1025 + b"\r\n", "Transfer-Encoding: chunked"), 413, "body_too_large"),
        (post(b"x", "X-Long: " + "y" * 300_000), 431, "headers_too_large"),
        (b"HELO there\r\n\r\n", 400, "invalid_http"),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", 400, "invalid_http"),
        (b"POST /" + b"y" * 300_000, 431, "headers_too_large"),
        (post(b"x", "Content-Length: 1", "Content-Length: 2"), 400, "invalid_http"),
        (post(b"x", "Content-Length: 1", "Transfer-Encoding: chunked"), 400, "invalid_http"),
    ],
)
async def test_what_is_no_request_gets_one_answer_and_the_end(raw: bytes, status: int, code: str) -> None:
    async with running() as (house, _, port):
        client = await connect(port)
        client.say(raw)
        got, headers, body = await client.answer()
        assert (got, headers["connection"]) == (status, "close")
        assert f'"code": "{code}"'.encode() in body
        assert await client.closed() == b""
        assert house.bodies == []


async def test_expect_and_upgrade() -> None:
    async with running() as (_, _, port):
        client = await connect(port)
        client.say(post(b"", "Expect: 100-continue").replace(b"Content-Length: 0", b"Content-Length: 2"))
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.say(b"hi")
        assert (await client.answer())[2] == b"hi"
        client.say(post(b"plain", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AA"))
        assert (await client.answer())[2] == b"plain"


GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = post(b"", "Transfer-Encoding: chunked")


@pytest.mark.parametrize("before", [(), (b"wait",), (b"wait", b"two")])
async def test_what_comes_behind_another_route_is_never_answered_in_its_place(before: tuple[bytes, ...]) -> None:
    async with running() as (house, _, port):
        client = await connect(port)
        for body in before:
            client.say(post(body))
            await asyncio.sleep(0.02)
        client.say(GET + post(b"behind"))
        await asyncio.sleep(0.02)
        house.go.set()
        assert [(await client.answer())[2] for _ in before] == list(before)
        assert (await client.answer())[2] == b"GET /health 0"
        assert await client.closed() == b""
        assert house.bodies == list(before)


async def test_empty_lines_before_a_request_of_another_route() -> None:
    async with running() as (_, _, port):
        client = await connect(port)
        client.say(b"\r\n")
        await asyncio.sleep(0.02)
        client.say(GET)
        assert (await client.answer())[2] == b"GET /health 0"


@pytest.mark.parametrize(
    "begun",
    [
        CHUNKED[:-2] + b"X: ",
        b"GET / HTTP/1.1\r\nX: ",
        CHUNKED + b"1;",
        CHUNKED + b"1\r\nx\r\n0\r\nX: ",
        CHUNKED + b"1\r\nx\r\n0\r\n",
    ],
)
async def test_what_no_body_comes_of_is_bounded(begun: bytes) -> None:
    async with running() as (house, server, port):
        client = await connect(port)
        client.say(begun)
        await asyncio.sleep(0.02)
        (one,) = server.open
        for _ in range(8):
            client.say(b"y" * 64_000)
            await asyncio.sleep(0)
        status, _, body = await client.answer()
        assert (status, b"headers_too_large" in body, house.bodies) == (431, True, [])
        assert len(one._raw) < 2 * module.MAX_HEADER_BYTES


async def test_what_comes_behind_what_is_no_request_is_not_kept() -> None:
    async with running() as (house, server, port):
        client = await connect(port)
        client.say(post(b"wait") + b"\0")
        await asyncio.sleep(0.02)
        (one,) = server.open
        for _ in range(20):
            client.say(b"y" * 64_000)
            await client.writer.drain()
        assert len(one._raw) <= 1
        house.go.set()
        assert (await client.answer())[2] == b"wait"
        await asyncio.wait_for(_gone(server), 2.0)


async def _gone(server: Server) -> None:
    while server.open:
        await asyncio.sleep(0.01)


async def test_trailers_are_no_headers() -> None:
    seen: list[str] = []

    async def handle(request: Request) -> None:
        seen.extend(request.headers)
        request.send(web.Response())

    async with running() as (_, server, port):
        server.handle = handle
        client = await connect(port)
        client.say(CHUNKED + b"1\r\nx\r\n0\r\nAuthorization: Bearer b\r\n\r\n")
        assert (await client.answer())[0] == 200
        assert seen == ["Host", "Transfer-Encoding"]


async def test_thousands_of_upgrades_are_read_twice_and_not_thousands_of_times() -> None:
    async with running() as (house, _, port):
        client = await connect(port)
        client.say(post(b"plain", "Connection: Upgrade", *["Upgrade: h2c"] * 3000))
        assert (await client.answer())[2] == b"plain"
        assert house.bodies == [b"plain"]


@pytest.mark.parametrize("begun", [b"POST /v1/comp", post(b"", "Content-Length: 5")[:-2] + b"\r\n12"])
async def test_a_client_that_does_not_go_on_is_given_up(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.15)
    async with running() as (_, server, port):
        client = await connect(port)
        client.say(begun)
        await asyncio.wait_for(_gone(server), 2.0)


async def test_nor_is_one_waited_for_whose_head_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.15)
    async with running() as (_, server, port):
        client = await connect(port)
        client.say(b"POST / HTTP/1.1\r\nX: ")
        async with asyncio.timeout(2.0):
            while not server.open:
                await asyncio.sleep(0.01)
            while server.open:
                client.say(b"y")
                await asyncio.sleep(0.02)


async def test_one_that_takes_no_answer_is_given_up_and_a_slow_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.2)
    size = 8_000_000

    async def handle(request: Request) -> None:
        request.send(web.Response(body=b"x" * size))

    async with running() as (_, server, port):
        server.handle = handle
        for close in ("Connection: close", "X: y"):
            mute = await connect(port)
            mute.writer.transport.pause_reading()
            mute.say(post(b"", close))
            await asyncio.sleep(0.05)
            await asyncio.wait_for(_gone(server), 2.0)
            slow, got = await connect(port), 0
            slow.say(post(b"", close))
            while got < size and (piece := await slow.reader.read(500_000)):
                got += len(piece)
                await asyncio.sleep(0.03)
            assert got >= size


async def test_a_bug_is_a_500_and_the_end_of_the_connection() -> None:
    async with running() as (_, _, port):
        client = await connect(port)
        client.say(post(b"bug"))
        status, _, body = await client.answer()
        assert status == 500 and b"internal_error" in body
        assert await client.closed() == b""


async def test_idle_connections_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.1)
    async with running() as (_, server, port):
        client, mute = await connect(port), await connect(port)
        client.say(post(b"x"))
        await client.answer()
        mute.say(b"POST /v1/comp")
        assert (await client.closed(), await mute.closed()) == (b"", b"")
        assert not server.open


async def test_close_lets_running_requests_end_then_cancels_them() -> None:
    async with running() as (house, server, port):
        idle, quick, stuck = [await connect(port) for _ in range(3)]
        quick.say(post(b"wait"))
        await asyncio.sleep(0.05)
        closing = asyncio.create_task(server.close(1.0))
        assert await idle.closed() == b""
        house.go.set()
        assert (await quick.answer())[2] == b"wait"
        await closing
        assert await stuck.closed() == b""
    async with running() as (house, server, port):
        stuck = await connect(port)
        stuck.say(post(b"wait"))
        await asyncio.sleep(0.05)
        await server.close(0.1)
        assert house.cancelled.is_set() and not server.open


def test_a_refusal_has_its_status() -> None:
    assert Refusal(431, "headers_too_large", "x").http_status == 431


@pytest.mark.parametrize("behind", [post(b"next"), b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_a_client_that_leaves_with_requests_behind_is_noticed(behind: bytes) -> None:
    async with running() as (house, server, port):
        client = await connect(port)
        client.say(post(b"wait"))
        await asyncio.sleep(0.05)
        client.say(behind)
        await asyncio.sleep(0.05)
        client.writer.transport.abort()
        await asyncio.wait_for(house.cancelled.wait(), 2.0)
        assert not server.open and house.bodies == [b"wait"]


@pytest.mark.parametrize(
    "behind", [post(b"x") * 40, post(b"y" * LIMIT) * 3, b"GET /" + b"z" * 2 * LIMIT + b" HTTP/1.1"]
)
async def test_what_waits_behind_a_request_is_bounded(behind: bytes) -> None:
    async with running() as (house, server, port):
        client = await connect(port)
        client.say(post(b"wait"))
        await asyncio.sleep(0.05)
        client.say(behind)
        await asyncio.sleep(0.05)
        (one,) = server.open
        assert len(one._waiting) <= module.MOST_WAITING + 1 and one._waiting_bytes <= 2 * LIMIT
        house.go.set()
        assert (await client.answer())[2] == b"wait"
