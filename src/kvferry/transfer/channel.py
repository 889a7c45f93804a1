"""The side channel: small messages between ranks, over ZMQ, with one place to sleep.

`ZmqChannel` belongs to one thread, except `wake`, which any thread may call. A rank listens on one port (ROUTER) and
dials others (one DEALER each). `poll` sleeps on all of them and on the wake-up descriptor, and tells when a connection
came up or went away: on dialled ones from the socket's monitor; on incoming ones when a disconnect was seen and the
identity can no longer be routed to. ZMQ reconnects dialled sockets by itself; every new connection is reported as
`Up`, and both sides then greet anew.

With a key nobody gets in who doesn't have it too (`transfer/curve.py`). Without one the channel is on loopback only.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import zmq

from kvferry.auth import AuthKey, check_reach
from kvferry.errors import KeyRefused, PeerUnreachable, side_channel_taken
from kvferry.protocol.codec import MAX_BYTES
from kvferry.transfer.curve import FAILURES, Handshakes, dial_with, listen_with, monitor, monitored, reason_of
from kvferry.transfer.inquiry import endpoint

log = logging.getLogger("kvferry.transfer")

ChannelKey = str
_CUT_BYTES = 2 * MAX_BYTES  # ZMQ ends the connection of who sends more; what is between the two is refused in words
_HANDSHAKE_MS = 5000  # a connection that has not proven itself by then goes
_MOST_PER_POLL = 1000  # a flood of messages must not keep the owner from its deadlines
_MOST_UNSENT = 10_000  # messages to one peer: 500 prompts under way to one that is stopped make some thousand
_LOOK_AGAIN_S = 0.05  # ZMQ tells of a disconnect shortly before its own routing table knows


@dataclass(frozen=True)
class Up:
    """A dialled connection is made (again)."""

    key: ChannelKey


@dataclass(frozen=True)
class Down:
    """A connection went away."""

    key: ChannelKey


@dataclass(frozen=True)
class Got:
    key: ChannelKey
    data: bytes


@dataclass(frozen=True)
class Barred:
    """A dialled listener has turned us away: the keys differ. It is not dialled again until `dial` says so."""

    key: ChannelKey
    error: KeyRefused


@dataclass(frozen=True)
class Uninvited:
    """Somebody was turned away here: 'wrong_key' (another or none), 'no_handshake' (ended or went silent before it had
    said anything; a look whether the port is open does that too), 'malformed', or 'not_reading' (more was said to him
    than he reads: he is lost, and what he is owed goes with his connection)."""

    reason: str


Event = Up | Down | Got | Barred | Uninvited


def _keep_alive(socket: zmq.Socket[bytes]) -> None:
    """Let the kernel find out, in about a minute, that the other machine is gone; a stopped process still answers."""
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = 30, 10, 3


class Channel(Protocol):
    """What the transfer core needs of a side channel."""

    def dial(self, host: str, port: int) -> ChannelKey:
        """Start connecting; the same address gives the same key. Never waits. Raises `PeerUnreachable` for what can be
        no address."""

    def send(self, key: ChannelKey, data: bytes) -> bool:
        """False if there is no such connection now."""

    def answers(self, key: ChannelKey) -> bool:
        """Whether somebody, even if he says nothing, listens at a dialled address."""

    def hang_up(self, key: ChannelKey) -> None:
        """Close a dialled connection, forget an incoming one."""

    def poll(self, timeout_s: float | None) -> Sequence[Event]:
        """What happened since; waits up to `timeout_s` for something (None: for ever)."""

    def wake(self) -> None:
        """End the present or next `poll`. Any thread."""

    def close(self) -> None: ...


class ZmqChannel:
    """Listens on `host:port` (0: any free port) from construction on, to those who have `key`; None: to this machine.

    Raises `ConfigError` if the address is taken or not ours, or beyond loopback without a key.
    """

    def __init__(self, host: str, port: int, key: AuthKey | None = None) -> None:
        check_reach(host, key)
        self.key = key
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.ipv6 = ":" in host
        self._router.router_mandatory = True
        self._router.sndhwm = _MOST_UNSENT
        self._router.rcvhwm = _MOST_PER_POLL  # who sends faster than we read has to wait
        self._router.maxmsgsize = _CUT_BYTES
        self._router.handshake_ivl = _HANDSHAKE_MS
        _keep_alive(self._router)
        try:
            listen_with(self._router, key)
            if port:
                self._router.bind(endpoint(host, port))
            else:
                port = self._router.bind_to_random_port(endpoint(host, 0).rsplit(":", 1)[0])
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise side_channel_taken(host, port, OSError(error.errno, str(error))) from None
        self.host, self.port = host, port
        if key is None:
            log.warning("side channel %s:%d: no key: loopback only, and open to all users of this machine", host, port)
        self._router_monitor = monitor(self._router, zmq.EVENT_DISCONNECTED | FAILURES)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._incoming: dict[ChannelKey, bytes] = {}
        self._dialled: dict[ChannelKey, zmq.Socket[bytes]] = {}
        self._monitors: dict[ChannelKey, zmq.Socket[bytes]] = {}
        self._handshakes: dict[ChannelKey, Handshakes] = {}
        self._up: set[ChannelKey] = set()
        self._answering: set[ChannelKey] = set()
        self._look_again = 0.0
        self._not_reading = 0  # peers that were lost for it, and not told of yet
        self._poller = zmq.Poller()
        for source in (self._router, self._router_monitor, self._wake_fd):
            self._poller.register(source, zmq.POLLIN)

    def dial(self, host: str, port: int) -> ChannelKey:
        key = f"out:{host}:{port}"
        if key in self._dialled:
            return key
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.ipv6 = ":" in host
        socket.sndhwm, socket.rcvhwm = _MOST_UNSENT, _MOST_PER_POLL
        socket.maxmsgsize = _CUT_BYTES
        _keep_alive(socket)
        socket.reconnect_ivl = 50
        socket.reconnect_ivl_max = 1000
        socket.identity = secrets.token_bytes(12)
        socket.immediate = True  # what could not be sent is dropped with its connection, not sent on the next one
        dial_with(socket, self.key)
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECTED | zmq.EVENT_CLOSED | Handshakes.EVENTS
        watcher = monitor(socket, events)
        try:
            socket.connect(endpoint(host, port))
        except zmq.ZMQError as error:
            socket.disable_monitor()
            watcher.close(linger=0)
            socket.close(linger=0)
            raise PeerUnreachable(f"side channel {host}:{port} is no address: {error}") from None
        self._dialled[key], self._monitors[key] = socket, watcher
        self._handshakes[key] = Handshakes(endpoint(host, port).removeprefix("tcp://"), self.key)
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(watcher, zmq.POLLIN)
        return key

    def send(self, key: ChannelKey, data: bytes) -> bool:
        if key in self._dialled:
            if key not in self._up:
                return False
            try:
                self._dialled[key].send(data, zmq.DONTWAIT)
            except zmq.Again:
                return False  # lost just now; or he does not read, which is the same to us
            return True
        identity = self._incoming.get(key)
        if identity is None:
            return False
        try:
            self._router.send_multipart([identity, data], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno in (errno.EHOSTUNREACH, zmq.EAGAIN):
                del self._incoming[key]
                self._not_reading += error.errno == zmq.EAGAIN
                return False
            raise
        return True

    def answers(self, key: ChannelKey) -> bool:
        return key in self._answering

    def hang_up(self, key: ChannelKey) -> None:
        self._incoming.pop(key, None)
        self._answering.discard(key)
        socket = self._dialled.pop(key, None)
        if socket is None:
            return
        watcher = self._monitors.pop(key)
        del self._handshakes[key]
        self._up.discard(key)
        self._poller.unregister(socket)
        self._poller.unregister(watcher)
        socket.disable_monitor()
        watcher.close(linger=0)
        socket.close(linger=0)

    def poll(self, timeout_s: float | None) -> Sequence[Event]:
        if self._look_again:
            timeout_s = min(_LOOK_AGAIN_S, _LOOK_AGAIN_S if timeout_s is None else timeout_s)
        timeout_ms = None if timeout_s is None else max(0, round(timeout_s * 1000 + 0.499))
        ready = dict(self._poller.poll(timeout_ms))
        out: list[Event] = [Uninvited("not_reading")] * self._not_reading
        self._not_reading = 0
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        if self._router in ready:
            self._receive_incoming(out)
        for key in list(self._dialled):
            # Data before the disconnect that may follow it, the connect before its data.
            if self._monitors[key] in ready:
                self._receive_monitor(key, out)
            if key in self._dialled and self._dialled[key] in ready:
                self._receive(key, self._dialled[key], out)
        if self._router_monitor in ready:
            self._hear_of_incoming(out)
        if self._look_again and time.monotonic() >= self._look_again:
            self._look_again = 0.0
            self._find_gone(out)
        return out

    def wake(self) -> None:
        try:
            os.eventfd_write(self._wake_fd, 1)
        except (OSError, ValueError):
            return  # closed

    def close(self) -> None:
        for key in list(self._dialled):
            self.hang_up(key)
        if self._wake_fd >= 0:
            fd, self._wake_fd = self._wake_fd, -1
            self._router.disable_monitor()
            self._router_monitor.close(linger=0)
            self._router.close(linger=0)
            self._context.destroy(linger=0)
            os.close(fd)

    def _receive_incoming(self, out: list[Event]) -> None:
        for _ in range(_MOST_PER_POLL):
            try:
                identity, *frames = self._router.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            key = "in:" + identity.hex()
            self._incoming[key] = identity
            out.append(Got(key, frames[0]) if len(frames) == 1 else Uninvited("malformed"))

    def _receive(self, key: ChannelKey, socket: zmq.Socket[bytes], out: list[Event]) -> None:
        while True:
            try:
                frames = socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            out.append(Got(key, frames[0]) if len(frames) == 1 else Uninvited("malformed"))

    def _receive_monitor(self, key: ChannelKey, out: list[Event]) -> None:
        for event, value in monitored(self._monitors[key]):
            refusal = self._handshakes[key].refusal(event, value)
            if refusal is not None:
                self.hang_up(key)
                out.append(Barred(key, refusal))
                return
            if event == zmq.EVENT_CONNECTED:
                self._answering.add(key)  # the kernel's word: the process may be stopped
            elif event == zmq.EVENT_CLOSED:
                self._answering.discard(key)  # refused; a connection that was made and lost says nothing yet
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._up.add(key)
                out.append(Up(key))
            elif event == zmq.EVENT_DISCONNECTED and key in self._up:
                self._receive(key, self._dialled[key], out)
                self._up.discard(key)
                out.append(Down(key))

    def _hear_of_incoming(self, out: list[Event]) -> None:
        gone = False
        for event, value in monitored(self._router_monitor):
            gone |= event == zmq.EVENT_DISCONNECTED
            if event != zmq.EVENT_DISCONNECTED:
                out.append(Uninvited(reason_of(event, value)))
        if gone and not self._look_again:  # else soon, however many come and go
            self._look_again = time.monotonic() + _LOOK_AGAIN_S
            self._find_gone(out)

    def _find_gone(self, out: list[Event]) -> None:
        for key, identity in list(self._incoming.items()):
            try:
                # An empty message is no message to the receiver; it only asks whether the identity can be reached.
                self._router.send_multipart([identity, b""], zmq.DONTWAIT)
            except zmq.ZMQError as error:
                if error.errno not in (errno.EHOSTUNREACH, zmq.EAGAIN):
                    raise
                self._incoming.pop(key, None)
                out.append(Down(key))
