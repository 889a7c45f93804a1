"""The HTTP face: OpenAI's routes in, one reply out. Builds everything that a router consists of.

Serve it with `handler_cancellation=True` (as `main.Running` does): a client that leaves then cancels its handler,
which closes both legs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

from aiohttp import web

from kvferry.errors import KVFerryError
from kvferry.observe.metrics import CONTENT_TYPE, RouterMetrics
from kvferry.router import openai
from kvferry.router.budget import RetryBudget
from kvferry.router.config import RouterConfig
from kvferry.router.dialect import dialect_of
from kvferry.router.discovery import followers
from kvferry.router.membership import Membership, show
from kvferry.router.openai import Route
from kvferry.router.pool import Pool
from kvferry.router.replies import Refusal, error_response
from kvferry.router.serve import Generation
from kvferry.router.services import Services
from kvferry.router.upstream import Upstream
from kvferry.story import Story

log = logging.getLogger("kvferry.router")

SERVICES: web.AppKey[Services] = web.AppKey("services", Services)
SHUTDOWN_S = 3.0
"""Abandoned transfers are told to P for this long after the last request."""
CLIENT_LEFT = 499
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(config: RouterConfig) -> web.Application:
    """Raises `ConfigError`."""
    config.check()
    router = Router(config)
    app = web.Application(client_max_size=config.max_body_bytes, middlewares=[router.guard])
    app[SERVICES] = router.services
    app.router.add_post(openai.COMPLETIONS, router.completions)
    app.router.add_post(openai.CHAT, router.chat)
    app.router.add_get("/v1/models", router.models)
    app.router.add_get("/health", router.health)
    app.router.add_get("/metrics", router.metrics)
    app.router.add_route("*", "/{tail:.*}", router.other)
    app.cleanup_ctx.append(router.life)
    return app


class Router:
    def __init__(self, config: RouterConfig) -> None:
        dialect, upstream = dialect_of(config), Upstream(config.connect_timeout_s)
        metrics = RouterMetrics()
        pool = Pool(config, dialect, upstream, metrics)
        self.services = Services(
            config=config,
            dialect=dialect,
            pool=pool,
            members=Membership(config, pool),
            upstream=upstream,
            story=Story(config.story_dir or None, "router"),
            metrics=metrics,
            retry_budget=RetryBudget(config.retry),
            spawn=self._spawn,
        )
        self._mode = "colocated" if dialect is None else dialect.name
        self._running = 0
        self._beside: set[asyncio.Task[None]] = set()
        self._following = followers(config, self.services)

    async def life(self, app: web.Application) -> AsyncIterator[None]:
        await self.services.upstream.start()
        self.services.pool.start()
        following = [asyncio.create_task(one.follow(), name=f"discover {one.where}") for one in self._following]
        yield
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        await self.services.pool.close()
        if self._beside:
            _, late = await asyncio.wait(set(self._beside), timeout=SHUTDOWN_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self.services.upstream.close()
        self.services.story.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Whatever fails before or outside a generation becomes one typed reply."""
        try:
            return await handler(request)
        except KVFerryError as error:
            refusal = error
        except web.HTTPRequestEntityTooLarge:
            limit = self.services.config.max_body_bytes
            refusal = Refusal(413, "body_too_large", f"the body is above {limit} bytes")
        except web.HTTPException as error:
            refusal = Refusal(error.status, "http_error", error.reason)
        self.services.metrics.errors.labels(_label(request), refusal.code, "router").inc()
        return error_response(refusal)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(openai.COMPLETIONS, request)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(openai.CHAT, request)

    async def _generate(self, route: Route, request: web.Request) -> web.StreamResponse:
        if self._running >= self.services.config.max_requests:
            raise Refusal(429, "too_many_requests", f"{self._running} requests are in flight, which is the limit")
        begun, status = time.monotonic(), CLIENT_LEFT
        generation = Generation(self.services, route, request)
        self._running += 1
        try:
            response = await generation.run()
            status = response.status
            return response
        except web.HTTPException as error:
            status = error.status
            raise
        except ConnectionError:  # the client is gone, or takes nothing: what was begun can't be ended
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=CLIENT_LEFT)
        finally:
            self._running -= 1
            self.services.metrics.requests.labels(route, self._mode, str(status)).inc()
            self.services.metrics.duration.labels(route).observe(time.monotonic() - begun)
            generation.log_line(status)

    async def models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": self.services.pool.model_entries()})

    async def health(self, request: web.Request) -> web.StreamResponse:
        """200 when each role that this mode needs has a ready engine."""
        pool = self.services.pool
        missing = pool.missing()
        engines = [
            {"url": engine.url, "role": engine.role, "ready": engine.takes, "reason": engine.why_not}
            for engine in pool.all()
        ]
        facts = {"status": "unready" if missing else "ready", "missing": missing, "engines": engines}
        return web.json_response(facts, status=503 if missing else 200)

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        metrics = self.services.metrics
        metrics.running.set(self._running)
        engines = self.services.pool.all()
        for engine in engines:
            metrics.worker_health.labels(engine.role, engine.url).set(engine.ready)
        show(metrics, self.services.pool)
        metrics.load({(one.role, one.url): one.load for one in engines if one.load is not None})
        return web.Response(body=metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def other(self, request: web.Request) -> web.StreamResponse:
        if request.method == "POST":
            text = f"the route POST {request.path} is not served through a prefill/decode pair"
            raise Refusal(501, "route_not_supported", text, hint=f"served: {openai.COMPLETIONS}, {openai.CHAT}")
        raise Refusal(404, "not_found", f"no such route: {request.method} {request.path}")


def _label(request: web.Request) -> str:
    """Only known routes: a label must not grow with what clients type."""
    return request.path if request.path in (openai.COMPLETIONS, openai.CHAT, "/v1/models") else "other"
