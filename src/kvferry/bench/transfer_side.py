"""One side of `kvferry bench transfer`, a process of its own: `python -m kvferry.bench.transfer_side FD`.

It has KV memory, a NIXL agent, a side channel on loopback and the connector's core in its transfer thread, as an engine
has, but no engine: its main thread stands for the engine's. It answers the calls that come over the pipe whose file
descriptor it inherited, one at a time, and ends when the pipe closes, or with the process that started it.

Threads: the main thread hands commands over and sleeps until results come, as `connector/worker_side.py` does. Raw
copies (floor and naive) have an agent of their own, on the same memory and with the same settings, which the main
thread owns: an agent belongs to one thread. They begin when the core is at rest.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvferry.bench.transfer_events import Events
from kvferry.bench.transfer_memory import KvMemory
from kvferry.bench.transfer_records import LIMIT_S, Card, Handled, Raw, Setup
from kvferry.config import connector_config
from kvferry.errors import KVFerryError, TransferTimeout
from kvferry.ids import EngineId, TransferId
from kvferry.launch.ports import LOOPBACK
from kvferry.protocol.layout import HeadShare
from kvferry.protocol.plan import Plan, naive
from kvferry.transfer import commands as cmd
from kvferry.transfer.areas import Areas
from kvferry.transfer.channel import ZmqChannel
from kvferry.transfer.core import TransferCore
from kvferry.transfer.fabric import Op, PeerName
from kvferry.transfer.nixl import NixlFabric
from kvferry.transfer.peers import Identity
from kvferry.transfer.thread import TransferThread

MEMORY_CALLS = ("fill", "wipe", "digests", "digest_of_first")
_PR_SET_PDEATHSIG = 1


class Side:
    """See the module. Raises `KVFerryError`: no NIXL, memory that can't be registered."""

    def __init__(self, setup: Setup, pipe: Connection[Any, Any]) -> None:
        self._role, self._pipe = setup.role, pipe
        self.memory = KvMemory(setup.shape, setup.layout, setup.num_blocks)
        self._layout = self.memory.layout
        fabric, self._raw = NixlFabric(f"bench-{setup.role}"), NixlFabric(f"raw-{setup.role}")
        self._raw.register([(self.memory.base, self.memory.nbytes)], "cpu")
        self._events = Events(setup.role)
        self._hooks_s = 0.0
        channel = ZmqChannel(LOOPBACK, 0)
        settings = {
            "side_channel_port": channel.port,
            "peers": setup.peers,
            "connect_timeout_s": LIMIT_S / 4,
            "staging": setup.staging,
            "verify_kv": setup.verify,
        }
        config = connector_config(settings, {})
        self._areas = areas = Areas("cpu", config.staging_area_bytes)
        fabric.register([(self.memory.base, self.memory.nbytes), *areas.regions], "cpu")
        identity = Identity(EngineId(f"bench-{setup.role}"), 0, 1, setup.role)

        def make_core(deliver: Callable[[cmd.Result], None]) -> TransferCore:
            made = TransferCore(identity, config, fabric, channel, self._layout, areas, self._events, deliver)
            self._core = made
            return made

        self._transfers = TransferThread(make_core)
        self.card = Card(channel.port, self._raw.metadata(), self._layout)
        self._peer: PeerName = ""
        self._theirs = self.card

    def meet(self, other: Card) -> None:
        """Before raw copies to or from the other side."""
        self._theirs, self._peer = other, self._raw.add_peer(other.agent)

    # -- ours -------------------------------------------------------------------------------------------------------

    def expect(self, command: cmd.Expect) -> None:
        """P: the engine takes the request in."""
        self._hooks_s = 0.0
        self._events.clear()
        self._submit(command)

    def registered(self, transfer_id: TransferId) -> None:
        """P: return when D's registration is here."""
        _wait_for(lambda: self._events.has(transfer_id, "held"), f"no registration for {transfer_id}")

    def prefill(self, steps: Sequence[tuple[float, cmd.Grown | cmd.Ready]]) -> Handled:
        """P: hand over each command so many seconds from now; the last one is the `Ready`. Returns with its `Sent`."""
        began = time.monotonic()
        handed = []
        for after, command in steps:
            time.sleep(max(0.0, began + after - time.monotonic()))
            handed.append(time.monotonic())
            self._submit(command)
        after, ready = steps[-1]
        late_s = handed[-1] - began - after
        return self._handled(ready.transfer_id, first=handed[0], ready=handed[-1], late_s=late_s)

    def land(self, command: cmd.Land) -> Handled:
        """D: register, and return with the `Received`."""
        self._hooks_s = 0.0
        self._events.clear()
        self._submit(command)
        return self._handled(command.transfer_id)

    def _submit(self, command: cmd.Command) -> None:
        started = time.perf_counter()
        self._transfers.submit(command)
        self._hooks_s += time.perf_counter() - started

    def _handled(self, transfer_id: TransferId, **times: float) -> Handled:
        until = time.monotonic() + LIMIT_S
        while (left := until - time.monotonic()) > 0:
            self._transfers.wait(left)
            started = time.perf_counter()
            results = self._transfers.results()
            self._hooks_s += time.perf_counter() - started
            end = time.monotonic()
            for one in results:
                if isinstance(one, cmd.Sent | cmd.Received) and one.transfer_id == transfer_id:
                    times["verify_s"] = self._events.verify_s(transfer_id)
                    posts = self._events.posts(transfer_id) if one.ok else []
                    return Handled(one.ok, one.code, one.reason, self._hooks_s, end, posts=posts, **times)
        raise TransferTimeout(f"{self._role}: transfer {transfer_id} has not ended after {LIMIT_S:g} s")

    # -- raw copies -------------------------------------------------------------------------------------------------

    def floor(self, nbytes: int, from_: int = 0, to: int = 0) -> Raw:
        """P: one WRITE of so many bytes in one piece. `from_`, `to`: where, from the beginning of the memories on."""
        theirs = self._theirs.layout.planes[0].base + to
        one = [np.array([value], dtype=np.uint64) for value in (self.memory.base + from_, theirs, nbytes)]
        return self._copy("WRITE", lambda: Plan(*one))

    def naive(self, op: Op, p_blocks: Sequence[int], d_blocks: Sequence[int], tokens: int) -> Raw:
        """One descriptor per block, head and layer, planned, posted and polled here. P writes, or D reads."""
        src, dst = self._layout, self._theirs.layout
        if op == "READ":
            src, dst = dst, src
        share = HeadShare(p_rank=0, src_head_start=0, dst_head_start=0, count=src.heads)
        return self._copy(op, lambda: naive(src, dst, share, p_blocks, d_blocks, 0, tokens))

    def _copy(self, op: Op, plan: Callable[[], Plan]) -> Raw:
        self.rest()
        began = time.perf_counter()
        made = plan()
        planned = time.perf_counter()
        local, remote = (made.src, made.dst) if op == "WRITE" else (made.dst, made.src)
        handle = self._raw.post(op, self._peer, local, remote, made.nbytes, "cpu")
        posted = time.perf_counter()
        try:
            while not self._raw.check(handle):
                if time.perf_counter() - posted > LIMIT_S:
                    raise TransferTimeout(f"a {op} of {made.total_bytes} bytes was not done after {LIMIT_S:g} s")
                os.sched_yield()
            done = time.perf_counter()
        finally:
            self._raw.release(handle)
        return Raw(op, made.descriptors, made.total_bytes, planned - began, posted - planned, done - began)

    def drive(self) -> None:
        """Drive the raw agent for the other side's copies until the next call comes."""
        self.rest()
        while not self._pipe.poll(0):
            self._raw.progress()

    def rest(self) -> None:
        """Return when the core drives its agent no more, as it does without a transfer."""
        _wait_for(lambda: not self._core.busy(), f"{self._role}: the transfer thread did not come to rest")

    def close(self) -> None:
        self._transfers.close()
        self._raw.close()


