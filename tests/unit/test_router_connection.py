"""The router's HTTP/1.1 connection to an engine, before a server that writes exactly what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop
from multidict import CIMultiDict

from kvferry.router.http import connections as module
from kvferry.router.http.connection import BUFFER_BYTES, MAX_HEAD_BYTES, Broken, Response
from kvferry.router.http.connections import Connections, Unreachable

OK = b"HTTP/1.1 200 OK\r\nContent-Type: Text/Event-Stream; charset=utf-8\r\n"
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Runs `script` for each request whose head and body have come; counts connections."""

    def __init__(self, script: Script) -> None:
        self.script, self.opened, self.requests = script, 0, []
        self.closed = asyncio.Event()
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next((int(x[16:]) for x in head.split(b"\r\n") if x.startswith(b"Content-Length: ")), 0)
                self.requests.append(head + await reader.readexactly(length))
                await self.script(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closed.set()
            writer.close()


@asynccontextmanager
async def served(script: Script) -> AsyncIterator[tuple[Server, str, Connections]]:
    server, connections = Server(script), Connections(2.0)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    try:
        yield server, f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", connections
    finally:
        connections.close()
        listener.close()


async def ask(connections: Connections, base: str, body: bytes = b"{}") -> Response:
    response = await connections.request("POST", base, "/v1/completions", CIMultiDict({"X-A": "1"}), body)
    return response


def writes(*pieces: bytes, close: bool = False) -> Script:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if close:
            writer.close()

    return script


async def test_request_bytes_and_a_body_by_length() -> None:
    async with served(writes(OK + b"Content-Length: 5\r\n\r\nhel", b"lo")) as (server, base, connections):
        response = await ask(connections, base)
        assert (response.status, response.content_type, response.framed) == (200, "text/event-stream", True)
        assert await response.read() == (b"hello", False)
        host = base.removeprefix("http://").encode()
        assert server.requests == [
            b"POST /v1/completions HTTP/1.1\r\nHost: " + host + b"\r\nX-A: 1\r\nContent-Length: 2\r\n\r\n{}"
        ]


@pytest.mark.parametrize("cut", range(1, 60, 7))
async def test_head_and_chunks_cut_anywhere(cut: int) -> None:
    raw = OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n1;x=y\r\n!\r\n0\r\nTrailer: t\r\n\r\n"
    pieces = [raw[at : at + cut] for at in range(0, len(raw), cut)]
    async with served(writes(*pieces)) as (_, base, connections):
        response = await ask(connections, base)
        assert await response.read() == (b"hello!", False)


async def test_a_connection_is_used_again_and_only_after_its_answer() -> None:
    async with served(writes(OK + b"Content-Length: 2\r\n\r\nhi")) as (server, base, connections):
        for _ in range(3):
            assert await (await ask(connections, base)).read() == (b"hi", False)
        assert server.opened == 1
        first, second = await asyncio.gather(ask(connections, base), ask(connections, base))
        assert [await one.read() for one in (first, second)] == [(b"hi", False)] * 2
        assert server.opened == 2


async def test_an_answer_that_says_close_ends_its_connection() -> None:
    async with served(writes(OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nhi")) as (server, base, connections):
        for _ in range(2):
            assert await (await ask(connections, base)).read() == (b"hi", False)
        assert server.opened == 2


async def test_a_body_without_framing_ends_with_its_connection() -> None:
    async with served(writes(OK + b"\r\nall of", b" it", close=True)) as (_, base, connections):
        response = await ask(connections, base)
        assert await response.read() == (b"all of it", False)
        assert not response.framed


async def test_a_hundred_comes_before_the_answer() -> None:
    script = writes(b"HTTP/1.1 100 Continue\r\nX-Early: 1\r\n\r\n", OK + b"Content-Length: 2\r\n\r\nhi")
    async with served(script) as (_, base, connections):
        response = await ask(connections, base)
        assert await response.read() == (b"hi", False)
        assert "X-Early" not in response.headers


async def test_broken_before_and_in_the_answer() -> None:
    async with served(writes(close=True)) as (_, base, connections):
        with pytest.raises(Broken) as before:
            await ask(connections, base)
        assert before.value.args[1:] == (False, False)
    async with served(writes(OK + b"Content-Length: 9\r\n\r\nhel", close=True)) as (_, base, connections):
        response = await ask(connections, base)
        assert await response.some() == b"hel"
        with pytest.raises(Broken, match="closed"):
            await response.some()


@pytest.mark.parametrize("said", [b"SSH-2.0-OpenSSH_9\r\n", OK + b"X: " + b"y" * (MAX_HEAD_BYTES + 1) + b"\r\n\r\n"])
async def test_what_is_no_answer_is_refused(said: bytes) -> None:
    async with served(writes(said)) as (server, base, connections):
        with pytest.raises(Broken, match="HTTP"):
            await ask(connections, base)
        await asyncio.wait_for(server.closed.wait(), 2.0)


TWO = OK + b"Content-Length: 2\r\n\r\nhi"


@pytest.mark.parametrize(
    "more", [b"H", OK + b"X-Of-Another: 1\r\nX-B: ", OK + b"Content-Length: 900\r\n\r\nsecret", TWO, b"lo", b"\r\n"]
)
async def test_what_comes_behind_an_answer_is_never_part_of_the_next(more: bytes) -> None:
    async with served(writes(TWO + more)) as (server, base, connections):
        for _ in range(3):
            response = await ask(connections, base)
            assert (await response.read(), "X-Of-Another" in response.headers) == ((b"hi", False), False)
        assert server.opened == (1 if more == b"\r\n" else 3)


@pytest.mark.parametrize("said", [b"Connection: upgrade\r\nUpgrade: websocket\r\n", b""])
async def test_another_protocol_is_no_answer(said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with served(writes(b"HTTP/1.1 101 Switching\r\n" + said + b"\r\n")) as (_, base, connections):
        with pytest.raises(Broken, match="HTTP"):
            await ask(connections, base)
    assert not caplog.records


CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n"
INFORM = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.mark.parametrize(
    ("begun", "more"),
    [
        (OK + b"X: ", b"y" * 50_000),
        (b"HTTP/1.1 200 ", b"y" * 50_000),
        (OK, b"y" * 50_000),
        (CHUNKED + b"0\r\nX: ", b"y" * 50_000),
        (CHUNKED + b"1;", b"y" * 50_000),
        (INFORM, INFORM * 2000),
    ],
)
async def test_what_never_ends_is_cut(begun: bytes, more: bytes) -> None:
    async with served(writes(begun, *[more] * 20)) as (server, base, connections):
        with pytest.raises(Broken, match="HTTP"):
            await (await ask(connections, base)).read()
        await asyncio.wait_for(server.closed.wait(), 2.0)


async def test_trailers_of_an_answer_are_no_headers() -> None:
    async with served(writes(CHUNKED + b"0\r\nX-T: 1\r\n\r\n")) as (_, base, connections):
        response = await ask(connections, base)
        assert await response.read() == (b"hi", False)
        assert "X-T" not in response.headers


async def test_unreachable_says_why() -> None:
    async with served(writes()) as (_, base, connections):
        pass
    with pytest.raises(Unreachable, match="refused"):
        await ask(connections, base)


@pytest.mark.parametrize("when", ["head", "body"])
async def test_whoever_lets_go_closes_the_connection(when: str) -> None:
    head = OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n" if when == "body" else b""
    async with served(writes(head)) as (server, base, connections):
        if when == "body":
            response = await ask(connections, base)
            assert await response.some() == b"x"
            response.close()
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ask(connections, base), 0.1)
        await asyncio.wait_for(server.closed.wait(), 2.0)


async def test_idle_connections_are_dropped_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.05)
    monkeypatch.setattr(module, "SWEEP_S", 0.02)
    async with served(writes(OK + b"Content-Length: 2\r\n\r\nhi")) as (server, base, connections):
        await (await ask(connections, base)).read()
        await asyncio.wait_for(server.closed.wait(), 2.0)
        [at] = connections._bases.values()
        assert not at.kept._since
        await asyncio.sleep(0.05)
        assert at.kept._sweep is None, "with nothing to look through there is no timer"
        await (await ask(connections, base)).read()
        assert (server.opened, len(at.kept._since)) == (2, 1) and at.kept._sweep is not None


async def test_one_that_was_idle_for_too_long_is_not_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.05)
    async with served(writes(OK + b"Content-Length: 2\r\n\r\nhi")) as (server, base, connections):
        for _ in range(2):
            await (await ask(connections, base)).read()
        assert server.opened == 1
        await asyncio.sleep(0.1)  # below SWEEP_S: nobody has looked yet
        await (await ask(connections, base)).read()
        assert server.opened == 2


async def test_a_slow_reader_stops_the_socket_not_memory() -> None:
    written = 0

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(OK + b"\r\n")
        for _ in range(2000):
            writer.write(b"z" * 32768)
            written += 32768
            await writer.drain()
        writer.close()

    async with served(endless) as (_, base, connections):
        response = await ask(connections, base)
        before = -1
        while before != written:
            before = written
            await asyncio.sleep(0.1)
        assert response._held <= BUFFER_BYTES + 256 * 1024
        assert written < 2000 * 32768
        body, _ = await response.read()
        assert body == b"z" * (2000 * 32768)


async def test_piped_pieces_come_in_order_and_stop_where_the_sink_says() -> None:
    pieces = [b"%d;" % number for number in range(400)]
    script = writes(OK + b"Transfer-Encoding: chunked\r\n\r\n", *(b"%x\r\n%b\r\n" % (len(x), x) for x in pieces))

    async def whole(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await script(reader, writer)
        writer.write(b"0\r\n\r\n")

    async with served(whole) as (server, base, connections):
        response = await ask(connections, base)
        got: list[list[bytes]] = []

        def sink(read: list[bytes]) -> bool:
            got.append(read)
            return len(got) % 3 != 0

        stops = 0
        while await response.pipe(sink):
            stops += 1
        assert [piece for read in got for piece in read] == pieces, "each chunk is a piece, whatever came in one read"
        assert stops == len(got) // 3
        assert await (await ask(connections, base)).some()
        assert server.opened == 1


async def test_a_sink_that_wants_no_more_at_the_end_holds_up_nobody_else() -> None:
    """The body's end came in the same read: the connection may be another request's by then."""
    piped = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"Content-Length: 2\r\n\r\n")
        await writer.drain()
        await piped.wait()
        writer.write(b"hi")

    async with served(script) as (server, base, connections):
        first = await ask(connections, base)
        piping = asyncio.create_task(first.pipe(lambda read: False))
        await asyncio.sleep(0)
        piped.set()
        assert await piping
        async with asyncio.timeout(5):
            assert await (await ask(connections, base)).read() == (b"hi", False)
        assert server.opened == 1


def test_on_the_loop_that_the_command_runs_on() -> None:
    async def one() -> tuple[bytes, bool]:
        async with served(writes(OK + b"Content-Length: 2\r\n\r\nhi")) as (_, base, connections):
            return await (await ask(connections, base)).read()

    assert uvloop.run(one()) == (b"hi", False)


async def test_a_connection_that_is_taken_again_at_once_answers_both() -> None:
    """Its answer is whole in one read: it is kept before the task that asked has run again."""
    async with served(writes(OK + b"Content-Length: 2\r\n\r\nhi")) as (_, base, connections):

        async def often() -> int:
            answers = 0
            for _ in range(40):
                answers += (await (await ask(connections, base)).read()) == (b"hi", False)
            return answers

        assert await asyncio.wait_for(asyncio.gather(*(often() for _ in range(20))), 20.0) == [40] * 20


async def test_a_request_on_a_kept_connection_is_sent_before_it_is_waited_for() -> None:
    async with served(writes(OK + b"Content-Length: 2\r\n\r\nhi")) as (server, base, connections):
        await (await ask(connections, base)).read()
        asking = connections.ask("POST", base, "/v1/completions", CIMultiDict(), b"second")
        async with asyncio.timeout(5):
            while len(server.requests) < 2:
                await asyncio.sleep(0.01)
        assert server.requests[1].endswith(b"second")
        await asyncio.sleep(0.05)
        assert await (await asking.answer()).read() == (b"hi", False)
        asking.drop()
        assert await (await ask(connections, base)).read() == (b"hi", False)
        assert server.opened == 1, "dropping what was answered closes nothing"


async def test_a_request_that_nobody_waits_for_ends_its_connection() -> None:
    answer, silent = writes(OK + b"Content-Length: 2\r\n\r\nhi"), asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if server.requests[-1].endswith(b"second"):
            await silent.wait()
        await answer(reader, writer)

    async with served(script) as (server, base, connections):
        await (await ask(connections, base)).read()
        asking = connections.ask("POST", base, "/v1/completions", CIMultiDict(), b"second")
        asking.drop()
        silent.set()
        async with asyncio.timeout(5):
            await server.closed.wait()
        assert await (await ask(connections, base)).read() == (b"hi", False)
        assert server.opened == 2
