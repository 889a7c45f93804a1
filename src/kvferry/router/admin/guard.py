"""What is looked at before a request is read: the caller's key, and how much header it sends."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from aiohttp import web

from kvferry.auth import is_loopback
from kvferry.router.admin.keys import Keys
from kvferry.router.config import RouterConfig
from kvferry.router.replies import Refusal

OPEN = frozenset(("/health", "/metrics", "/ping"))
"""Without a key, for load balancers and Prometheus: they say nothing of what clients send."""
MOST_HEADERS = 256
"""As vLLM has it. Their bytes are counted where they are parsed."""


class Guard:
    """Of the clients' listener. Raises `ConfigError` for a key file that can't be used."""

    def __init__(self, config: RouterConfig) -> None:
        self._keys = Keys(config.client_key_file, "--client-key-file") if config.client_key_file else None

    def check(self, path: str, headers: Mapping[str, str]) -> None:
        """Raises `Refusal`: 431, 401."""
        check_headers(headers)
        if self._keys is not None and path not in OPEN:
            self._keys.check(headers.get("Authorization"))


def check_headers(headers: Mapping[str, str]) -> None:
    """Raises `Refusal` 431."""
    if len(headers) > MOST_HEADERS:
        message = f"there are {len(headers)} headers, {MOST_HEADERS} is the limit"
        raise Refusal(431, "headers_too_large", message)


def same_machine(request: web.Request) -> None:
    """For what loopback alone guards: a page of elsewhere, open in a browser on this machine, must not get at it, by a
    name of its own that leads here or by a form. Raises `Refusal` 403.
    """
    host, origin = request.host, request.headers.get("Origin")
    name = urlsplit(f"//{host}").hostname or ""
    if not is_loopback(name):
        raise Refusal(403, "host_not_allowed", f"asked as {host[:100]!r}", hint="without a key: 127.0.0.1 or localhost")
    if origin is not None and urlsplit(origin).netloc != host:
        raise Refusal(403, "origin_not_allowed", f"asked by a page of {origin[:100]!r}")
