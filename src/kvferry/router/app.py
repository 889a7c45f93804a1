"""The HTTP face: OpenAI's routes in, one reply out. Builds everything that a router consists of.

`main.Running` serves it: the routes that generate through `server.Server`, which cancels the handler of a client that
leaves, so that both legs are closed; all others through aiohttp.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any

from aiohttp import web

from kvferry.errors import KVFerryError
from kvferry.observe.metrics import CONTENT_TYPE, RouterMetrics
from kvferry.router.admin.dashboard import Dashboard
from kvferry.router.admin.guard import Guard
from kvferry.router.config import RouterConfig
from kvferry.router.dispatch import passage
from kvferry.router.dispatch.selection import Selection
from kvferry.router.dispatch.serve import CLIENT_LEFT, Generation
from kvferry.router.engines.budget import RetryBudget
from kvferry.router.engines.dialect import dialect_of
from kvferry.router.engines.discovery import followers
from kvferry.router.engines.membership import Membership, show
from kvferry.router.engines.pool import Pool
from kvferry.router.http.server import Request
from kvferry.router.http.stream import Stream
from kvferry.router.http.tls import engine_context
from kvferry.router.http.upstream import Upstream
from kvferry.router.render import passage as render_passage
from kvferry.router.render.generation import Rendered
from kvferry.router.render.start import tier_of
from kvferry.router.replies import Refusal, error_response
from kvferry.router.requests import edits, openai
from kvferry.router.requests.openai import Route
from kvferry.router.seen.seen import Seen
from kvferry.router.seen.told import Told
from kvferry.router.seen.tracing import tracing_to
from kvferry.router.services import Services
from kvferry.story import Story

log = logging.getLogger("kvferry.router")

ROUTER: web.AppKey[Router] = web.AppKey("router")
GENERATE: dict[str, Route] = {route: route for route in openai.ROUTES}
"""The routes that `server.Server` takes; all others are aiohttp's."""
SHUTDOWN_S = 3.0
"""Abandoned transfers are told to P for this long after the last request."""
OWN = {"/v1/models": ("GET",), "/health": ("GET",), "/metrics": ("GET",)}
"""Answered by the router itself."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(config: RouterConfig) -> web.Application:
    """Raises `ConfigError`."""
    config.check()
    router = Router(config)
    app = web.Application(client_max_size=config.max_body_bytes, middlewares=[router.guard])
    app[ROUTER] = router
    app.router.add_post("/finish_session", router.finish_session)
    app.router.add_get("/v1/models", router.models)
    app.router.add_get("/health", router.health)
    app.router.add_route("*", "/ping", router.ping)
    app.router.add_get("/metrics", router.metrics)
    if config.shows_dashboard:
        Dashboard(router.services).add_routes(app)
    app.router.add_route("*", "/{tail:.*}", router.other)
    app.cleanup_ctx.append(router.life)
    return app


class Router:
    def __init__(self, config: RouterConfig) -> None:
        dialect, upstream = dialect_of(config), Upstream(config.connect_timeout_s, engine_context(config))
        metrics, story = RouterMetrics(), Story(config.story_dir or None, "router")
        told = Told(config.story_dir) if config.story_dir else None
        self._guard = Guard(config)
        pool = Pool(config, dialect, upstream, metrics)
        self.services = Services(
            config=config,
            dialect=dialect,
            pool=pool,
            selection=Selection(config, pool, metrics),
            members=Membership(config, pool),
            upstream=upstream,
            story=story,
            metrics=metrics,
            seen=Seen(metrics, told, tracing_to(config.otlp_traces_endpoint)),
            retry_budget=RetryBudget(config.retry),
            render=tier_of(config, upstream, metrics, pool),
            spawn=self._spawn,
        )
        self._mode = "colocated" if dialect is None else dialect.name
        self._running = 0
        self._beside: set[asyncio.Task[None]] = set()
        self._following = followers(config, self.services)

    async def life(self, app: web.Application) -> AsyncIterator[None]:
        self.services.pool.start()
        render = self.services.render
        if render is not None:
            render.start()
        following = [asyncio.create_task(one.follow(), name=f"discover {one.where}") for one in self._following]
        yield
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        await self.services.pool.close()
        if render is not None:
            await render.close()
        if self._beside:
            _, late = await asyncio.wait(set(self._beside), timeout=SHUTDOWN_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        self.services.upstream.close()
        if self.services.seen.tracing is not None:
            await self.services.seen.tracing.close()
        self.services.story.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)
        return task

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Whatever fails before or outside a generation becomes one typed reply."""
        try:
            self._guard.check(request.path, request.headers)
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

    def admit(self, path: str, headers: Mapping[str, str]) -> None:
        """Raises `Refusal` for what shall not be read."""
        try:
            self._guard.check(path, headers)
        except Refusal as refusal:
            self.services.metrics.errors.labels(path, refusal.code, "router").inc()
            raise

    async def generate(self, request: Request) -> None:
        """Answers it. Only the client's leaving comes out as an exception."""
        route = GENERATE[request.path]
        try:
            response = await self._generate(route, request)
        except KVFerryError as error:
            self.services.metrics.errors.labels(route, error.code, "router").inc()
            response = error_response(error)
        if isinstance(response, web.Response):
            request.send(response)

    async def _generate(self, route: Route, request: Request) -> web.Response | Stream:
        if self._running >= self.services.config.max_requests:
            raise Refusal(429, "too_many_requests", f"{self._running} requests are in flight, which is the limit")
        begun, status = time.monotonic(), CLIENT_LEFT
        render = self.services.render
        generation = (
            Rendered(self.services, render, route, request)
            if render is not None and route != openai.GENERATE
            else Generation(self.services, route, request)
        )
        self._running += 1
        try:
            response = await generation.run()
            status = response.status
            return response
        finally:
            self._running -= 1
            self.services.metrics.requests.labels(route, self._mode, str(status)).inc()
            self.services.metrics.duration.labels(route).observe(time.monotonic() - begun)
            generation.log_line(status)

    async def models(self, request: web.Request) -> web.StreamResponse:
        body = edits.dump({"object": "list", "data": self.services.pool.model_entries()})
        return web.Response(body=body, content_type="application/json")

    async def finish_session(self, request: web.Request) -> web.StreamResponse:
        """Forget where the session was sent; 404 if it is not known (any more)."""
        session = request.query.get("session_id", "")
        if not session:
            raise Refusal(400, "missing_value", "`session_id` is missing", param="session_id", hint="?session_id=NAME")
        if not self.services.pool.sessions.finish(session):
            raise Refusal(404, "session_not_found", f"no session {session[:100]!r} is known here", param="session_id")
        return web.json_response({"session_id": session, "finished": True})

    async def health(self, request: web.Request) -> web.StreamResponse:
        """200 when each role that this mode needs has a ready engine."""
        pool, render = self.services.pool, self.services.render
        missing = self.services.missing()
        engines = [
            {"url": engine.url, "role": engine.role, "ready": engine.takes, "reason": engine.why_not}
            for engine in pool.all()
        ]
        facts = {"status": "unready" if missing else "ready", "missing": missing, "engines": engines}
        if render is not None:
            facts["render"] = render.facts()
        return web.json_response(facts, status=503 if missing else 200)

    async def ping(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=503 if self.services.missing() else 200)

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        metrics = self.services.metrics
        await self.services.seen.fold(self._mode)
        metrics.running.set(self._running)
        engines = self.services.pool.all()
        for engine in engines:
            metrics.worker_health.labels(engine.role, engine.url).set(engine.ready)
        show(metrics, self.services.pool)
        if self.services.render is not None:
            self.services.render.show()
        gate = self.services.selection.gate
        metrics.flow_queue.set(gate.waiting if gate is not None else 0)
        metrics.load({(one.role, one.url): one.load for one in engines if one.load is not None})
        return web.Response(body=metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def other(self, request: web.Request) -> web.StreamResponse:
        """One engine answers what moves no KV; the rest is refused by name."""
        path, method = request.path, request.method
        allowed = ("POST",) if path in openai.ROUTES else OWN.get(path) or passage.methods_of(path)
        if method == "POST" and path in openai.ROUTES:
            raise Refusal(400, "invalid_path", f"{request.raw_path[:100]!r}: write it as {path}")
        if method in allowed or (method == "OPTIONS" and allowed and path not in OWN):
            if self.services.render is not None and path in passage.TEXT and method == "POST":
                return await render_passage.one_worker(self.services, self.services.render, request)
            asks = passage.stored if passage.STORED.fullmatch(path) and path not in passage.POST else passage.one_engine
            return await asks(self.services, request)
        if allowed:
            refusal = error_response(Refusal(405, "method_not_allowed", f"{path} takes {allowed[0]}, not {method}"))
            refusal.headers["Allow"] = ", ".join(allowed)
            return refusal
        if method == "POST":
            text = f"the route POST {path} is not served through a prefill/decode pair"
            raise Refusal(501, "route_not_supported", text, hint=f"served: {', '.join(openai.ROUTES)}")
        raise Refusal(404, "not_found", f"no such route: {method} {path}")


def _label(request: web.Request) -> str:
    """Only known routes: a label must not grow with what clients type."""
    return request.path if request.path in (*openai.ROUTES, *passage.POST, *passage.GET, *OWN) else "other"
