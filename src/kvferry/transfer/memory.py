"""Fabric and side channel inside one process, for tests: real bytes, scripted faults, nothing happens by itself.

`MemoryWorld` joins any number of `MemoryFabric`s; a posted copy moves only when its owner drives its fabric and the
other side's agent is being driven too, as with TCP. `MemoryNetwork` joins `MemoryChannel`s; a message becomes visible
to `poll` once it is delivered: at once, or when the test says so. Single-threaded and deterministic. Not for serving.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry.errors import ConfigError, FabricError
from kvferry.transfer.channel import ChannelKey, Down, Event, Got, Up
from kvferry.transfer.fabric import Addresses, Handle, Note, Op, PeerName


@dataclass
class Copy:
    """One posted operation; a test may hold it back, fail it or look at it."""

    op: Op
    owner: MemoryFabric
    target: MemoryFabric
    rows: deque[tuple[int, int, int]]  # (source address, destination address, bytes) still to be moved
    note: bytes = b""
    held: bool = False
    error: str = ""
    released: bool = False
    whole: tuple[tuple[int, int, int], ...] = ()

    def move(self, limit: int | None = None) -> None:
        """Move up to `limit` descriptors' bytes now (None: all)."""
        for _ in range(len(self.rows) if limit is None else min(limit, len(self.rows))):
            source, destination, nbytes = self.rows.popleft()
            ctypes.memmove(destination, source, nbytes)
            self.owner._world.on_move(destination, nbytes)
        if not self.rows and self.note:
            self.target.notes.append((self.owner.name, self.note))
            self.note = b""


class MemoryWorld:
    """All fabrics that can reach each other.

    `on_post(op, owner's name, target's name)` may raise `FabricError` to refuse a post. `hold`: new copies wait for
    the test to clear their `held`. `copies`: every copy in flight. `on_move(address, nbytes)` is told what has just
    arrived, and may damage it.
    """

    def __init__(self) -> None:
        self.fabrics: dict[PeerName, MemoryFabric] = {}
        self.copies: list[Copy] = []
        self.hold = False
        self.on_post: Callable[[Op, str, str], None] = lambda op, owner, target: None
        self.on_move: Callable[[int, int], None] = lambda address, nbytes: None
        self._serial = itertools.count(1)

    def fabric(self, name: str) -> MemoryFabric:
        unique = f"{name}-{next(self._serial)}"
        made = self.fabrics[unique] = MemoryFabric(self, unique)
        return made

    def sweep(self) -> None:
        """Forget released copies that have ended: a release alone doesn't end one."""
        self.copies = [copy for copy in self.copies if not copy.released or (copy.rows and not copy.error)]


class MemoryFabric:
    """A `Fabric`. `frozen`: the process is stopped, so it neither posts nor serves others' accesses.

    `needs_driving`: peers' accesses move only in our `progress` (TCP); else they move by themselves (RDMA).
    """

    def __init__(self, world: MemoryWorld, name: str) -> None:
        self.name = name
        self.frozen = False
        self.touched = 0
        self.needs_driving = True
        self.regions: list[tuple[int, int]] = []
        self.peers: set[PeerName] = set()
        self.handles: dict[int, Copy] = {}
        self.notes: list[Note] = []
        self._world = world
        self._serial = itertools.count(1)
        self._closed = False

    def register(self, regions: list[tuple[int, int]], device: str) -> None:
        if device != "cpu":
            raise FabricError(f"memory fabric: {device} is not in this process")
        self.regions += regions

    def metadata(self) -> bytes:
        return b"memory:" + self.name.encode()

    def add_peer(self, metadata: bytes) -> PeerName:
        name = metadata.removeprefix(b"memory:").decode(errors="replace")
        if name not in self._world.fabrics:
            raise FabricError(f"memory fabric: no agent {name!r}")
        self.peers.add(name)
        return name

    def remove_peer(self, peer: PeerName) -> None:
        self.peers.discard(peer)  # as with UCX, what was posted goes on

    def post(
        self,
        op: Op,
        peer: PeerName,
        local: Addresses,
        remote: Addresses,
        nbytes: Addresses,
        remote_device: str,
        note: bytes = b"",
    ) -> Handle:
        self.touched += 1
        target = self._world.fabrics.get(peer)
        if peer not in self.peers or target is None:
            raise FabricError(f"{op} to {peer} could not be posted: not a peer")
        self._world.on_post(op, self.name, peer)
        rows = deque[tuple[int, int, int]]()
        for mine, theirs, size in zip(local.tolist(), remote.tolist(), nbytes.tolist(), strict=True):
            if not self._covers(mine, size) or not target._covers(theirs, size):
                raise FabricError(f"{op} to {peer} could not be posted: memory is not registered")
            rows.append((mine, theirs, size) if op == "WRITE" else (theirs, mine, size))
        handle = next(self._serial)
        copy = self.handles[handle] = Copy(op, self, target, rows, note, whole=tuple(rows))
        self._world.copies.append(copy)
        self._start(copy)
        return handle

    def repost(self, handle: Handle) -> None:
        self.touched += 1
        copy = self.handles[handle]  # type: ignore[index]
        if copy.error:
            raise FabricError(copy.error)
        self._world.on_post(copy.op, self.name, copy.target.name)
        copy.rows.extend(copy.whole)
        self._start(copy)

    def _start(self, copy: Copy) -> None:
        copy.held = self._world.hold
        if not copy.target.needs_driving and not copy.held:
            copy.move()

    def check(self, handle: Handle) -> bool:
        self.touched += 1
        copy = self.handles[handle]  # type: ignore[index]
        if copy.error:
            raise FabricError(copy.error)
        if not copy.target.needs_driving and not copy.held and not copy.target.frozen:
            copy.move()
        return not copy.rows

    def release(self, handle: Handle) -> None:
        copy = self.handles.pop(handle, None)  # type: ignore[call-overload]
        if copy is not None:
            copy.released = True
            self._world.sweep()

    def progress(self) -> list[Note]:
        self.touched += 1
        for copy in self._world.copies:
            if copy.target is self and not (copy.held or copy.error or self.frozen or copy.owner.frozen):
                copy.move()
        self._world.sweep()
        came, self.notes = self.notes, []
        return came

    def renew(self) -> None:
        self._world.fabrics.pop(self.name, None)
        self.name = f"{self.name}-{next(self._serial)}"
        self._world.fabrics[self.name] = self
        self.peers.clear()
        for copy in self._world.copies:
            if self in (copy.owner, copy.target) and copy.rows:
                copy.error = "the other side's agent is gone"
        self._world.sweep()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._world.fabrics.pop(self.name, None)
        self.regions.clear()
        for copy in self._world.copies:
            if self in (copy.owner, copy.target) and copy.rows:
                copy.error = "the other side closed"
        self._world.sweep()

    def _covers(self, address: int, nbytes: int) -> bool:
        return any(base <= address and address + nbytes <= base + size for base, size in self.regions)


