"""One completions or chat request, from its body to its reply: plan, dispatch, answer, and what is counted of it."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
import uuid
from collections.abc import Sequence

from aiohttp import web
from multidict import CIMultiDict

from kvferry.errors import KVFerryError
from kvferry.router import edits, fanin, merge, openai, passage, usage
from kvferry.router.dispatch import Answer, Exchange
from kvferry.router.echo import Echo
from kvferry.router.openai import Plan, Route
from kvferry.router.pool import Engine
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
            if plan is None:
                refused = await passage.in_its_words(self._services, self._request, raw)
                failure = "no request"
                return refused
            self._dispatch(plan)
            async with asyncio.timeout_at(self._deadline):
                answers = await self._open()
            if answers[0].watcher is None:
                async with asyncio.timeout_at(self._deadline):
                    whole = await self._whole(plan, answers)
                failure = ""
                return whole
            response, cut_by = await self._stream(plan, answers)
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

    def _plan(self, raw: bytes) -> Plan | None:
        """None: it is no JSON object, which an engine says in its own words."""
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            return None
        if not isinstance(body, dict):
            return None
        dialect = self._services.dialect
        if dialect is None:
            return openai.untouched(self._route, body)
        plan = openai.read(self._route, body)
        dialect.refuse(plan)
        return plan

    def _dispatch(self, plan: Plan) -> None:
        """Choose the engines, for each part its own pair. Nothing is sent yet."""
        pool, config = self._services.pool, self._services.config
        pool.require(local_prefill=config.allow_local_prefill)
        model = pool.known(plan.model)
        headers = CIMultiDict(self._request.headers)
        if len(plan.parts) > 1:
            headers.setdefault(
                "X-Request-Id", uuid.uuid4().hex
            )  # the parts' replies carry one id, as one engine's would
        for part in plan.parts:
            decode = functools.partial(pool.pick, "prefill" if plan.alone else "decode", model)
            prefill: Engine | None = None
            if self._services.dialect is not None and not plan.alone:
                try:
                    prefill = pool.pick("prefill", model)
                except Refusal as refusal:
                    if not config.allow_local_prefill:
                        raise
                    log.warning("a decode engine computes a prompt itself: %s", refusal)
                    self._services.metrics.local_prefills.inc()
            self._exchanges.append(Exchange(self._services, plan, part, headers, decode, prefill))
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

    async def _whole(self, plan: Plan, answers: Sequence[Answer]) -> web.Response:
        if plan.echo or plan.prompt_logprobs is not None:
            for exchange in self._exchanges:
                self._expect_prefill(exchange)
        replies = [exchange.prefill_reply for exchange in self._exchanges]
        echoes = [await self._echo(plan, exchange) for exchange in self._exchanges] if plan.echo else ()
        body = merge.finish(plan, [answer.body for answer in answers], replies, echoes)
        self._services.metrics.ttft.labels("false").observe(time.monotonic() - self._begun)
        headers = returned(answers[0].response.headers)
        headers.update(self._reply_headers)
        return web.Response(status=200, body=body, headers=headers)

    async def _stream(self, plan: Plan, answers: Sequence[Answer]) -> tuple[web.StreamResponse, KVFerryError | None]:
        sending = (self._request, self._reply_headers, self._deadline, self._first_token)
        if len(answers) > 1:
            closing = fanin.Closing()
            parts = [fanin.Part(at, plan.n, closing) for at in range(len(answers))]
            each = [self._edits(plan, one, part) for one, part in zip(self._exchanges, parts, strict=True)]
            return await fanin.relay_all(*sending, self._exchanges, answers, each, closing)
        request, headers, deadline, first_token = sending
        edit = self._edits(plan, self._exchanges[0]) if self._exchanges[0].prefill is not None else None
        return await relay(request, self._exchanges[0], answers[0], headers, deadline, first_token, edit)

    def _edits(self, plan: Plan, exchange: Exchange, part: fanin.Part | None = None) -> edits.Edits:
        """Of one stream; `part`: which prompt of several it is."""

        async def prepare() -> edits.Edit | None:
            reply = await exchange.prefilled()
            echo = await self._echo(plan, exchange) if plan.echo else None

            def edit(event: openai.Body) -> bool | None:
                changed = usage.correct(event, reply, streamed=True) if reply is not None else False
                if echo is not None:
                    changed = echo.event(event) or changed
                placed = part.event(event) if part is not None else False
                return None if placed is None else placed or changed

            return edit

        every = plan.echo or part is not None
        return edits.Edits(
            b"" if every else usage.MARKER, prepare, hold=every or plan.usage, drop_done=part is not None
        )

    async def _echo(self, plan: Plan, exchange: Exchange) -> Echo | None:
        self._expect_prefill(exchange)
        if exchange.prefill_reply is None:
            return None
        ids = bool(plan.parts[0].get("return_token_ids"))
        return Echo(exchange.prefill_reply, "" if ids else await exchange.prompt_text(), ids=ids)

    def _expect_prefill(self, exchange: Exchange) -> None:
        """Raises `LegFailed`: without P's reply the answer would lack what the client asked for."""
        if exchange.prefill is not None and exchange.prefill_reply is None:
            url = exchange.prefill.url
            raise LegFailed(f"prefill engine {url} did not tell the prompt's logprobs", side="prefill", peer=url)

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
