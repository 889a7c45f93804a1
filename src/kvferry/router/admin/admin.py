"""The listener of those who run the router: dashboard, metrics, and the operations that others add.

On a port and under a key of its own, so that no client can reach what is here. Without a key it is for this machine.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from aiohttp import web

from kvferry.auth import is_loopback
from kvferry.errors import ConfigError, KVFerryError
from kvferry.listener import bind, not_listening, runner, url_of
from kvferry.router.admin import operations
from kvferry.router.admin.dashboard import PAGE, Dashboard
from kvferry.router.admin.guard import check_headers, same_machine
from kvferry.router.admin.keys import Keys
from kvferry.router.config import RouterConfig
from kvferry.router.http.tls import server_context
from kvferry.router.replies import Refusal, error_response
from kvferry.router.services import Services

if TYPE_CHECKING:
    from kvferry.router.app import Router

log = logging.getLogger("kvferry.router")

OPERATIONS: tuple[Callable[[web.Application, Services], None], ...] = (operations.add_routes,)
"""Each adds its routes."""
OPEN = frozenset((PAGE, "/health"))
"""Without the key. The page holds no facts: it asks its user for the key, and with it for them."""
BACKLOG = 64
DRAIN_S = 1.0
MOST_BODY = 1024 * 1024
LEAST_KEY = 16
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Admin:
    """`bind`, `start`, `stop`, in this order. Raises `ConfigError` for a key that can't be used."""

    def __init__(self, config: RouterConfig, router: Router) -> None:
        self._config = config
        path = config.admin_key_file
        self._keys = Keys(path, "--admin-key-file", least=LEAST_KEY) if path else None
        self._tls = server_context(config)
        if self._tls is None and not is_loopback(config.admin_host):
            log.warning(
                "--admin-host %s without --ssl-certfile: the admin key crosses the network as it is", config.admin_host
            )
        self._listener: socket.socket | None = None
        self.url = ""
        app = web.Application(client_max_size=MOST_BODY, middlewares=[self._guard])
        Dashboard(router.services, local=False).add_routes(app)
        app.router.add_get("/health", router.health)
        app.router.add_get("/metrics", router.metrics)
        for add_routes in OPERATIONS:
            add_routes(app, router.services)
        self._runner = runner(app, DRAIN_S)

    def bind(self) -> None:
        """Raises `ConfigError` if the address can't be bound."""
        host, port = self._config.admin_host, self._config.admin_port or 0
        try:
            self._listener = bind(host, port)
            self._listener.listen(BACKLOG)
        except OSError as error:
            self.close()
            raise not_listening(host, port, error) from None
        except ConfigError as error:
            raise ConfigError(error.message, hint="choose another with --admin-port or --admin-host") from None

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def start(self) -> None:
        assert self._listener is not None
        await self._runner.setup()
        await web.SockSite(self._runner, self._listener, ssl_context=self._tls).start()
        self.url = url_of(self._listener, self._tls)

    async def stop(self) -> None:
        await self._runner.cleanup()
        self.close()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            check_headers(request.headers)
            if self._keys is None:
                same_machine(request)
            elif request.path not in OPEN:
                self._keys.check(request.headers.get("Authorization"))
            return await handler(request)
        except KVFerryError as error:
            return error_response(error)
        except web.HTTPRequestEntityTooLarge:
            return error_response(Refusal(413, "body_too_large", f"the body is above {MOST_BODY} bytes"))
        except web.HTTPException as error:
            return error_response(
                Refusal(error.status, "http_error", f"{error.reason}: {request.method} {request.path}")
            )
