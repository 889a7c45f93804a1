"""One half of a probe, in a process of its own: `python -m kvferry.transfer.probe RESULT UCX`, a `Job` on stdin.

D's half makes an agent and memory, tells P's rank, and when P's half is there GETs from its memory: in one piece and in
many, small and large. Then it drives its agent while P's half PUTs into its memory the same way. Each side reads from
UCX's own words which transport it took. The outcome goes to a file descriptor; ending gives everything back, and the
process ends by itself at the job's limit whatever hangs, and with the engine that started it.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import secrets
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import zmq

from kvferry.auth import AuthKey
from kvferry.errors import FabricError, KVFerryError, PeerUnreachable
from kvferry.protocol import codec
from kvferry.protocol.messages import (
    Inspect,
    Inspection,
    Message,
    Point,
    Probed,
    ProbeFailed,
    ProbeNext,
    ProbeReady,
    ProbeTarget,
    ProbeTimes,
    Reach,
    Refuse,
)
from kvferry.transfer.curve import Handshakes, dial_with, monitor, monitored
from kvferry.transfer.fabric import Addresses, Fabric, Op, PeerName
from kvferry.transfer.inquiry import endpoint
from kvferry.transfer.machine import half

_DIAL_S = 5.0
_POINT_S = 0.15  # a point is repeated until it took this long,
_MOST_REPEATS = 20  # or so often
_SHARE = 0.4  # of the limit, for one direction; sizes that would not fit into it are left out
_LONG_S = 0.2  # a transfer that took this long is not watched that closely any more
_PAUSE_S = 0.0001
_PR_SET_PDEATHSIG = 1

Step = TypeVar("Step", bound=Message)


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a half needs to know. `factory`: a pickled `MakeFabric`. `host`, `port`: P's rank. `target`: P's half has
    what D's half asked for; None on D. `key`: of the side channel, '' without one."""

    name: str
    factory: bytes
    device: str
    host: str
    port: int
    sizes: tuple[int, ...]
    piece: int
    limit_s: float
    target: ProbeTarget | None
    key: str


class Line:
    """The connection to P's rank, and through it to the other half. All waits end at `until` (monotonic seconds).

    Raises `PeerUnreachable` within seconds if no rank answers there.
    """

    def __init__(self, host: str, port: int, until: float, key: AuthKey | None) -> None:
        self._where, self._until, self._said = f"{host}:{port}", until, b""
        try:
            socket.create_connection((host, port), _DIAL_S).close()
        except OSError as error:
            raise PeerUnreachable(f"side channel {self._where} cannot be reached from here: {error}") from None
        self._socket = zmq.Context().socket(zmq.DEALER)
        self._socket.linger = 1000
        self._socket.ipv6 = ":" in host
        dial_with(self._socket, key)
        self._watcher, self._handshakes = monitor(self._socket, Handshakes.EVENTS), Handshakes(self._where, key)
        self._poller = zmq.Poller()
        for source in (self._socket, self._watcher):
            self._poller.register(source, zmq.POLLIN)
        self._socket.connect(endpoint(host, port))
        self.send(Inspect())
        self.receive(Inspection, _DIAL_S)

    def send(self, message: Message) -> None:
        self._socket.send(codec.encode(message))

    def has(self) -> bool:
        """Whether something was said; never waits."""
        return self._look(0.0)

    def receive(self, kind: type[Step], first_s: float | None = None) -> Step:
        """The next message, which must be of that kind. Raises `PeerUnreachable`."""
        deadline = self._until if first_s is None else min(self._until, time.monotonic() + first_s)
        while not self._look(left := deadline - time.monotonic()):
            if left <= 0:
                raise PeerUnreachable(f"{self._where} said no {kind.__name__} in time")
        message, self._said = codec.decode(self._said), b""
        if isinstance(message, ProbeFailed | Refuse):
            raise PeerUnreachable(f"the prefill side: {message.reason}")
        if not isinstance(message, kind):
            raise PeerUnreachable(f"{self._where} said {type(message).__name__}, not {kind.__name__}")
        return message

    def _look(self, wait_s: float) -> bool:
        """Empty messages are the channel's probes of the connection, and say nothing. Raises `KeyRefused`."""
        if not self._said:
            ready = dict(self._poller.poll(max(0, round(wait_s * 1e3))))
            if self._watcher in ready:
                for event, value in monitored(self._watcher):
                    if (error := self._handshakes.refusal(event, value)) is not None:
                        raise error
            if self._socket in ready:
                self._said = self._socket.recv()
        return bool(self._said)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._watcher.close(linger=0)
        self._socket.close()


