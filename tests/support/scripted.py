"""Engines that do what a test says: HTTP front end and side channel on free loopback ports, everything recorded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import zmq
import zmq.asyncio
from aiohttp import web

from kvferry.protocol import codec
from kvferry.protocol.messages import (
    Abandon,
    Abandoned,
    Describe,
    Description,
    Reached,
    Refuse,
    Verdict,
    Watch,
    Why,
)
from kvferry.router.config import RouterConfig
from kvferry.router.main import Running
from kvferry.router.spec import EngineSpec, parse_spec

MODEL = "toy"
SOON = 5.0
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


class Call:
    """One POST as the engine saw it."""

    def __init__(self, request: web.Request, raw: bytes) -> None:
        self.request = request
        self.raw = raw
        try:
            self.body: Any = json.loads(raw)
        except (ValueError, RecursionError):
            self.body = None
        self.headers = request.headers.copy()
        self.at = time.monotonic()
        self.cancelled = asyncio.Event()
        self.cancelled_at = 0.0
        self.ended = asyncio.Event()

    @property
    def params(self) -> dict[str, Any]:
        return self.body["kv_transfer_params"]


Script = Callable[[Call], Awaitable[web.StreamResponse]]


class Engine:
    def __init__(self, role: str, host: str = "127.0.0.1") -> None:
        self.role = role
        self.host = host
        self.script: Script = prefill_ok if role == "prefill" else decode_ok
        self.calls: list[Call] = []
        self.models = [MODEL]
        self.key = ""
        self.health = 200
        self.metrics = ""
        self.settings: dict[str, Any] | None = None
        self.probes: list[tuple[str, Any]] = []
        self._news = asyncio.Condition()
        self.side = SideChannel(role, host)
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    def spec(self, **more: Any) -> EngineSpec:
        side = f"[{self.host}]:{self.side.port}" if ":" in self.host else f"{self.host}:{self.side.port}"
        extra = "".join(f",{key}={value}" for key, value in more.items())
        return parse_spec(f"{self.url},side_channel={side}{extra}")

    async def start(self, keepalive_timeout: float = 75.0) -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/sessions/settings", self._settings)
        app.router.add_post("/{tail:.*}", self._post)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.2, keepalive_timeout=keepalive_timeout
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, self.port).start()
        self.port = self._runner.addresses[0][1]
        await self.side.start()

    async def stop(self) -> None:
        await self._runner.cleanup()
        await self.side.stop()

    async def shut(self) -> None:
        """Its process is gone: connections are refused. The side channel stays."""
        await self._runner.cleanup()

    async def call(self, number: int = 0) -> Call:
        """The call of that number, once it is here."""
        async with asyncio.timeout(SOON), self._news:
            await self._news.wait_for(lambda: len(self.calls) > number)
        return self.calls[number]

    def _let_in(self, request: web.Request) -> bool:
        return not self.key or request.headers.get("Authorization") == f"Bearer {self.key}"

    async def _health(self, request: web.Request) -> web.Response:
        self.probes.append((request.path, request.headers.copy()))
        return web.Response(status=self.health if self._let_in(request) else 401)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics, status=200 if self.metrics and self._let_in(request) else 404)

    async def _settings(self, request: web.Request) -> web.Response:
        return web.json_response(self.settings, status=200 if self.settings is not None else 404)

    async def _models(self, request: web.Request) -> web.Response:
        self.probes.append((request.path, request.headers.copy()))
        if not self._let_in(request):
            return web.Response(status=401)
        return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]})

    async def _post(self, request: web.Request) -> web.StreamResponse:
        call = Call(request, await request.read())
        async with self._news:
            self.calls.append(call)
            self._news.notify_all()
        try:
            if not self._let_in(request):
                return web.json_response({"error": {"message": "no key", "code": 401}}, status=401)
            return await self.script(call)
        except (asyncio.CancelledError, ConnectionError):
            call.cancelled_at = time.monotonic()
            call.cancelled.set()
            raise
        finally:
            call.ended.set()


class SideChannel:
    """Answers Describe, Abandon and Why as an engine's first rank would. A `Watch` is kept until `reach` answers it, or
    is refused."""

    def __init__(self, role: str, host: str) -> None:
        self.port = 0
        self.host = host
        self.role = "producer" if role == "prefill" else "consumer"
        self.engine_id = f"{role}-engine"
        self.tp_size = 1
        self.load: dict[str, int] = {}
        self.verdict: tuple[str, str, str] = ("unknown", "", "")
        self.abandoned: dict[str, tuple[float, str]] = {}
        self.asked_why: list[str] = []
        self.watched: dict[str, tuple[bytes, int]] = {}
        self.refuses_watch = False
        self._news = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    async def start(self, port: int = 0) -> None:
        """Raises `zmq.ZMQError` if `port` is taken."""
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.ipv6 = ":" in self.host
        host = f"[{self.host}]" if ":" in self.host else self.host
        if port:
            try:
                self._socket.bind(f"tcp://{host}:{port}")
            except zmq.ZMQError:
                self._socket.close()
                raise
        self.port = port or self._socket.bind_to_random_port(f"tcp://{host}")
        self._task = asyncio.create_task(self._serve())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
            self._socket.close()

    async def abandon_of(self, transfer_id: str) -> tuple[float, str]:
        async with asyncio.timeout(SOON), self._news:
            await self._news.wait_for(lambda: transfer_id in self.abandoned)
        return self.abandoned[transfer_id]

    async def _serve(self) -> None:
        while True:
            peer, raw = await self._socket.recv_multipart()
            question = codec.decode(raw)
            if not isinstance(question, Watch) or self.refuses_watch:
                await self._socket.send_multipart([peer, codec.encode(await self._answer(question))])
            if isinstance(question, Watch):
                async with self._news:
                    self.watched[question.transfer_id] = (peer, question.percent)
                    self._news.notify_all()

    async def watch_of(self, transfer_id: str) -> int:
        """The percentage that the router waits for, once it has said so."""
        async with asyncio.timeout(SOON), self._news:
            await self._news.wait_for(lambda: transfer_id in self.watched)
        return self.watched[transfer_id][1]

    async def reach(self, transfer_id: str, *, ended: bool = False) -> None:
        """Answer its `Watch`."""
        reached = Reached(transfer_id=transfer_id, tokens=0 if ended else 50, of=100, ended=ended)
        await self._socket.send_multipart([self.watched[transfer_id][0], codec.encode(reached)])

    async def _answer(self, question: Any) -> Any:
        if isinstance(question, Describe):
            return Description(
                engine_id=self.engine_id,
                life=1,
                rank=0,
                tp_size=self.tp_size,
                role=self.role,
                mode="push",
                block_size=16,
                version="0",
                **self.load,
            )
        if isinstance(question, Abandon):
            async with self._news:
                self.abandoned[question.transfer_id] = (time.monotonic(), question.reason)
                self._news.notify_all()
            return Abandoned(transfer_id=question.transfer_id, known=True)
        if isinstance(question, Watch):
            return Refuse(code="unknown_question", reason="what is a Watch?")
        assert isinstance(question, Why)
        self.asked_why.append(question.transfer_id)
        state, code, reason = self.verdict
        return Verdict(transfer_id=question.transfer_id, state=state, code=code, reason=reason)


# -- scripts


def usage(prompt: int = 3, completion: int = 2, cached: int | None = None) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached}
    total = prompt + completion
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": total,
        "prompt_tokens_details": details,
    }


async def prefill_ok(call: Call) -> web.StreamResponse:
    return prefilled(call)


def prefilled(call: Call, **more: Any) -> web.Response:
    """P's good reply: its one token, and the transfer's parameters back."""
    choice = {"index": 0, "text": "x", "finish_reason": "length"}
    reply = {"id": "p", "object": "o", "choices": [choice], "usage": usage(3, 1)}
    return web.json_response(reply | {"kv_transfer_params": {"transfer_id": call.params.get("transfer_id")}} | more)


async def decode_ok(call: Call) -> web.StreamResponse:
    """Says back the prompt that it got, streamed or whole."""
    text = json.dumps(call.body.get("prompt", call.body.get("messages")))
    if call.body.get("stream"):
        events = [{"choices": [{"index": 0, "text": text}]}, {"choices": [{"index": 0, "text": "!"}]}]
        if (call.body.get("stream_options") or {}).get("include_usage"):
            events.append({"choices": [], "usage": usage()})
        return await stream(call, [f"data: {json.dumps(event)}\n\n".encode() for event in events] + [DONE])
    n = call.body.get("n") or 1
    choices = [{"index": i, "text": text, "finish_reason": "length"} for i in range(n)]
    return web.json_response({"id": "d", "object": "o", "choices": choices, "usage": usage(3, 2 * n)})


DONE = b"data: [DONE]\n\n"


def event(text: str) -> bytes:
    return f"data: {json.dumps({'choices': [{'index': 0, 'text': text}]})}\n\n".encode()


async def begin_stream(call: Call) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(call.request)
    return response


async def stream(call: Call, pieces: list[bytes]) -> web.StreamResponse:
    response = await begin_stream(call)
    for piece in pieces:
        await response.write(piece)
    await response.write_eof()
    return response


async def hang(call: Call) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("never")


def refuse(status: int, body: Any) -> Script:
    async def script(call: Call) -> web.StreamResponse:
        return web.json_response(body, status=status)

    return script


def after(gate: asyncio.Event, script: Script) -> Script:
    """`script`, once the gate is open."""

    async def held(call: Call) -> web.StreamResponse:
        await gate.wait()
        return await script(call)

    return held


async def slam(call: Call) -> web.StreamResponse:
    """Close the socket without a byte."""
    assert call.request.transport is not None
    call.request.transport.abort()
    return web.Response()


# -- the router over them


class Pair:
    """One P and one D (more of each on demand), a router over them, a client."""

    def __init__(self, prefill: list[Engine], decode: list[Engine], running: Running) -> None:
        self.prefills, self.decodes = prefill, decode
        self.running = running
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30), auto_decompress=False)

    @property
    def p(self) -> Engine:
        return self.prefills[0]

    @property
    def d(self) -> Engine:
        return self.decodes[0]

    @property
    def url(self) -> str:
        return self.running.url

    async def post(self, route: str, body: Any, **headers: str) -> tuple[int, Any, bytes]:
        """Status, headers, body."""
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        async with self.session.post(self.url + route, json=body, headers=named) as response:
            return response.status, response.headers, await response.read()

    async def complete(self, **body: Any) -> tuple[int, Any, bytes]:
        return await self.post(COMPLETIONS, {"model": MODEL, "prompt": "hi", "max_tokens": 4} | body)

    async def raw(self, body: Any, route: str = COMPLETIONS) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A raw connection with the request sent."""
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        payload = json.dumps(body).encode()
        head = f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}"
        writer.write(head.encode() + b"\r\n\r\n" + payload)
        await writer.drain()
        return reader, writer