@dataclass
class _Link:
    """One connection: who dialled, who listens, and what travels each way."""

    dialler: MemoryChannel
    dialler_key: ChannelKey
    listener: MemoryChannel
    listener_key: ChannelKey
    to_listener: deque[bytes] = field(default_factory=deque)
    to_dialler: deque[bytes] = field(default_factory=deque)


class MemoryNetwork:
    """All channels that can reach each other, by (host, port).

    `hold`: sent messages wait for `deliver`. `filter(data)` maps each sent message to what arrives: [] drops it,
    [data, data] doubles it.
    """

    def __init__(self) -> None:
        self.listening: dict[tuple[str, int], MemoryChannel] = {}
        self.links: list[_Link] = []
        self.hold = False
        self.filter: Callable[[bytes], list[bytes]] = lambda data: [data]
        self._serial = itertools.count(1)

    def channel(self, host: str, port: int) -> MemoryChannel:
        if (host, port) in self.listening:
            raise ConfigError(f"side channel {host}:{port} is taken")
        made = self.listening[host, port] = MemoryChannel(self, host, port)
        return made

    def deliver(self, count: int | None = None, *, last_first: bool = False) -> None:
        """Let `count` held messages of each direction arrive (None: all); `last_first` turns their order round."""
        for link in self.links:
            for queue, key, end in (
                (link.to_listener, link.listener_key, link.listener),
                (link.to_dialler, link.dialler_key, link.dialler),
            ):
                for _ in range(len(queue) if count is None else min(count, len(queue))):
                    end.events.append(Got(key, queue.pop() if last_first else queue.popleft()))

    def connect(self) -> None:
        """Connect every dialled address that listens now and isn't connected."""
        for channel in list(self.listening.values()):
            for key, address in channel.dialled.items():
                listener = self.listening.get(address)
                if listener is not None and all(
                    link.dialler_key != key or link.dialler is not channel for link in self.links
                ):
                    self.links.append(_Link(channel, key, listener, f"in:{next(self._serial)}"))
                    channel.events.append(Up(key))

    def cut(self, link: _Link) -> None:
        """Both sides see the connection go, after what has arrived; what was held is lost."""
        self.links.remove(link)
        link.dialler.events.append(Down(link.dialler_key))
        link.listener.events.append(Down(link.listener_key))


class MemoryChannel:
    """A `Channel`. `poll` never waits: the test's clock decides what time it is."""

    def __init__(self, network: MemoryNetwork, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.events: deque[Event] = deque()
        self.dialled: dict[ChannelKey, tuple[str, int]] = {}
        self.waits: list[float | None] = []  # what each `poll` was ready to wait
        self._network = network

    def dial(self, host: str, port: int) -> ChannelKey:
        key = f"out:{host}:{port}"
        self.dialled.setdefault(key, (host, port))
        return key

    def send(self, key: ChannelKey, data: bytes) -> bool:
        for link in self._network.links:
            if link.dialler is self and link.dialler_key == key:
                link.to_listener.extend(self._network.filter(data))
            elif link.listener is self and link.listener_key == key:
                link.to_dialler.extend(self._network.filter(data))
            else:
                continue
            if not self._network.hold:
                self._network.deliver()
            return True
        return False

    def answers(self, key: ChannelKey) -> bool:
        return self.dialled.get(key) in self._network.listening

    def hang_up(self, key: ChannelKey) -> None:
        if self.dialled.pop(key, None) is None:
            return
        for link in [one for one in self._network.links if one.dialler is self and one.dialler_key == key]:
            self._network.links.remove(link)
            link.listener.events.append(Down(link.listener_key))

    def poll(self, timeout_s: float | None) -> Sequence[Event]:
        self.waits.append(timeout_s)
        self._network.connect()
        out = list(self.events)
        self.events.clear()
        return out

    def wake(self) -> None:
        """Nothing sleeps here."""

    def close(self) -> None:
        self.dialled, gone = {}, [one for one in self._network.links if self in (one.dialler, one.listener)]
        for link in gone:
            self._network.cut(link)
        self._network.listening.pop((self.host, self.port), None)
