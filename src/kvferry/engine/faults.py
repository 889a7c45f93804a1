"""Faults on demand, for tests and for showing what a fault looks like: wrappers around the real parts of one rank.

Set by the engine thread, read by the transfer thread: each fault is one attribute, replaced whole.
"""

from __future__ import annotations

import os
import random
import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import msgspec

from kvferry.auth import AuthKey
from kvferry.engine.memory import KvMemory
from kvferry.errors import ConfigError
from kvferry.ids import RegistrationId, TransferId
from kvferry.protocol import codec
from kvferry.protocol.messages import AnyMessage, Landed, Register
from kvferry.story import Story
from kvferry.transfer.channel import ChannelKey, Event, Got, ZmqChannel
from kvferry.transfer.fabric import Addresses, Fabric, Handle, Op, PeerName
from kvferry.transfer.nixl import NixlFabric

Nth = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", kw_only=True):
    """Base: `kind` is the class's tag."""


class Freeze(Fault, frozen=True, kw_only=True, tag="freeze"):
    """The engine thread stands still for `seconds` before its next step."""

    seconds: Seconds


class SlowLink(Fault, frozen=True, kw_only=True, tag="slow_link"):
    """From now on a post is complete only after `factor` times its real duration, and `delay_s` on top."""

    op: Literal["READ", "WRITE", "both"] = "both"
    factor: Annotated[float, msgspec.Meta(ge=1)] = 1.0
    delay_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class DropMessage(Fault, frozen=True, kw_only=True, tag="drop"):
    """The `nth` message of this type that this rank sends from now on is lost."""

    message: str
    nth: Nth = 1


class DelayMessage(Fault, frozen=True, kw_only=True, tag="delay"):
    """The `nth` message of this type that this rank sends from now on leaves `seconds` late."""

    message: str
    nth: Nth = 1
    seconds: Seconds


class Corrupt(Fault, frozen=True, kw_only=True, tag="corrupt"):
    """One byte is changed: of `block`, or (None) of a random block of the next request whose KV lands here; `when` that
    is known to the engine, or `in_flight`: after it was written, before P says so. `offset` counts bytes over layers,
    heads, tokens; None: any byte of a token that the block holds."""

    when: Literal["landed", "in_flight"] = "landed"
    block: int | None = None
    offset: int | None = None
    mask: Annotated[int, msgspec.Meta(ge=1, le=255)] = 1


class Die(Fault, frozen=True, kw_only=True, tag="die"):
    """The process ends, as by SIGKILL, at the next event of this name that it would tell in a story."""

    at: str


class Clear(Fault, frozen=True, kw_only=True, tag="clear"):
    """No faults from now on."""


AnyFault = Freeze | SlowLink | DropMessage | DelayMessage | Corrupt | Die | Clear
_MESSAGES = {kind.__name__ for kind in get_args(AnyMessage)}


def parse(raw: Mapping[str, Any]) -> AnyFault:
    """Raises `ConfigError` naming the field."""
    try:
        fault: AnyFault = msgspec.convert(dict(raw), AnyFault)
    except msgspec.ValidationError as error:
        kinds = "freeze, slow_link, drop, delay, corrupt, die, clear"
        raise ConfigError(f"fault: {error}", hint=f"kinds: {kinds}") from None
    if isinstance(fault, DropMessage | DelayMessage) and fault.message not in _MESSAGES:
        raise ConfigError(f"fault: message: {fault.message!r}", hint=f"one of {', '.join(sorted(_MESSAGES))}")
    return fault


@dataclass
class Faults:
    """What is armed in one rank."""

    slow: SlowLink | None = None
    message: DropMessage | DelayMessage | None = None
    seen: int = 0
    corrupt: Corrupt | None = None
    memory: KvMemory | None = None  # where to
    die_at: str = ""
    freeze_s: float = 0.0

    def set(self, raw: Mapping[str, Any], memory: KvMemory) -> None:
        """Arm one. Raises `ConfigError`."""
        fault = parse(raw)
        if isinstance(fault, Freeze):
            self.freeze_s = fault.seconds
        elif isinstance(fault, SlowLink):
            self.slow = fault
        elif isinstance(fault, DropMessage | DelayMessage):
            self.seen, self.message = 0, fault
        elif isinstance(fault, Die):
            self.die_at = fault.at
        elif isinstance(fault, Corrupt):
            size = memory.block_bytes
            if fault.offset is not None and not 0 <= fault.offset < size:
                raise ConfigError(f"fault: offset: {fault.offset}", hint=f"a block has {size} bytes")
            if fault.when == "in_flight" and fault.block is not None:
                raise ConfigError(f"fault: block: {fault.block} with when: 'in_flight'", hint="leave one of them out")
            self.memory = memory
            if fault.block is None:
                self.corrupt = fault
            elif 0 <= fault.block < memory.num_blocks:
                damage(memory, fault, fault.block)
            else:
                raise ConfigError(f"fault: block: {fault.block}", hint=f"there are {memory.num_blocks} blocks")
        else:
            self.slow = self.message = self.corrupt = None
            self.die_at, self.freeze_s = "", 0.0

    def freeze(self) -> None:
        seconds, self.freeze_s = self.freeze_s, 0.0
        if seconds:
            time.sleep(seconds)


