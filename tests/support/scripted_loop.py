"""An engine loop that says what a test tells it to, in front of the real server; and a client for event streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
from aiohttp import web

from kvferry.engine.loop import Stats
from kvferry.engine.request import FinishReason, Output, Request
from kvferry.engine.server import Server, ServerConfig
from kvferry.engine.text import Builtin
from kvferry.errors import ConfigError

VOCAB = 1000
MAX_LEN = 64
SOON = 5.0
BUILTIN = Builtin(VOCAB)


class ScriptedLoop:
    def __init__(self, server: Server) -> None:
        self._server = server
        self._added: asyncio.Queue[Request] = asyncio.Queue()
        self.death: BaseException | None = None
        self.aborted: list[str] = []
        self.news = asyncio.Event()
        self.faults: list[Mapping[str, Any]] = []
        self.numbers = Stats()

    def add(self, request: Request) -> None:
        self._added.put_nowait(request)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.news.set()

    def stats(self) -> Stats:
        return self.numbers

    def inject(self, fault: Mapping[str, Any]) -> None:
        if fault.get("kind") != "freeze":
            raise ConfigError(f"fault: unknown kind {fault.get('kind')!r}")
        self.faults.append(fault)

    # -- the test's side

    async def next(self) -> Request:
        return await asyncio.wait_for(self._added.get(), SOON)

    def say(
        self, request: Request, text: str = "", end: FinishReason | None = None, *, ids: Any = None, **more: Any
    ) -> None:
        tokens = tuple(BUILTIN.encode(text) if ids is None else ids)
        self._server.deliver([Output(request.request_id, tokens, end, **more)])

    async def until_aborted(self, count: int = 1) -> list[str]:
        async with asyncio.timeout(SOON):
            while len(self.aborted) < count:
                self.news.clear()
                await self.news.wait()
        return self.aborted


class Front:
    """One server that listens."""

    def __init__(self, server: Server, engine: ScriptedLoop, url: str, http: aiohttp.ClientSession) -> None:
        self.server = server
        self.engine = engine
        self.url = url
        self.http = http

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def post(self, path: str, body: Any, **headers: str) -> asyncio.Task[tuple[int, Any]]:
        """Status and JSON, later."""

        async def ask() -> tuple[int, Any]:
            async with self.http.post(self.url + path, json=body, headers=headers) as response:
                raw = await response.read()
                return response.status, json.loads(raw) if raw else None

        return asyncio.create_task(ask())

    async def get(self, path: str) -> tuple[int, str]:
        async with self.http.get(self.url + path) as response:
            return response.status, await response.text()

    def stream(self, path: str, body: Any) -> Stream:
        return Stream(self.http.post(self.url + path, json=body | {"stream": True}))


class Stream:
    """The events of one streamed reply: dicts, and at last the text `[DONE]`. `async with`."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._opening: asyncio.Task[aiohttp.ClientResponse] | None = None

    async def __aenter__(self) -> Stream:
        self._opening = asyncio.create_task(self._call.__aenter__())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._opening is not None
        if not self._opening.done():
            self._opening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            (await self._opening).close()

    async def response(self) -> aiohttp.ClientResponse:
        assert self._opening is not None
        return await asyncio.wait_for(asyncio.shield(self._opening), SOON)

    async def next(self) -> Any:
        response = await self.response()
        async with asyncio.timeout(SOON):
            line = await response.content.readuntil(b"\n\n")
        assert line.startswith(b"data: "), line
        return "[DONE]" if line == b"data: [DONE]\n\n" else json.loads(line[6:])

    async def text(self) -> str:
        """Of the next event, which has one choice."""
        (choice,) = (await self.next())["choices"]
        return str(choice["text"] if "text" in choice else choice["delta"]["content"])

    async def rest(self) -> list[Any]:
        """All events up to the end of the reply."""
        async with asyncio.timeout(SOON):
            raw = await (await self.response()).content.read()
        events = raw.decode().split("\n\n")
        assert events.pop() == ""
        return [event[6:] if event == "data: [DONE]" else json.loads(event[6:]) for event in events]


@contextlib.asynccontextmanager
async def serving(*, api_keys: tuple[str, ...] = (), faults: bool = False) -> AsyncIterator[Front]:
    config = ServerConfig(
        names=("toy", "other"),
        max_model_len=MAX_LEN,
        vocab_size=VOCAB,
        api_keys=api_keys,
        faults=faults,
        cache={"block_size": 16, "num_gpu_blocks": 7},
    )
    server = Server(config, BUILTIN)
    server.engine = engine = ScriptedLoop(server)
    runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    async with aiohttp.ClientSession() as http:
        yield Front(server, engine, f"http://127.0.0.1:{port}", http)
    await runner.cleanup()
    assert not server.busy, "requests are left behind"
