"""P and D in processes of their own over real NIXL and ZMQ; killed, stopped and cut off for real. Fixtures `start` and
`shm` are for conftest.py to import."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from nixl_tier import BLOCK, WAIT_S, Child, free_port, rank_child

from kvferry.transfer import commands as cmd

TOKENS = 2 * BLOCK
BIG = 16 * 1024
"""Bytes of a token's head that make a transfer of all blocks 64 MiB: more than the kernel's buffers take."""


def may_copy_between_processes() -> bool:
    """Whether the kernel lets one process read another's memory, as UCX does within a machine."""

    class Area(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]

    source, target = ctypes.create_string_buffer(b"x"), ctypes.create_string_buffer(1)
    other = os.fork()
    if not other:
        signal.pause()
    try:
        ends = [ctypes.byref(Area(ctypes.addressof(one), 1)) for one in (target, source)]
        return ctypes.CDLL(None).process_vm_readv(other, ends[0], 1, ends[1], 1, 0) == 1 and target.raw == b"x"
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)


class Relay:
    """What a side channel goes through: it can be blocked, or slow. One thread; ends with `close`."""

    def __init__(self, target: int) -> None:
        self.blocked = False
        self.delay_s = 0.0
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._ways: dict[socket.socket, socket.socket] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Every connection that stands."""
        for one in list(self._ways):
            one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closing = True
        self._thread.join(5)
        for one in (self._listener, *self._ways):
            one.close()

    def _run(self) -> None:
        while not self._closing:
            if self.blocked:
                time.sleep(0.01)
                continue
            for one in select.select([self._listener, *self._ways], [], [], 0.02)[0]:
                if one is self._listener:
                    self._accept()
                elif one in self._ways:
                    self._forward(one)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            near.close()
            return
        self._ways[near], self._ways[far] = far, near

    def _forward(self, one: socket.socket) -> None:
        other = self._ways[one]
        try:
            data = one.recv(65536)
            time.sleep(self.delay_s)
            if data:
                other.sendall(data)
                return
        except OSError:
            pass  # reset: as a close
        for end in (one, other):
            del self._ways[end]
            end.close()


class Pair:
    """`relay`: D reaches P's side channel through `self.relay`. `config`: of both ranks."""

    def __init__(self, mode: str = "push", relay: bool = False, **config: Any) -> None:
        self.mode, self.config = mode, config
        self.p_port, self.d_port = free_port(), free_port()
        self.relay = Relay(self.p_port) if relay else None
        self.dialled = self.relay.port if self.relay else self.p_port
        self.pids: list[int] = []
        self.p, self.d = self.start_p(), self.start_d()
        self.are_up()

    def start_p(self) -> Child:
        return self._started(rank_child, "P", "producer", self.p_port, [], self.mode, self.config)

    def start_d(self) -> Child:
        peers = [f"127.0.0.1:{self.dialled}"]
        return self._started(rank_child, "D", "consumer", self.d_port, peers, self.mode, self.config)

    def _started(self, *how: Any) -> Child:
        child = Child(*how)
        self.pids.append(child.process.pid)
        return child

    def are_up(self) -> None:
        assert self.p.receive() == "ready" and self.d.receive() == "ready"
        self.d.ask("up", 1)

    # -- what engines say -------------------------------------------------------------------------------------------

    def land(self, tid: str, blocks: tuple[int, ...], tokens: int) -> None:
        self.d.send("submit", cmd.Land(tid, tid, self.mode, "127.0.0.1", self.dialled, "P", 1, 0, tokens, blocks))

    def expect(self, tid: str) -> None:
        self.p.send("submit", cmd.Expect(tid, tid, self.mode, 1))

    def ready(self, tid: str, blocks: tuple[int, ...], tokens: int) -> None:
        self.p.send("submit", cmd.Ready(tid, tid, blocks, tokens))

    def grown(self, tid: str, blocks: tuple[int, ...], tokens: int) -> None:
        self.p.send("submit", cmd.Grown(tid, tid, blocks, tokens))

    # -- what happens to them ---------------------------------------------------------------------------------------

    def kill(self, child: Child) -> float:
        """When that was."""
        child.process.kill()
        child.process.join()
        return time.monotonic()

    def stop(self, child: Child) -> float:
        assert child.process.pid is not None
        os.kill(child.process.pid, signal.SIGSTOP)
        return time.monotonic()

    def go_on(self, child: Child) -> None:
        assert child.process.pid is not None
        os.kill(child.process.pid, signal.SIGCONT)

    def restart(self, which: str) -> None:
        made = self.start_p() if which == "p" else self.start_d()
        setattr(self, which, made)
        assert made.receive() == "ready"
        self.d.ask("up", 1)

    # -- what is so -------------------------------------------------------------------------------------------------

    def until(self, child: Child, what: str, holds: Callable[[Any], bool]) -> None:
        due = time.monotonic() + WAIT_S
        while not holds(answer := child.ask(what)):
            assert time.monotonic() < due, f"{what}: {answer}"
            time.sleep(0.01)

    def nothing_held(self, *children: Child) -> None:
        for one in children:
            held = one.ask("open")
            assert (held["sources"], held["landings"], held["posts"]) == (0, 0, 0)

    def works(self, tid: str) -> None:
        """A transfer of two blocks, byte for byte."""
        self.p.ask("fill", len(tid))
        self.expect(tid)
        self.land(tid, (1, 2), TOKENS)
        self.ready(tid, (5, 6), TOKENS)
        ends = [one.ask("results", 1, 15.0) for one in (self.d, self.p)]
        assert [[one.ok for one in end] for end in ends] == [[True], [True]], ends
        assert self.d.ask("blocks", (1, 2)) == self.p.ask("blocks", (5, 6))

    def close(self) -> None:
        for one in (self.p, self.d):
            if one.process.is_alive():
                self.go_on(one)
                assert one.ask("close") == [], "threads leaked"
                one.process.join(30)
                assert one.process.exitcode == 0
            one.stop()
        if self.relay is not None:
            self.relay.close()


@pytest.fixture
def shm() -> Iterator[list[int]]:
    before = set(os.listdir("/dev/shm"))
    pids: list[int] = []
    yield pids
    for name in set(os.listdir("/dev/shm")) - before:
        assert not any(str(pid) in name for pid in pids), f"/dev/shm/{name} was left"


@pytest.fixture
def start(shm: list[int]) -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(*args: Any, **config: Any) -> Pair:
        pairs.append(Pair(*args, **config))
        return pairs[-1]

    yield make
    for pair in pairs:
        shm.extend(pair.pids)
        pair.close()
