"""One render worker: vLLM's frontend, sessions in front of it, an HTTP server. A process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from kvferry.errors import KVFerryError
from kvferry.listener import bind
from kvferry.render.routes import Front, Limits
from kvferry.render.server import Server

SWEEP_S = 5.0
"""Longest time between two looks for sessions that have expired."""
DRAIN_S = 1.0


@dataclass(frozen=True)
class WorkerSpec:
    """`rest`: vLLM's own arguments. `port`: shared by all workers."""

    model: str
    host: str
    port: int
    rest: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)


def main(spec: WorkerSpec, told: Connection) -> None:
    """The process. Says ('ready', own port) or ('failed', one line) to its parent, and ends when that is gone."""
    os.dup2(2, 1)  # the parent's last line of output is not vLLM's
    try:
        with asyncio.Runner(loop_factory=_loop) as runner:
            runner.run(serve(spec, told))
    except KVFerryError as error:
        told.send(("failed", str(error)))
        raise SystemExit(1) from None


def _loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


async def serve(spec: WorkerSpec, told: Connection) -> None:
    """Until SIGTERM, SIGINT or the end of the parent. Raises `KVFerryError`."""
    from kvferry.render.frontend import frontend

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    with bind(spec.host, spec.port, shared=True) as shared, bind(spec.host, 0) as own:
        port = own.getsockname()[1]
        async with frontend(spec.model, list(spec.rest)) as built:
            front = Front(built.app, spec.limits, port, built.settings, built.keys)
            front.metrics.watch(built.requests)
            server = Server(front, spec.limits.max_body_bytes)
            for listener in (shared, own):
                await server.listen(listener)
            told.send(("ready", port))
            loop.add_reader(told.fileno(), stop.set)
            sweeper = asyncio.create_task(_sweep(front, server))
            try:
                await stop.wait()
            finally:
                loop.remove_reader(told.fileno())
                sweeper.cancel()
                await server.close(DRAIN_S)
                front.table.clear()


async def _sweep(front: Front, server: Server) -> None:
    while True:
        await asyncio.sleep(SWEEP_S)
        front.sweep()
        server.sweep()
