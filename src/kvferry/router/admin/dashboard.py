"""`GET /dashboard`: one page that needs nothing but this router, and the JSON that it asks for each second."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import time
from importlib import resources
from typing import Any

import msgspec
from aiohttp import web

from kvferry import __version__
from kvferry.router.admin.guard import same_machine
from kvferry.router.admin.operations import engine_facts
from kvferry.router.engines.pool import Engine, Pool
from kvferry.router.replies import Refusal
from kvferry.router.seen.record import Leg, Record
from kvferry.router.services import Services
from kvferry.story import STEPS

PAGE, DATA = "/dashboard", "/dashboard/data"
SAFE = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}


class Dashboard:
    """`local`: answers only who names this machine as the host; see `same_machine`."""

    def __init__(self, services: Services, *, local: bool = True) -> None:
        self._services, self._local = services, local
        self._began = time.time()
        self._page = resources.files("kvferry.router.admin").joinpath("dashboard.html").read_text("utf-8")
        self._policy = (
            f"default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; "
            f"form-action 'none'; frame-ancestors 'none'; script-src {_hashes(self._page)}"
        )

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get(PAGE, self.page)
        app.router.add_get(DATA, self.data)

    async def page(self, request: web.Request) -> web.StreamResponse:
        headers = SAFE | {"Content-Security-Policy": self._policy}
        return web.Response(text=self._page, content_type="text/html", charset="utf-8", headers=headers)

    async def data(self, request: web.Request) -> web.StreamResponse:
        """`?after=NUMBER`: only requests that ended after the one of this number."""
        if self._local:
            same_machine(request)
        after = request.query.get("after", "0")
        if not after.isdecimal() or len(after) > 18:
            raise Refusal(400, "invalid_value", f"`after` is {after[:50]!r}", param="after", hint="expected a number")
        seen = self._services.seen
        if seen.told is not None:
            await asyncio.to_thread(seen.told.read)
        body = msgspec.json.encode(self._facts(int(after)))
        return web.Response(body=body, content_type="application/json", headers=SAFE)

    def _facts(self, after: int) -> dict[str, Any]:
        services = self._services
        recent = services.seen.recent
        return {
            "now": time.time(),
            "began": self._began,
            "version": __version__,
            "mode": "colocated" if services.dialect is None else services.dialect.name,
            "missing": services.missing(),
            "engines": [_engine(services.pool, one) for one in services.pool.all()],
            "render": services.render.facts() if services.render is not None else [],
            "requests": [self._told(record) for record in recent.since(after)],
            "errors": [msgspec.structs.replace(record, legs=[]) for record in recent.errors],
            "steps": STEPS,
        }

    def _told(self, record: Record) -> Record:
        """With what the engines had to say of it, in the order of time."""
        told = self._services.seen.told
        if told is None:
            return record
        legs: list[Leg] = []
        for leg in record.legs:
            events = sorted([*leg.events, *told.events(leg.transfer_id)], key=lambda event: event.t)
            legs.append(msgspec.structs.replace(leg, events=events, nbytes=told.moved(leg.transfer_id)))
        return msgspec.structs.replace(record, legs=legs)


def _engine(pool: Pool, engine: Engine) -> dict[str, Any]:
    transfers, backlog = engine.load or (None, None)
    more = {"open_transfers": transfers, "backlog_bytes": backlog, "models": sorted(engine.models or ())}
    return engine_facts(pool, engine) | more


def _hashes(page: str) -> str:
    """Of the page's own scripts, for its policy: nothing else runs, whatever gets into the page."""
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    return " ".join(f"'sha256-{digest}'" for digest in digests)
