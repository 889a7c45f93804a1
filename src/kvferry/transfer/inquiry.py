"""Questions that the router, the launcher, the doctor or a person asks of an engine's side channel.

Asyncio only; every call opens one connection, asks one thing and closes. Not used between engines. `key`: the engines',
None where they have none; a difference is a `KeyRefused`, which is told at once.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from kvferry.auth import AuthKey
from kvferry.errors import KeyRefused, PeerUnreachable
from kvferry.ids import TransferId
from kvferry.protocol import codec
from kvferry.protocol.messages import (
    MOST_REASON,
    Abandon,
    Abandoned,
    Describe,
    Description,
    Inspect,
    Inspection,
    Message,
    Probe,
    Probed,
    Reached,
    Refuse,
    Verdict,
    Watch,
    Why,
)
from kvferry.transfer.curve import Handshakes, dial_with, monitor

Answer = TypeVar("Answer", bound=Message)


def endpoint(host: str, port: int) -> str:
    """ZMQ address; IPv6 hosts are bracketed."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


async def _ask(
    host: str, port: int, question: Message, answer: type[Answer], timeout_s: float, key: AuthKey | None
) -> Answer:
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.ipv6 = ":" in host
    dial_with(socket, key)
    watcher = monitor(socket, Handshakes.EVENTS)
    try:
        socket.connect(endpoint(host, port))
        await socket.send(codec.encode(question))
        async with asyncio.timeout(timeout_s):
            where = endpoint(host, port).removeprefix("tcp://")
            reply = codec.decode(await _said(socket, watcher, Handshakes(where, key)))
    except TimeoutError:
        raise PeerUnreachable(
            f"side channel {host}:{port} did not answer within {timeout_s:g} s",
            hint="is this the engine's side_channel_host and side_channel_port, and does it run KVFerryConnector?",
        ) from None
    except codec.WireError as error:
        raise PeerUnreachable(f"side channel {host}:{port}: {error}") from None
    finally:
        socket.disable_monitor()
        watcher.close()
        socket.close()
    if isinstance(reply, Refuse):
        raise PeerUnreachable(f"side channel {host}:{port} refuses {type(question).__name__}: {reply.reason}")
    if not isinstance(reply, answer):
        raise PeerUnreachable(f"side channel {host}:{port} answered {type(reply).__name__}, not {answer.__name__}")
    return reply


async def _said(socket: zmq.asyncio.Socket, watcher: zmq.asyncio.Socket, handshakes: Handshakes) -> bytes:
    """The answer. Raises `KeyRefused`."""

    async def answered() -> bytes:
        while not (data := await socket.recv()):
            pass  # the channel's probe of the connection
        return bytes(data)

    async def refused() -> KeyRefused:
        while True:
            told = parse_monitor_message(await watcher.recv_multipart())
            error = handshakes.refusal(int(told["event"]), int(told["value"]))
            if error is not None:
                return error

    answer, refusal = asyncio.ensure_future(answered()), asyncio.ensure_future(refused())
    try:
        await asyncio.wait({answer, refusal}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        raise refusal.result()
    finally:
        answer.cancel()
        refusal.cancel()
        await asyncio.gather(answer, refusal, return_exceptions=True)


async def describe(host: str, port: int, timeout_s: float = 2.0, key: AuthKey | None = None) -> Description:
    """Who listens there. Raises `PeerUnreachable`."""
    return await _ask(host, port, Describe(), Description, timeout_s, key)


async def abandon(
    host: str, port: int, transfer_id: TransferId, reason: str, timeout_s: float = 2.0, key: AuthKey | None = None
) -> bool:
    """Tell a rank that nobody will take this transfer; True if it held anything. Raises `PeerUnreachable`."""
    reply = await _ask(
        host, port, Abandon(transfer_id=transfer_id, reason=reason[:MOST_REASON]), Abandoned, timeout_s, key
    )
    return reply.known


async def watch(
    host: str, port: int, transfer_id: TransferId, percent: int, timeout_s: float = 3600.0, key: AuthKey | None = None
) -> Reached:
    """Wait until P has computed so much of the prompt, or the transfer is over. Raises `PeerUnreachable`."""
    return await _ask(host, port, Watch(transfer_id=transfer_id, percent=percent), Reached, timeout_s, key)


async def why(
    host: str, port: int, transfer_id: TransferId, timeout_s: float = 2.0, key: AuthKey | None = None
) -> Verdict:
    """How this transfer ended on that rank. Raises `PeerUnreachable`."""
    return await _ask(host, port, Why(transfer_id=transfer_id), Verdict, timeout_s, key)


async def inspect(host: str, port: int, timeout_s: float = 2.0, key: AuthKey | None = None) -> Inspection:
    """Everything about the rank that listens there. Raises `PeerUnreachable`."""
    return await _ask(host, port, Inspect(), Inspection, timeout_s, key)


async def probe(host: str, port: int, question: Probe, timeout_s: float, key: AuthKey | None = None) -> Probed:
    """Have that D rank measure its way to a P rank. Raises `PeerUnreachable`."""
    return await _ask(host, port, question, Probed, timeout_s, key)