def damage(memory: KvMemory, fault: Corrupt, block: int, tokens: int | None = None) -> None:
    """`tokens`: how many the block holds at least; None: all."""
    offset = fault.offset
    if offset is None:
        cells, rest = divmod(random.randrange(memory.block_bytes), memory.block_bytes_per_head)
        offset = cells * memory.block_bytes_per_head + rest % ((tokens or memory.block_size) * memory.cell_bytes)
    memory.flip(block, offset, fault.mask)


class FaultyStory(Story):
    def __init__(self, faults: Faults, folder: str | None, side: str, rank: int) -> None:
        super().__init__(folder, side, rank)
        self._faults = faults

    def note(self, transfer_id: TransferId | str, event: str, *, t: float | None = None, **facts: Any) -> None:
        super().note(transfer_id, event, t=t, **facts)
        if event == self._faults.die_at:
            os._exit(137)  # nothing is tidied up, as by SIGKILL


class FaultyChannel(ZmqChannel):
    def __init__(self, faults: Faults, host: str, port: int, key: AuthKey | None = None) -> None:
        super().__init__(host, port, key)
        self._faults = faults
        self._late: deque[tuple[float, ChannelKey, bytes]] = deque()
        self._registers: dict[RegistrationId, Register] = {}  # that left while a byte waits to be changed

    def send(self, key: ChannelKey, data: bytes) -> bool:
        corrupt = self._faults.corrupt
        if corrupt is not None and corrupt.when == "in_flight" and data:
            message = codec.decode(data)
            if isinstance(message, Register):
                self._registers[message.reg_id] = message
        fault = self._faults.message
        if fault is not None and data and type(codec.decode(data)).__name__ == fault.message:
            self._faults.seen += 1
            if self._faults.seen == fault.nth:
                self._faults.message = None
                if isinstance(fault, DelayMessage):
                    self._late.append((time.monotonic() + fault.seconds, key, data))
                return True
        return super().send(key, data)

    def poll(self, timeout_s: float | None) -> Sequence[Event]:
        if self._late:
            wait_s = max(0.0, self._late[0][0] - time.monotonic())
            timeout_s = wait_s if timeout_s is None else min(timeout_s, wait_s)
        events = super().poll(timeout_s)
        while self._late and self._late[0][0] <= time.monotonic():
            _, key, data = self._late.popleft()
            super().send(key, data)
        if self._registers:
            for event in events:
                if isinstance(event, Got) and event.data and isinstance(message := codec.decode(event.data), Landed):
                    self._corrupt(message)
        return events

    def _corrupt(self, landed: Landed) -> None:
        register, fault = self._registers.pop(landed.reg_id, None), self._faults.corrupt
        memory = self._faults.memory
        if register is None or fault is None or memory is None or not register.block_ids:
            return
        size, self._faults.corrupt = memory.block_size, None
        logical = random.randrange(register.start_token // size, -(-register.end_token // size))
        tokens = min(size, register.end_token - logical * size)
        damage(memory, fault, register.block_ids[logical - register.start_token // size], tokens)


@dataclass(frozen=True)
class MakeFabric:
    """Makes the rank's fabrics; can be pickled, with the faults that are armed at that moment."""

    faults: Faults
    backends: tuple[str, ...]
    num_threads: int

    def __call__(self, name: str) -> Fabric:
        return FaultyFabric(self.faults, NixlFabric(name, self.backends, self.num_threads))


class FaultyFabric:
    """A fabric whose posts can be slowed down."""

    def __init__(self, faults: Faults, fabric: Fabric) -> None:
        self._faults, self._fabric = faults, fabric
        self._posts: dict[Handle, tuple[float, SlowLink, float]] = {}  # begun, fault, due (0: still under way)
        self.register, self.metadata = fabric.register, fabric.metadata
        self.add_peer, self.remove_peer, self.progress = fabric.add_peer, fabric.remove_peer, fabric.progress
        self.renew, self.close = fabric.renew, fabric.close

    @property
    def touched(self) -> int:
        return self._fabric.touched

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
        begun = time.monotonic()
        handle = self._fabric.post(op, peer, local, remote, nbytes, remote_device, note)
        self._slow(op, handle, begun)
        return handle

    def repost(self, handle: Hashable) -> None:
        begun = time.monotonic()
        self._fabric.repost(handle)
        self._slow("WRITE", handle, begun)  # only slots are posted again

    def _slow(self, op: Op, handle: Hashable, begun: float) -> None:
        fault = self._faults.slow
        if fault is not None and fault.op in (op, "both"):
            self._posts[handle] = (begun, fault, 0.0)

    def check(self, handle: Hashable) -> bool:
        slowed = self._posts.get(handle)
        if slowed is None:
            return self._fabric.check(handle)
        begun, fault, due = slowed
        now = time.monotonic()
        if not due:
            if not self._fabric.check(handle):
                return False
            due = begun + fault.factor * (now - begun) + fault.delay_s
            self._posts[handle] = (begun, fault, due)
        if now < due:
            return False
        del self._posts[handle]
        return True

    def release(self, handle: Hashable) -> None:
        self._posts.pop(handle, None)
        self._fabric.release(handle)
