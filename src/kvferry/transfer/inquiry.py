"""Questions that the router, the launcher, the doctor or a person asks of an engine's side channel.

Asyncio only; every call opens one connection, asks one thing and closes. Not used between engines.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

import zmq
import zmq.asyncio

from kvferry.errors import PeerUnreachable
from kvferry.ids import TransferId
from kvferry.protocol import codec
from kvferry.protocol.messages import (
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

Answer = TypeVar("Answer", bound=Message)


def endpoint(host: str, port: int) -> str:
    """ZMQ address; IPv6 hosts are bracketed."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


async def _ask(host: str, port: int, question: Message, answer: type[Answer], timeout_s: float) -> Answer:
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.ipv6 = ":" in host
    try:
        socket.connect(endpoint(host, port))
        await socket.send(codec.encode(question))
        async with asyncio.timeout(timeout_s):
            while not (data := await socket.recv()):
                pass  # the channel's probe of the connection
            reply = codec.decode(data)
    except TimeoutError:
        raise PeerUnreachable(
            f"side channel {host}:{port} did not answer within {timeout_s:g} s",
            hint="is this the engine's side_channel_host and side_channel_port, and does it run KVFerryConnector?",
        ) from None
    except codec.WireError as error:
        raise PeerUnreachable(f"side channel {host}:{port}: {error}") from None
    finally:
        socket.close()
    if isinstance(reply, Refuse):
        raise PeerUnreachable(f"side channel {host}:{port} refuses {type(question).__name__}: {reply.reason}")
    if not isinstance(reply, answer):
        raise PeerUnreachable(f"side channel {host}:{port} answered {type(reply).__name__}, not {answer.__name__}")
    return reply


async def describe(host: str, port: int, timeout_s: float = 2.0) -> Description:
    """Who listens there. Raises `PeerUnreachable`."""
    return await _ask(host, port, Describe(), Description, timeout_s)


async def abandon(host: str, port: int, transfer_id: TransferId, reason: str, timeout_s: float = 2.0) -> bool:
    """Tell P that nobody will take this transfer; True if P held anything. Raises `PeerUnreachable`."""
    reply = await _ask(host, port, Abandon(transfer_id=transfer_id, reason=reason), Abandoned, timeout_s)
    return reply.known


async def watch(host: str, port: int, transfer_id: TransferId, percent: int, timeout_s: float = 3600.0) -> Reached:
    """Wait until P has computed so much of the prompt, or the transfer is over. Raises `PeerUnreachable`."""
    return await _ask(host, port, Watch(transfer_id=transfer_id, percent=percent), Reached, timeout_s)


async def why(host: str, port: int, transfer_id: TransferId, timeout_s: float = 2.0) -> Verdict:
    """How this transfer ended on that rank. Raises `PeerUnreachable`."""
    return await _ask(host, port, Why(transfer_id=transfer_id), Verdict, timeout_s)


async def inspect(host: str, port: int, timeout_s: float = 2.0) -> Inspection:
    """Everything about the rank that listens there. Raises `PeerUnreachable`."""
    return await _ask(host, port, Inspect(), Inspection, timeout_s)


async def probe(host: str, port: int, question: Probe, timeout_s: float) -> Probed:
    """Have that D rank measure its way to a P rank. Raises `PeerUnreachable`."""
    return await _ask(host, port, question, Probed, timeout_s)