class Memory:
    """Bytes on a device: twice the largest transfer, so that the pieces of a scattered one aren't adjacent."""

    def __init__(self, device: str, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        self._owner: Any
        if device == "cpu":
            self._owner = np.ones(nbytes, dtype=np.uint8)  # written to, so that the pages are there
            self.base = int(self._owner.ctypes.data)
        else:
            import torch

            self._owner = torch.ones(nbytes, dtype=torch.uint8, device=device)
            torch.cuda.synchronize(device)
            self.base = int(self._owner.data_ptr())


class Meter:
    """Times transfers between two memories. `until`: monotonic seconds, when this direction's time is over."""

    def __init__(self, fabric: Fabric, peer: PeerName, mine: Memory, theirs: Reach, op: Op, until: float) -> None:
        self._fabric, self._peer, self._mine, self._theirs = fabric, peer, mine, theirs
        self._op: Op = op
        self._until = until

    def points(self, sizes: tuple[int, ...], piece: int) -> tuple[Point, ...]:
        """Of each size in one piece, then scattered; as many sizes as the time allows. Raises `FabricError`."""
        found: list[Point] = []
        for scattered in (False, True):
            self._once(sizes[0], piece, scattered)  # connects, and is not counted
            last_s, last_bytes = 0.0, sizes[0]
            for nbytes in sizes:
                if time.monotonic() + last_s * nbytes / last_bytes > self._until:
                    break
                times = self._repeat(nbytes, piece, scattered)
                last_s, last_bytes = times[0], nbytes
                found.append(
                    Point(
                        op="GET" if self._op == "READ" else "PUT",
                        scattered=scattered,
                        nbytes=nbytes,
                        median_s=times[len(times) // 2],
                        fastest_s=times[0],
                        repeats=len(times),
                    )
                )
        return tuple(found)

    def _repeat(self, nbytes: int, piece: int, scattered: bool) -> list[float]:
        """Sorted seconds."""
        times: list[float] = []
        while not times or (sum(times) < _POINT_S and len(times) < _MOST_REPEATS):
            times.append(self._once(nbytes, piece, scattered))
        return sorted(times)

    def _once(self, nbytes: int, piece: int, scattered: bool) -> float:
        mine, sizes = _pieces(self._mine.base, nbytes, piece, scattered, seed=1)
        theirs, _ = _pieces(self._theirs.base, nbytes, piece, scattered, seed=2)
        began = time.perf_counter()
        handle = self._fabric.post(self._op, self._peer, mine, theirs, sizes, self._theirs.device)
        try:
            while not self._fabric.check(handle):
                waited = time.perf_counter() - began
                if time.monotonic() > self._until + _DIAL_S:
                    raise FabricError(f"a {self._op} of {nbytes} bytes was not done after {waited:.1f} s")
                if waited > _LONG_S:
                    time.sleep(_PAUSE_S)
                else:
                    os.sched_yield()
            return max(time.perf_counter() - began, 1e-9)
        finally:
            self._fabric.release(handle)


def _pieces(base: int, nbytes: int, piece: int, scattered: bool, seed: int) -> tuple[Addresses, Addresses]:
    """(addresses, sizes) of one transfer; the pieces are shuffled, and every other one of the memory is used."""
    if not scattered:
        return np.array([base], dtype=np.uint64), np.array([nbytes], dtype=np.uint64)
    count = -(-nbytes // piece)
    order = np.random.default_rng(seed).permutation(count).astype(np.uint64)
    sizes = np.full(count, piece, dtype=np.uint64)
    sizes[-1] = nbytes - (count - 1) * piece
    # The last piece may be shorter: its place is as large as any.
    return np.uint64(base) + order * np.uint64(2 * piece), sizes


def serve(fabric: Fabric, line: Line, until: float) -> None:
    """Drive the agent for the other half's accesses until it says something. Raises `PeerUnreachable`."""
    while not line.has():
        fabric.progress()
        os.sched_yield()  # on few cores the other half needs this one to get on
        if time.monotonic() > until:
            raise PeerUnreachable("the other half of the probe said nothing in time")


def ask(job: Job, fabric: Fabric, memory: Memory, line: Line, log: Path, until: float) -> Probed:
    """D's half."""
    probe_id = secrets.token_hex(8)
    reach = Reach(agent=fabric.metadata(), base=memory.base, device=memory.device)
    line.send(
        ProbeTarget(probe_id=probe_id, reach=reach, sizes=job.sizes, piece=job.piece, limit_s=until - time.monotonic())
    )
    try:
        theirs = line.receive(ProbeReady).reach
        peer = fabric.add_peer(theirs.agent)
        share = (until - time.monotonic()) * _SHARE
        gets = Meter(fabric, peer, memory, theirs, "READ", time.monotonic() + share).points(job.sizes, job.piece)
        line.send(ProbeNext(probe_id=probe_id))
        serve(fabric, line, until)
        times = line.receive(ProbeTimes)
        line.send(ProbeNext(probe_id=probe_id))
    except FabricError as error:
        line.send(ProbeFailed(probe_id=probe_id, reason=str(error)))
        raise
    return Probed(failure="", points=gets + times.points, decode=half(memory.device, log), prefill=times.half)


def answer(job: Job, asked: ProbeTarget, fabric: Fabric, memory: Memory, line: Line, log: Path, until: float) -> Probed:
    """P's half. What it found goes to D's half."""
    peer = fabric.add_peer(asked.reach.agent)
    reach = Reach(agent=fabric.metadata(), base=memory.base, device=memory.device)
    line.send(ProbeReady(probe_id=asked.probe_id, reach=reach))
    serve(fabric, line, until)
    line.receive(ProbeNext)
    share = (until - time.monotonic()) * 2 * _SHARE
    puts = Meter(fabric, peer, memory, asked.reach, "WRITE", time.monotonic() + share).points(job.sizes, job.piece)
    line.send(ProbeTimes(probe_id=asked.probe_id, points=puts, half=half(memory.device, log)))
    line.receive(ProbeNext)
    return Probed(failure="")


def probe(job: Job, log: Path) -> Probed:
    """Raises `KVFerryError`, `ImportError`, `MemoryError`, `OSError` or `RuntimeError`."""
    until = time.monotonic() + job.limit_s
    fabric: Fabric = pickle.loads(job.factory)(f"{job.name}-probe")
    line = None
    try:
        memory = Memory(job.device, 2 * max(*job.sizes, job.piece))
        fabric.register([(memory.base, memory.nbytes)], memory.device)
        line = Line(job.host, job.port, until, AuthKey(job.key, "its engine") if job.key else None)
        if job.target is None:
            return ask(job, fabric, memory, line, log, until)
        return answer(job, job.target, fabric, memory, line, log, until)
    finally:
        fabric.close()
        if line is not None:
            line.close()


def main(result: int, ucx: int) -> int:
    """Both are inherited file descriptors: for the outcome, and of the file that UCX writes."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Job)
    signal.alarm(int(job.limit_s) + 2)  # its default action ends the process
    try:
        outcome = probe(job, Path(f"/proc/self/fd/{ucx}"))
    except (KVFerryError, ImportError, MemoryError, OSError, RuntimeError) as error:
        outcome = Probed(failure=str(error) or repr(error))
    with os.fdopen(result, "wb") as file:
        file.write(msgspec.msgpack.encode(outcome))
    return 1 if outcome.failure else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
