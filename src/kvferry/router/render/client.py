"""The session protocol of render workers, over the router's own engine connections.

Owner: the event loop. Whatever gives no usable answer is a `WorkerLost`; what a worker says of the request is its word.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from multidict import CIMultiDict

from kvferry.errors import PeerUnreachable
from kvferry.router.config import RouterConfig
from kvferry.router.http.upstream import Upstream, forwarded, read_all, returned
from kvferry.router.render.answers import (
    PREFIX,
    SIDE,
    Final,
    Full,
    Opened,
    Said,
    WorkerLost,
    opened_of,
    refused,
    said_of,
)
from kvferry.router.render.worker import own_address
from kvferry.router.replies import LegFailed
from kvferry.router.requests.openai import Route

SESSIONS = "/v1/sessions"
GONE = (404, 409)
"""Of `tokens`: the session, or its place in the order of requests, isn't known there."""
AGAIN = (500, 502, 503)
"""Another worker may do better."""


def opening_headers(headers: Mapping[str, str], config: RouterConfig, route: Route, seed: str) -> CIMultiDict[str]:
    """The client's, none of the protocol's own among them. `seed`: of the ids that the worker makes up, so that another
    worker, with the same, goes on with them."""
    kept = forwarded(headers, config)
    for name in [name for name in kept if name.lower().startswith(PREFIX)]:
        del kept[name]
    kept["X-Kvferry-Path"], kept["X-Kvferry-Seed"] = route, seed
    return kept


def unreachable(error: LegFailed) -> bool:
    return error.code == PeerUnreachable.code


def reached(error: LegFailed) -> bool:
    """The worker had the request, and may have died of it."""
    return error.resent or not unreachable(error)


class Client:
    def __init__(self, upstream: Upstream, config: RouterConfig) -> None:
        self._upstream, self._timeout_s = upstream, config.render_timeout_s

    async def open(self, base: str, raw: bytes, headers: Mapping[str, str]) -> Opened | Final:
        """Raises `WorkerLost`; `Refusal` 429 where its table is full."""
        status, told, body = await self._post(base, SESSIONS, raw, headers)
        state = told.get("X-Kvferry-State", "")
        if status == 200 and state == "open":
            opened = opened_of(body, base)
            try:
                return Opened(session=opened.session, worker=own_address(opened.worker, base), requests=opened.requests)
            except ValueError:
                raise WorkerLost(f"named its own address {opened.worker[:100]!r}") from None
        if state == "done" or (400 <= status < 500 and status not in (401, 403, 404, 405, 429)):
            kept = CIMultiDict((name, value) for name, value in told.items() if not name.lower().startswith(PREFIX))
            return Final(status=status, headers=kept, body=body)
        if status == 429:
            raise Full(base, told.get("Retry-After", ""))
        raise WorkerLost(f"answered {status} to {SESSIONS}")

    async def feed(self, opened: Opened, seq: int, body: bytes, headers: Mapping[str, str]) -> Said:
        """Raises `WorkerLost`, `LegFailed`."""
        path = f"{SESSIONS}/{opened.session}/tokens"
        status, told, said = await self._post(opened.worker, path, body, {**headers, "X-Kvferry-Seq": str(seq)})
        if status == 200:
            return said_of(told, said)
        if status in GONE or status in AGAIN:
            text = f"answered {status} to tokens of session {opened.session}"
            raise WorkerLost(text, lives=status in GONE)
        raise refused(opened.worker, status, said, told.get("Content-Type", "application/json"))

    async def delete(self, opened: Opened, headers: Mapping[str, str]) -> None:
        """Nobody wants the rest. What it doesn't hear of expires."""
        path = f"{SESSIONS}/{opened.session}"
        try:
            async with asyncio.timeout(self._timeout_s):
                (await self._upstream.pass_on(SIDE, opened.worker, "DELETE", path, b"", headers)).close()
        except (LegFailed, TimeoutError):
            pass

    async def _post(
        self, base: str, path: str, raw: bytes, headers: Mapping[str, str]
    ) -> tuple[int, Mapping[str, str], bytes]:
        response = None
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._upstream.post(SIDE, base, path, raw, headers)
                body = await read_all(SIDE, base, response)
                return response.status, returned(response.headers), body
        except LegFailed as error:
            raise WorkerLost(error.message, again=not unreachable(error), reached=reached(error)) from None
        except TimeoutError:
            text = f"render worker {base} gave no answer within {self._timeout_s:g} s"
            raise WorkerLost(text, late=True) from None
        finally:
            if response is not None:
                response.close()
