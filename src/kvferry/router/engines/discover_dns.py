"""Engines behind one name: each of its A and AAAA records is one, as a headless service publishes its pods."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

from kvferry.errors import PeerUnreachable
from kvferry.router.engines.found import Found, SourceOptions
from kvferry.router.engines.pool import Role
from kvferry.router.spec import parse_host_port

TIMEOUT_S = 5.0
Resolve = Callable[[str], Awaitable[list[str]]]


async def addresses(name: str) -> list[str]:
    """Raises `OSError`. By the machine's own resolver, so /etc/hosts and search domains count."""
    found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class DnsSource:
    """Raises `ConfigError` for a `where` that is not NAME:PORT. A name that has no address at the moment is an error,
    not a set without engines: servers of names fail too."""

    def __init__(
        self, where: str, role: Role, name_port: str, options: SourceOptions, resolve: Resolve = addresses
    ) -> None:
        self.where = where
        self._role = role
        self._name, self._port = parse_host_port(name_port, f"--discover {where!r}")
        self._options = options
        self._resolve = resolve

    async def look(self) -> Found:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                found = await self._resolve(self._name)
        except TimeoutError:
            raise PeerUnreachable(f"{self._name}: no answer of the name server within {TIMEOUT_S:g} s") from None
        except OSError as error:
            raise PeerUnreachable(f"{self._name}: {error.strerror or error}") from None
        if not found:
            raise PeerUnreachable(f"{self._name}: it has no address")
        return {self._role: tuple(self._options.spec(host, self._port) for host in sorted(set(found)))}

    async def wait(self) -> None:
        await asyncio.sleep(self._options.interval_s)

    async def close(self) -> None:
        pass
