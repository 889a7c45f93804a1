"""Free ports on loopback, held until the process that was promised them listens.

A held port is bound but not listening, with SO_REUSEADDR: the kernel gives it to nobody who asks for any free port,
while a server that names it (uvicorn, aiohttp and zmq all set SO_REUSEADDR) can bind and listen. So a port can stay
held until its server is up, and there is no moment at which another process may snatch it.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

import psutil

from kvferry.errors import ConfigError, LaunchError

LOOPBACK = "127.0.0.1"


def _choices() -> range:
    """Ports that the kernel gives to nobody's outgoing connections: an engine must find its own again at a restart."""
    try:
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        lowest = 32_768
    return range(20_000, lowest) if lowest > 21_000 else range(20_000, 65_536)


def _hold(port: int, *, untouched: bool = False) -> socket.socket:
    """`untouched`: also not held by another launcher, nor lately used."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if untouched:
            sock.bind((LOOPBACK, port))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if not untouched:
            sock.bind((LOOPBACK, port))
    except BaseException:
        sock.close()
        raise
    return sock


def holder_of(port: int) -> str:
    """Who listens on a port, for an error message; empty if that cannot be seen."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                if connection.pid is None:
                    return ""
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except (psutil.Error, OSError):
        return ""
    return ""


class Ports:
    """The ports of one deployment and the sockets that hold them."""

    def __init__(self) -> None:
        self._held: dict[int, socket.socket] = {}

    def named(self, port: int, what: str) -> int:
        """Hold this very port. ConfigError if somebody has it."""
        if not 0 < port < 65536:
            raise ConfigError(f"{what}: {port} is not a port", hint="1 to 65535")
        if port in self._held:
            raise ConfigError(f"{what}: port {port} is named twice")
        try:
            sock = _hold(port)
        except PermissionError:
            raise ConfigError(f"{what}: port {port} needs more rights", hint="choose one from 1024 up") from None
        except OSError:
            who = holder_of(port)
            taken = f"{what}: port {port} is taken" + (f" by {who}" if who else "")
            raise ConfigError(taken, hint="stop it or choose another port") from None
        self._held[port] = sock
        return port

    def free(self, count: int = 1) -> int:
        """Hold `count` free ports in a row; returns the first."""
        choices = _choices()
        for _ in range(200):
            taken: list[socket.socket] = []
            first = random.randrange(choices.start, choices.stop - count)
            try:
                for port in range(first, first + count):
                    taken.append(_hold(port, untouched=True))
            except OSError:
                pass
            if len(taken) == count:
                self._held.update({first + offset: sock for offset, sock in enumerate(taken)})
                return first
            for sock in taken:
                sock.close()
        raise LaunchError(f"found no {count} free ports in a row on {LOOPBACK}")

    def release(self) -> None:
        """Let go of all: their servers listen by now, or never will."""
        for sock in self._held.values():
            sock.close()
        self._held.clear()
