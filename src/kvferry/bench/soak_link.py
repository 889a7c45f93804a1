"""A TCP relay between an engine's side channel and whoever dials it: the link that gets slow, stands still, or breaks.

Event loop's thread. Where the engine is dead the relay must not listen either: a port that answers says that somebody
lives there.
"""

from __future__ import annotations

import asyncio

from kvferry.launch.ports import LOOPBACK, Ports

_CHUNK = 1 << 16


class Link:
    """Listens on `port`, a free one, for the engine's `target` port on loopback.

    `delay_s`: each piece of at most 64 KiB takes so long, in either direction.
    """

    def __init__(self, target: int, ports: Ports) -> None:
        self.target, self.port = target, ports.free()
        self.delay_s = 0.0
        self._server: asyncio.Server | None = None
        self._flows = asyncio.Event()
        self._flows.set()
        self._open: set[asyncio.StreamWriter] = set()
        self._relays: set[asyncio.Task[None]] = set()

    async def up(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._relay, LOOPBACK, self.port)

    def down(self) -> None:
        """Nobody listens any more, and all connections break."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()

    async def close(self) -> None:
        self.down()
        self.flow()
        await asyncio.gather(*self._relays)

    def cut(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    def hold(self) -> None:
        """Nothing gets through until `flow`; the connections stay."""
        self._flows.clear()

    def flow(self) -> None:
        self.delay_s = 0.0
        self._flows.set()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relay = asyncio.current_task()
        assert relay is not None
        self._relays.add(relay)
        self._open.add(writer)
        try:
            await self._join(reader, writer)
        except OSError:
            pass  # the engine doesn't listen, or the connection broke: so does the other half
        finally:
            writer.transport.abort()
            self._open.discard(writer)
            self._relays.discard(relay)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(LOOPBACK, self.target)
        self._open.add(there_writer)
        ways = [asyncio.create_task(self._pump(*way)) for way in ((reader, there_writer), (there_reader, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            there_writer.transport.abort()
            self._open.discard(there_writer)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            await self._flows.wait()
            writer.write(data)
            await writer.drain()
