"""One chat, completions or responses request whose text a render tier makes: rendered there, token ids to the pair,
token ids back there, and its bytes to the client. Engines never see the text.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec
from aiohttp import web

from kvferry.errors import KVFerryError, TransferTimeout
from kvferry.router.choice.ask import Ask
from kvferry.router.choice.sessions import session_of
from kvferry.router.dispatch import passage
from kvferry.router.dispatch.relay import LAST_WORDS_S
from kvferry.router.dispatch.serve import Generation
from kvferry.router.http.server import Request
from kvferry.router.http.stream import Stream
from kvferry.router.render.answers import SIDE, Final, RenderUnavailable, Said, refused
from kvferry.router.render.feed import Feed
from kvferry.router.render.plan import plan_of
from kvferry.router.render.session import Session
from kvferry.router.render.tier import Tier
from kvferry.router.replies import LegFailed, Refusal, error_event
from kvferry.router.requests import first_token
from kvferry.router.requests.openai import Plan, Route
from kvferry.router.requests.pace import tokens_told
from kvferry.router.seen.record import Record
from kvferry.router.services import Services

log = logging.getLogger("kvferry.router")

STREAMED = "text/event-stream"


class Rendered(Generation):
    """As `Generation`: the dispatch of the ids, what is counted and logged of it, and the errors are that one's."""

    def __init__(self, services: Services, tier: Tier, route: Route, request: Request) -> None:
        super().__init__(services, route, request)
        self._tier = tier
        self._session: Session | None = None
        self._where = ""

    async def _answer(self, raw: bytes) -> web.Response | Stream:
        try:
            return await self._rendered(passage.sanitised(raw))
        except RenderUnavailable as error:
            if self._services.config.render_fallback != "engines" or self._request.answered:
                raise
            log.warning("engines render a request themselves: %s", error)
            self._tier.metrics.fallbacks.inc()
            for exchange in self._exchanges:
                exchange.close(failure=str(error))
            self._exchanges.clear()
            self._pairs.clear()
        finally:
            self._end()
        return await super()._answer(raw)

    async def _rendered(self, raw: bytes) -> web.Response | Stream:
        services, headers = self._services, self._request.headers
        client = self._plan(raw)
        self._asked = client
        if client is not None:
            services.pool.require(local_prefill=services.config.allow_local_prefill)
        session = self._session = Session(self._tier, services.config, self._route, raw, headers)
        async with asyncio.timeout_at(self._deadline):
            opened = await session.open()
        self._where = session.worker
        if isinstance(opened, Final):
            return self._final(opened)
        if client is None:
            raise Refusal(400, "invalid_json", "the body is not a JSON object")
        plan = plan_of(client, opened.requests)
        if services.config.first_token == "prefill" and len(plan.parts) == 1:
            plan = first_token.planned(plan)
        asks = [self._ask(plan, number, client) for number in range(len(plan.parts))]
        verdict = await services.selection.admit(asks, self._client(asks[0]), self._deadline)
        self._dispatch(plan, asks, alone=verdict == "colocated")
        async with asyncio.timeout_at(self._deadline):
            answers = await self._open()
        return await self._send(Feed(plan, session, self._exchanges, answers))

    def _ask(self, plan: Plan, number: int, client: Plan) -> Ask:
        ask = self._services.selection.ask(plan.parts[number], plan, self._request.headers)
        return msgspec.structs.replace(ask, session=session_of(self._request.headers, client.parts[0]))

    def _final(self, answer: Final) -> web.Response:
        """Raises `LegFailed` for a refusal, which is counted as an engine's is."""
        if answer.status >= 400:
            kind = answer.headers.get("Content-Type", "application/json")
            raise refused(self._where, answer.status, answer.body, kind)
        self._failure = ""
        return web.Response(status=answer.status, body=answer.body, headers=answer.headers)

    async def _send(self, feed: Feed) -> web.Response | Stream:
        out: Stream | None = None
        first: Said | None = None
        pieces: list[bytes] = []
        failure: KVFerryError
        try:
            async with asyncio.timeout_at(self._deadline), feed:
                while True:
                    said = await feed.next()
                    if said.body and first is None:
                        first = said
                        if said.content_type.startswith(STREAMED):
                            out = self._request.stream({"Content-Type": said.content_type} | self._reply_headers)
                            self._first_token()
                    if out is None:
                        pieces.append(said.body)
                    else:
                        out.write(said.body)
                        await out.drained()
                    if said.done:
                        break
            self._told(feed)
            if out is None:
                return self._whole_of(first, b"".join(pieces))
            out.end()
            return out
        except TimeoutError:
            failure = self._late()
        except (LegFailed, RenderUnavailable, Refusal) as error:
            failure = error
        self._judge(failure)
        if out is None:
            raise failure
        self._failure = str(failure)
        self._count(failure)
        out.write(error_event(failure, self.transfer_ids))
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await out.drained()
        except TimeoutError:
            raise ConnectionResetError("the client takes nothing") from None
        out.end()
        return out

    def _told(self, feed: Feed) -> None:
        """All has been said; where an engine's stream ended in an error, the session said that."""
        failed = feed.told
        self._failure = str(failed) if failed is not None else ""
        if failed is not None:
            self._count(failed)
            self._judge(failed)

    def _whole_of(self, first: Said | None, body: bytes) -> web.Response:
        self._services.metrics.ttft.labels("false").observe(self._since_begun())
        self._tokens = tokens_told(body)
        headers = dict(self._reply_headers)
        if first is not None and first.content_type:
            headers["Content-Type"] = first.content_type
        return web.Response(status=first.status if first is not None else 200, body=body, headers=headers)

    def _judge(self, failure: KVFerryError) -> None:
        """The engine whose stream broke has failed."""
        if isinstance(failure, LegFailed) and failure.side == "decode":
            for exchange in self._exchanges:
                if exchange.bound and exchange.decode.url == failure.peer:
                    exchange.broke(failure)
                    self._services.metrics.pd_stream_errors.labels(failure.peer).inc()
                    break

    def _late(self) -> LegFailed:
        if self._exchanges:
            return super()._late()
        limit = self._services.config.request_timeout_s
        message = f"the render tier did not open a session within the request deadline of {limit:g} s"
        return LegFailed(message, side=SIDE, peer=self._where, cause=TransferTimeout(message))

    def _end(self) -> None:
        """The session is of no more use."""
        session = self._session
        if session is not None:
            self._where = session.worker or self._where
            opened = session.close()
            if opened is not None:
                self._services.spawn(session.delete(opened))

    def _record(self, status: int) -> Record:
        record = super()._record(status)
        took = round(self._session.opening_s * 1e3, 3) if self._session is not None else None
        return msgspec.structs.replace(record, render=self._where, render_ms=took if self._where else None)
