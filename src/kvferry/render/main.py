"""`kvferry render`: arguments, and the parent of the workers."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any

from kvferry.errors import ConfigError, KVFerryError, LaunchError
from kvferry.launch.engine import QUIET_ENV
from kvferry.launch.model import prepare
from kvferry.launch.spec import served_name
from kvferry.listener import bind, url_of
from kvferry.render.routes import Limits
from kvferry.render.worker import WorkerSpec, main

ENV = {
    **QUIET_ENV,
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Gives way to what the caller exported."""
START_S = 180.0
STOP_S = 5.0
QUICK_S = 20.0
"""A worker that ends sooner than this after its start is started again more and more slowly."""
MOST_QUICK = 3
"""So often in a row, and with no other worker left, it is given up."""
LONGEST_PAUSE_S = 30.0
LIMITS = Limits()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="smollm2, or the folder of a model; its weights are not read")
    add("--workers", type=int, default=1, metavar="N", help="processes, one core each (default: %(default)s)")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8400, help="shared by all workers; 0 takes a free one (default: %(default)s)")
    add("--session-ttl", type=float, default=LIMITS.session_ttl_s, metavar="S", help="(default: %(default)g)")
    add("--max-sessions", type=int, default=LIMITS.max_sessions, metavar="N", help="per worker (default: %(default)s)")
    add("--session-cpu-s", type=float, default=LIMITS.session_cpu_s, metavar="S", help="(default: %(default)g)")
    add("--max-body-bytes", type=int, default=LIMITS.max_body_bytes, metavar="N", help="(default: %(default)s)")
    add("--max-queue", type=int, default=LIMITS.max_queue, metavar="N", help="wait to be rendered, per worker")
    add("--big-body-bytes", type=int, default=LIMITS.big_bytes, metavar="N", help="rendered in a lane of their own")
    parser.epilog = f"{parser.epilog}\nall other arguments are vLLM's: --tool-call-parser, --reasoning-parser, ..."


def limits_of(args: argparse.Namespace) -> Limits:
    """Raises `ConfigError`."""
    for name in ("workers", "session_ttl", "max_sessions", "session_cpu_s", "max_body_bytes", "big_body_bytes"):
        if not getattr(args, name) > 0:
            raise ConfigError(f"{name}: {getattr(args, name)}", hint="expected more than 0")
    if args.max_queue < 0:
        raise ConfigError(f"max_queue: {args.max_queue}", hint="expected 0 or more")
    return Limits(
        session_ttl_s=args.session_ttl,
        max_sessions=args.max_sessions,
        session_cpu_s=args.session_cpu_s,
        max_body_bytes=args.max_body_bytes,
        max_queue=args.max_queue,
        big_bytes=args.big_body_bytes,
    )


@dataclass
class Worker:
    process: Any
    told: Connection
    started: float
    port: int = 0
    quick: int = 0
    """Ends in a row that came right after a start, before this one."""


class Workers:
    """Started, watched, started again when one dies, and stopped. Main thread only."""

    def __init__(self, spec: WorkerSpec, count: int) -> None:
        self._spec = spec
        # Forked from a process that has imported vLLM and started no thread: the next is there in a second.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["kvferry.render.preload"])
        self._workers: list[Worker] = []
        self._count = count

    def start(self, wake: socket.socket) -> bool:
        """False if it was interrupted. Raises `KVFerryError` if one does not start."""
        self._workers = [self._spawn() for _ in range(self._count)]
        return all(self._await_ready(worker, wake) for worker in self._workers)

    def _spawn(self) -> Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=main, args=(self._spec, theirs), name="kvferry-render")
        process.start()
        theirs.close()
        return Worker(process, ours, time.monotonic())

    def _await_ready(self, worker: Worker, wake: socket.socket) -> bool:
        ready = wait([worker.told, worker.process.sentinel, wake], timeout=START_S)
        if wake in ready:
            return False
        what, value = _received(worker.told) if worker.told in ready else ("", "")
        if what == "ready":
            worker.port = int(value)
            return True
        if what == "failed":
            raise ConfigError(value)
        worker.process.join(STOP_S)
        code: int | None = worker.process.exitcode
        said = f"ended with code {code}" if code is not None else f"did not start within {START_S:g} s"
        raise LaunchError(f"render: a worker {said}", hint="what it said stands above")

    def watch(self, wake: socket.socket) -> None:
        """Until a signal. Raises `KVFerryError` when a worker can't be kept up."""
        while True:
            ended = wait([wake, *(worker.process.sentinel for worker in self._workers)])
            if wake in ended:
                return
            for number, worker in enumerate(self._workers):
                if worker.process.sentinel not in ended:
                    continue
                worker.told.close()
                said = f"worker {number} (pid {worker.process.pid}) ended with code {worker.process.exitcode}"
                quick = worker.quick + 1 if time.monotonic() - worker.started < QUICK_S else 0
                if quick > MOST_QUICK and not self._alive():
                    raise LaunchError(f"render: {said} right after its start", hint="what it said stands above")
                print(f"kvferry render: {said}; another one starts", file=sys.stderr, flush=True)
                if quick > 1 and wait([wake], timeout=min(2.0 ** (quick - 2), LONGEST_PAUSE_S)):
                    return
                if not self._again(number, quick, wake):
                    return

    def _again(self, number: int, quick: int, wake: socket.socket) -> bool:
        """False if it was interrupted. One that doesn't come up ends nobody else's sessions."""
        worker = self._workers[number] = self._spawn()
        worker.quick = quick
        try:
            if not self._await_ready(worker, wake):
                return False
        except KVFerryError as error:
            worker.process.kill()
            if not self._alive():
                raise
            print(f"kvferry render: {error}", file=sys.stderr, flush=True)
            return True
        self.tell(number)
        return True

    def _alive(self) -> bool:
        return any(worker.port and worker.process.is_alive() for worker in self._workers)

    def tell(self, number: int) -> None:
        worker = self._workers[number]
        print(f"worker {number} pid {worker.process.pid} port {worker.port}", flush=True)

    def stop(self) -> None:
        for worker in self._workers:
            worker.process.terminate()
        until = time.monotonic() + STOP_S
        for worker in self._workers:
            worker.process.join(max(0.0, until - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.told.close()


def _received(told: Connection) -> tuple[str, str]:
    try:
        what, value = told.recv()
    except (EOFError, OSError):
        return "", ""
    return str(what), str(value)


def run(args: argparse.Namespace) -> int:
    """Raises `KVFerryError`: the caller prints it in one line and exits 1."""
    limits = limits_of(args)
    for name, value in ENV.items():
        os.environ.setdefault(name, value)
    model = prepare(args.model)
    rest = list(args.rest)
    if not any(one.partition("=")[0] == "--served-model-name" for one in rest):
        rest += ["--served-model-name", served_name(args.model, rest)]
    # Holds the port, and says which one it is; it never listens.
    with bind(args.host, args.port, shared=True) as held:
        port = held.getsockname()[1]
        workers = Workers(WorkerSpec(str(model), args.host, port, tuple(rest), limits), args.workers)
        wake, signalled = socket.socketpair()
        signalled.setblocking(False)

        def stop(number: int, frame: FrameType | None) -> None:
            signalled.send(b"\0")

        for asked in (signal.SIGINT, signal.SIGTERM):
            signal.signal(asked, stop)
        try:
            if workers.start(wake):
                for number in range(args.workers):
                    workers.tell(number)
                print(f"ready {url_of(held)}", flush=True)
                workers.watch(wake)
        finally:
            workers.stop()
    return 0
