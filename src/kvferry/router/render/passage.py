"""Requests about text and tokens, without a token to decode: one render worker answers them."""

from __future__ import annotations

import asyncio

from aiohttp import web

from kvferry.router.dispatch import passage
from kvferry.router.http.upstream import forwarded, read_all, returned
from kvferry.router.render.answers import SIDE, RenderUnavailable
from kvferry.router.render.client import reached
from kvferry.router.render.tier import MOST_LOSSES, Tier
from kvferry.router.replies import LegFailed
from kvferry.router.services import Services


async def one_worker(services: Services, tier: Tier, request: web.Request) -> web.StreamResponse:
    """Raises `RenderUnavailable`, or takes an engine where that is allowed."""
    raw = passage.sanitised(await request.read())
    headers = dict(forwarded(request.headers, services.config))
    said: list[str] = []
    losses = 0
    for worker in tier.able():
        if losses >= MOST_LOSSES:
            break
        response = None
        try:
            async with asyncio.timeout(services.config.render_timeout_s):
                response = await services.upstream.post(SIDE, worker.url, request.path_qs, raw, headers)
                body = await read_all(SIDE, worker.url, response)
            return web.Response(status=response.status, body=body, headers=returned(response.headers))
        except LegFailed as error:
            said.append(error.message)
            tier.suspect(worker, error.message)
            losses += reached(error)
        except TimeoutError:
            losses += 1
            said.append(f"{worker.url}: no answer within {services.config.render_timeout_s:g} s")
        finally:
            if response is not None:
                response.close()
    if services.config.render_fallback == "engines":
        tier.metrics.fallbacks.inc()
        return await passage.one_engine(services, request)
    raise RenderUnavailable(f"no render worker can be used: {'; '.join(said) or tier.why_not}")