def _wait_for(there: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + LIMIT_S
    while not there():
        if time.monotonic() > until:
            raise TransferTimeout(f"{what} within {LIMIT_S:g} s")
        time.sleep(0.001)


def serve(pipe: Connection[Any, Any]) -> None:
    """Calls are (name, arguments); answers ('ok', value) or ('error', text, hint). `drive` is answered at its start."""
    side = None
    try:
        setup: Setup = pipe.recv()
        side = Side(setup, pipe)
        pipe.send(("ok", side.card))
        while True:
            name, arguments = pipe.recv()
            if name == "drive":
                pipe.send(("ok", None))
                side.drive()
            else:
                owner = side.memory if name in MEMORY_CALLS else side
                pipe.send(("ok", getattr(owner, name)(*arguments)))
            if name == "close":
                return
    except KVFerryError as error:
        pipe.send(("error", error.message, error.hint))
    except MemoryError:
        pipe.send(("error", f"no memory for {setup.num_blocks} blocks of {setup.shape.block_bytes} bytes", ""))
    except (EOFError, OSError):
        pass  # who started us is gone, or wants us gone
    finally:
        if side is not None:
            side.close()


def main(fd: int, parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return  # it has gone already
    logging.getLogger("kvferry.transfer").setLevel(logging.ERROR)  # the results tell how each transfer ended
    with Connection(fd) as pipe:
        serve(pipe)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
