"""The shared key on ZMQ sockets: CurveZMQ, which encrypts, and proves both sides to each other in the handshake.

The listener's long-term key pair is derived from the shared key, so who has that knows the listener's public key, and
nobody else does: it never travels. A dialler can't make the first command of the handshake without it, nor anybody but
the listener read that. So libzmq turns uninvited connections away in its own I/O thread, before a byte of them is seen
here, and no handler of ours has to be awake for the others. Each dialler's own pair is made anew.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from kvferry.auth import AuthKey
from kvferry.errors import ConfigError, KeyRefused

FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_CLOSED = (errno.EPIPE, errno.ECONNRESET)  # the other side ended the connection, no timer of ours
_ANOTHER_KEY = (
    int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH),
    int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC),
)


def listen_with(socket: zmq.Socket[bytes], key: AuthKey | None) -> None:
    """Before `bind`. Raises `ConfigError`."""
    if key is not None:
        _need_curve()
        socket.curve_server = True
        socket.curve_secretkey = _secret(key)


def dial_with(socket: Any, key: AuthKey | None) -> None:
    """Before `connect`. Raises `ConfigError`."""
    if key is not None:
        _need_curve()
        socket.curve_serverkey = zmq.curve_public(_secret(key))
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()


def monitor(socket: Any, events: int) -> Any:
    """A socket of the same kind that gets these events of `socket`. Without a limit: libzmq's I/O thread would wait for
    room, and the whole side channel with it, when a thousand connections come and go while its owner is busy."""
    name = f"inproc://kvferry.monitor.{socket.FD}"
    socket.monitor(name, events)
    out = socket.context.socket(zmq.PAIR)
    out.linger = 0
    out.rcvhwm = 0
    out.connect(name)
    return out


class Handshakes:
    """Watches the handshakes of one dialling socket, from the events of its monitor."""

    EVENTS = FAILURES | zmq.EVENT_HANDSHAKE_SUCCEEDED

    def __init__(self, where: str, key: AuthKey | None) -> None:
        self._where, self._key, self._dropped = where, key, 0

    def refusal(self, event: int, value: int) -> KeyRefused | None:
        """What a failed handshake means, once that is clear: a listener that ends the connection in the handshake twice
        in a row has turned us away; once, it may have died."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._dropped = 0
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._dropped += value in _CLOSED
            if self._dropped >= 2:
                return self._refused("has another key or none, or is no side channel" if self._key else "wants a key")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value in _ANOTHER_KEY:
            return self._refused("has no key" if self._key else "wants a key")
        return None

    def _refused(self, said: str) -> KeyRefused:
        ours = f"this side has {self._key}" if self._key else "this side has none"
        return KeyRefused(f"side channel {self._where} ends the handshake: it {said}; {ours}")


def reason_of(event: int, value: int) -> str:
    """Why a listener's handshake failed, as a word for its count."""
    if event != zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return "no_handshake"
    return "wrong_key" if value in _ANOTHER_KEY else "malformed"


def monitored(socket: zmq.Socket[bytes]) -> Iterator[tuple[int, int]]:
    """(event, value) of each that is there, without waiting."""
    while True:
        try:
            message = recv_monitor_message(socket, zmq.DONTWAIT)
        except zmq.Again:
            return
        yield int(message["event"]), int(message["value"])


def _secret(key: AuthKey) -> bytes:
    return z85.encode(key.derive("side channel"))


def _need_curve() -> None:
    if not zmq.has("curve"):
        raise ConfigError("a key is set, and this pyzmq has no CURVE", hint="pip install pyzmq, whose wheels have it")