@contextlib.asynccontextmanager
async def serving(
    *,
    prefill: list[Engine] | None = None,
    decode: list[Engine] | None = None,
    ready: bool = True,
    spec: dict[str, Any] | None = None,
    decode_spec: dict[str, Any] | None = None,
    **config: Any,
) -> AsyncIterator[Pair]:
    """A started pair; retries are off if not told. Those of its engines that are not started yet (port 0) are started
    here; all are stopped at the end."""
    prefills = [Engine("prefill")] if prefill is None else prefill
    decodes = [Engine("decode")] if decode is None else decode
    engines = [*prefills, *decodes]
    before = asyncio.all_tasks()
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            if engine.port == 0:
                await engine.start()
            stack.push_async_callback(engine.stop)
        settings = RouterConfig(
            port=config.pop("port", 0),
            prefill=tuple(engine.spec(**(spec or {})) for engine in prefills),
            decode=tuple(engine.spec(**(decode_spec or {})) for engine in decodes),
            **{"retries": 0, **config},
        )
        running = await stack.enter_async_context(Running(settings))
        if ready:
            async with asyncio.timeout(SOON):
                await running.pool.until_ready()
        pair = Pair(prefills, decodes, running)
        stack.push_async_callback(pair.session.close)
        yield pair
    async with asyncio.timeout(SOON):
        while left := {task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()}:
            await asyncio.wait(left)


async def streams_on(pair: Pair, engine: Engine, count: int, gate: asyncio.Event) -> list[asyncio.Task[Any]]:
    """So many streams that have begun there, and end when the gate opens."""

    async def held(call: Call) -> web.StreamResponse:
        response = await begin_stream(call)
        await response.write(event("a"))
        await gate.wait()
        await response.write(event("b") + DONE)
        return response

    engine.script = held
    seen = len(engine.calls)
    asked = []
    while len(engine.calls) < seen + count:
        asked.append(asyncio.create_task(pair.complete(stream=True)))
        await asyncio.sleep(0.02)
    return asked


def error_of(raw: bytes) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(raw)["error"]
    assert {"message", "type", "param", "code"} <= facts.keys()
    return facts
