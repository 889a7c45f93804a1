"""One completions or chat request, from its body to its reply: plan, dispatch, answer, and what is counted of it."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Sequence

from aiohttp import web
from multidict import CIMultiDict

from kvferry.errors import KVFerryError
from kvferry.router import merge, openai
from kvferry.router.ask import Ask
from kvferry.router.dispatch import Answer, Exchange
from kvferry.router.openai import Plan, Route
from kvferry.router.relay import relay
from kvferry.router.replies import LegFailed, Refusal, error_response
from kvferry.router.services import Services
from kvferry.router.upstream import returned

log = logging.getLogger("kvferry.router")


class Generation:
    """One request of one client. Made, run once, dropped."""

    def __init__(self, services: Services, route: Route, request: web.Request) -> None:
        self._services = services
        self._route: Route = route
        self._request = request
        self._begun = time.monotonic()
        self._received = time.time()
        limit = services.config.request_timeout_s
        self._deadline = asyncio.get_running_loop().time() + limit if limit else None
        self._exchanges: list[Exchange] = []
        self._reply_headers: dict[str, str] = {}

    @property
    def transfer_ids(self) -> str:
        return ",".join(exchange.transfer_id for exchange in self._exchanges)

    async def run(self) -> web.StreamResponse:
        """The reply, sent already if it was a stream. Only the client's leaving comes out as an exception."""
        raw = await self._request.read()
        failure = "internal error"
        try:
            plan = self._plan(raw)
            asks = [self._services.selection.ask(part, plan, self._request.headers) for part in plan.parts]
            self._refuse_unserved(plan)
            verdict = await self._services.selection.admit(asks, self._client(asks[0]), self._deadline)
            self._dispatch(plan, asks, alone=verdict == "colocated")
            async with asyncio.timeout_at(self._deadline):
                answers = await self._open()
            if answers[0].watcher is None:
                whole = self._whole(plan, answers)
                failure = ""
                return whole
            response, cut_by = await relay(
                self._request, self._exchanges[0], answers[0], self._reply_headers, self._deadline, self._first_token
            )
            failure = str(cut_by) if cut_by is not None else ""
            if cut_by is not None:
                self._count(cut_by)
                self._services.metrics.pd_stream_errors.labels(self._exchanges[0].decode.url).inc()
            return response
        except TimeoutError:
            late = self._exchanges[0].late()
            failure = str(late)
            return self._failed(late)
        except KVFerryError as error:
            failure = str(error)
            return self._failed(error)
        except (asyncio.CancelledError, ConnectionError):
            failure = "the client left"
            self._services.metrics.disconnects.inc()
            raise
        finally:
            for exchange in self._exchanges:
                exchange.close(failure=failure)

    # -- before the legs

    def _plan(self, raw: bytes) -> Plan:
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise Refusal(400, "invalid_json", f"the body is not JSON: {error}") from None
        dialect = self._services.dialect
        if dialect is None:
            return openai.untouched(self._route, body)
        plan = openai.read(self._route, body)
        dialect.refuse(plan)
        return plan

    def _refuse_unserved(self, plan: Plan) -> None:
        """Raises `Refusal` where no wait would help."""
        pool, config = self._services.pool, self._services.config
        pool.require(local_prefill=config.allow_local_prefill)
        pool.check_model(plan.model)

    def _client(self, ask: Ask) -> str:
        """Who waits in turn with others: a session, a key, or an address."""
        return ask.session or self._request.headers.get("Authorization", "") or self._request.remote or ""

    def _dispatch(self, plan: Plan, asks: Sequence[Ask], *, alone: bool) -> None:
        """Choose the engines, for each part its own pair. Nothing is sent yet."""
        headers = CIMultiDict(self._request.headers)
        if len(plan.parts) > 1:
            headers.setdefault(
                "X-Request-Id", uuid.uuid4().hex
            )  # the parts' replies carry one id, as one engine's would
        for part, ask in zip(plan.parts, asks, strict=True):
            choice = self._services.selection.choose(plan, ask, alone=alone)
            exchange = Exchange(self._services, plan, part, headers, choice.decode, choice.prefill, choice.ask)
            self._exchanges.append(exchange)
        self._reply_headers["x-kvferry-transfer-id"] = self.transfer_ids
        if "X-Request-Id" in self._request.headers:
            self._reply_headers["X-Request-Id"] = self._request.headers["X-Request-Id"]
        for exchange in self._exchanges:
            exchange.note("received", t=self._received, request_id=self._request.headers.get("X-Request-Id", ""))

    async def _open(self) -> Sequence[Answer]:
        if len(self._exchanges) == 1:
            return [await self._exchanges[0].open()]
        tasks = [asyncio.create_task(exchange.open()) for exchange in self._exchanges]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # -- after them

    def _whole(self, plan: Plan, answers: Sequence[Answer]) -> web.Response:
        replies = [exchange.prefill_reply for exchange in self._exchanges]
        body = merge.finish(plan, [answer.body for answer in answers], replies)
        self._services.metrics.ttft.labels("false").observe(time.monotonic() - self._begun)
        headers = returned(answers[0].response.headers)
        headers.update(self._reply_headers)
        return web.Response(status=200, body=body, headers=headers)

    def _first_token(self) -> None:
        self._services.metrics.ttft.labels("true").observe(time.monotonic() - self._begun)

    def _count(self, error: KVFerryError) -> None:
        side = error.side if isinstance(error, LegFailed) else "router"
        self._services.metrics.errors.labels(self._route, error.code, side).inc()
        log.warning("%s failed: %s", self._route, error)

    def _failed(self, error: KVFerryError) -> web.Response:
        self._count(error)
        return error_response(error, self.transfer_ids)

    def log_line(self, status: int) -> None:
        """One line per request: what came of it."""
        pair = self._exchanges[0] if self._exchanges else None
        log.info(
            "%s status=%d ms=%.1f transfer=%s prefill=%s decode=%s request_id=%s",
            self._route,
            status,
            (time.monotonic() - self._begun) * 1000,
            self.transfer_ids or "-",
            pair.prefill.url if pair and pair.prefill else "-",
            pair.decode.url if pair and pair.bound else "-",
            self._request.headers.get("X-Request-Id", "-"),
        )
