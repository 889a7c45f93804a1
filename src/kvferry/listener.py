"""Listening for HTTP, in the same way wherever we serve: router and engine."""

from __future__ import annotations

import socket
import ssl

from aiohttp import web

from kvferry.errors import ConfigError

MAX_HEADER_BYTES = 256 * 1024
"""Of all header lines of a request. vLLM takes more; nothing that is right needs it."""


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Taken before anything else starts, so that a port in use costs nothing and is all that is said; nobody can
    connect before it listens. `shared`: others that say so too may have the same port. Raises `ConfigError`.
    """
    if not 0 <= port <= 65535:  # getaddrinfo would take it modulo 65536
        raise ConfigError(f"port: {port} is not a port", hint="1 to 65535, or 0 for any free one")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        raise not_listening(host, port, error) from None
    return listener


def not_listening(host: str, port: int, error: OSError | OverflowError) -> ConfigError:
    said = getattr(error, "strerror", None) or error
    return ConfigError(f"cannot listen on {host} port {port}: {said}", hint="choose another with --port or --host")


def url_of(listener: socket.socket, tls: ssl.SSLContext | None = None) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "http" if tls is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def runner(app: web.Application, drain_s: float) -> web.AppRunner:
    """`drain_s`: a stop waits so long for running requests, then cancels them; so does a client that leaves."""
    return web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=drain_s,
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
    )
