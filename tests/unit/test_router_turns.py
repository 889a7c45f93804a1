"""Turns: what is new goes before what is relayed, and nothing of an answer is lost or swapped by waiting."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from kvferry.router.http.connection import BUFFER_BYTES, Broken, Connection, Response
from kvferry.router.http.turns import AT_ONCE, Turns


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.reads = True

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        pass

    def abort(self) -> None:
        pass

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


def taken() -> Turns:
    """Nothing more goes at once: time stands still."""
    turns = Turns(lambda: 0.0)
    for _ in range(AT_ONCE):
        turns.ask(lambda: None)
    return turns


async def asked(turns: Turns) -> tuple[Connection, FakeTransport, Response]:
    """A connection whose answer's head has come."""
    connection, transport = Connection(lambda _: None, lambda _: None, turns), FakeTransport()
    connection.connection_made(transport)
    asking = connection.answer(connection.send(b""))
    await asyncio.sleep(0)
    connection.data_received(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    return connection, transport, await asking


def chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


async def test_what_is_new_waits_for_a_few_only() -> None:
    turns, done = taken(), list[int]()
    for number in range(3 * AT_ONCE):
        turns.ask(lambda number=number: done.append(number))
    seen = [len(done)]
    for _ in range(4):
        await asyncio.sleep(0)
        seen.append(len(done))
    assert seen == [0, AT_ONCE, 2 * AT_ONCE, 3 * AT_ONCE, 3 * AT_ONCE]
    assert done == sorted(done)


def test_the_first_few_of_a_pass_go_at_once() -> None:
    async def passes() -> list[int]:
        done, seen = list[int](), list[int]()
        turns = Turns(lambda: float(len(seen)))  # another in each pass: the loop's own may tick in the middle of one
        for _ in range(3):
            for number in range(AT_ONCE + 2):
                turns.ask(lambda number=number: done.append(number))
            seen.append(len(done))
            await asyncio.sleep(0.005)
            seen.append(len(done))
        assert done == [*range(AT_ONCE + 2)] * 3
        return seen

    each = AT_ONCE + 2
    assert uvloop.run(passes()) == [AT_ONCE, each, each + AT_ONCE, 2 * each, 2 * each + AT_ONCE, 3 * each]


async def test_what_is_read_before_the_turn_goes_out_with_it() -> None:
    turns, got = taken(), list[list[bytes]]()
    connection, _, response = await asked(turns)
    piping = asyncio.create_task(response.pipe(lambda read: got.append(read) or True))
    await asyncio.sleep(0)
    connection.data_received(chunk(b"a"))
    connection.data_received(chunk(b"b") + chunk(b"c"))
    assert got == []
    await asyncio.sleep(0)
    assert got == [[b"a", b"b", b"c"]]
    connection.data_received(chunk(b"d"))
    await asyncio.sleep(0)
    assert got[1:] == [[b"d"]] and not piping.done()
    connection.data_received(b"0\r\n\r\n")
    assert await piping is False


@pytest.mark.parametrize("broken", [False, True])
async def test_an_answer_that_ends_before_its_turn_is_whole(broken: bool) -> None:
    turns, got = taken(), list[bytes]()
    connection, _, response = await asked(turns)
    piping = asyncio.create_task(response.pipe(lambda read: got.extend(read) or True))
    await asyncio.sleep(0)
    connection.data_received(chunk(b"last"))
    if broken:
        connection.connection_lost(ConnectionResetError("gone"))
        with pytest.raises(Broken, match="gone"):
            await piping
    else:
        connection.data_received(b"0\r\n\r\n")
        assert await piping is False
    assert got == [b"last"]
    for _ in range(3):
        await asyncio.sleep(0)
    assert got == [b"last"], "its turn, which comes later, finds nothing"


async def test_a_full_sink_stops_the_reading_until_it_is_piped_again() -> None:
    turns, got = Turns(), list[bytes]()
    connection, transport, response = await asked(turns)
    piping = asyncio.create_task(response.pipe(lambda read: bool(got.extend(read))))
    await asyncio.sleep(0)
    connection.data_received(chunk(b"a"))
    assert await piping is True
    assert (got, transport.reads) == ([b"a"], False)
    piping = asyncio.create_task(response.pipe(lambda read: got.extend(read) or True))
    await asyncio.sleep(0)
    assert transport.reads
    connection.data_received(chunk(b"b") + b"0\r\n\r\n")
    assert await piping is False
    assert got == [b"a", b"b"]


async def test_what_waits_for_a_turn_is_bounded() -> None:
    turns, got = taken(), list[bytes]()
    connection, transport, response = await asked(turns)
    piping = asyncio.create_task(response.pipe(lambda read: got.extend(read) or True))
    await asyncio.sleep(0)
    connection.data_received(chunk(b"z" * (BUFFER_BYTES + 1)))
    assert not transport.reads
    await asyncio.sleep(0)
    assert transport.reads and len(got[0]) == BUFFER_BYTES + 1
    piping.cancel()
    await asyncio.gather(piping, return_exceptions=True)


async def test_one_that_raises_stops_nobody_else_and_ends_as_broken() -> None:
    turns, got, told = taken(), list[bytes](), list[str]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(str(context["exception"])))

    def raises(read: list[bytes]) -> bool:
        raise RuntimeError("no room on the disk")

    first, second = await asked(turns), await asked(turns)
    broken = asyncio.create_task(first[2].pipe(raises))
    good = asyncio.create_task(second[2].pipe(lambda read: got.extend(read) or True))
    await asyncio.sleep(0)
    first[0].data_received(chunk(b"a"))
    second[0].data_received(chunk(b"b"))
    with pytest.raises(Broken, match="no room on the disk"):
        await broken
    for number in range(2 * AT_ONCE):
        second[0].data_received(chunk(b"%d" % number))
        await asyncio.sleep(0)
    assert got == [b"b", *(b"%d" % number for number in range(2 * AT_ONCE))]
    assert told == ["no room on the disk"]
    good.cancel()
    await asyncio.gather(good, return_exceptions=True)
