"""One completions or chat request, from its body to its reply: plan, dispatch, answer, and what is counted of it."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from kvferry.errors import KVFerryError
from kvferry.router.choice.ask import Ask
from kvferry.router.dispatch import fanin, passage
from kvferry.router.dispatch.attempts import open_part
from kvferry.router.dispatch.dispatch import Answer, Exchange
from kvferry.router.dispatch.relay import relay
from kvferry.router.http import wire
from kvferry.router.http.server import Request
from kvferry.router.http.stream import Stream
from kvferry.router.http.upstream import returned
from kvferry.router.replies import LegFailed, error_response, without_frames
from kvferry.router.requests import edits, first_token, merge, openai, usage
from kvferry.router.requests.echo import Echo
from kvferry.router.requests.openai import Body, Plan, Route
from kvferry.router.requests.pace import Tokens, tokens_told
from kvferry.router.seen import record, traceparent
from kvferry.router.seen.recent import clipped
from kvferry.router.seen.record import Leg, Record
from kvferry.router.services import Services

log = logging.getLogger("kvferry.router")

CLIENT_LEFT = 499
"""The status of a request whose client left before its answer began."""


class Generation:
    """One request of one client. Made, run once, dropped."""

    def __init__(self, services: Services, route: Route, request: Request) -> None:
        self._services = services
        self._route: Route = route
        self._request = request
        self._begun = time.monotonic()
        self._received = time.time()
        limit = services.config.request_timeout_s
        self._deadline = asyncio.get_running_loop().time() + limit if limit else None
        self._exchanges: list[Exchange] = []
        self._pairs: list[Callable[[frozenset[str]], Exchange]] = []
        self._reply_headers: dict[str, str] = {}
        self._asked: Plan | None = None
        self._error: KVFerryError | None = None
        self._failure = "internal error"
        """What the engines are told of it at the end; "" where all went out."""
        self._ttft: float | None = None
        self._tokens: Tokens = (None, None)
        self._made = 0
        """Exchanges, those that were tried before the ones above among them."""
        tracing = services.seen.tracing
        self._span = tracing.begin(request.headers, self._received) if tracing is not None else None

    @property
    def transfer_ids(self) -> str:
        return ",".join(exchange.transfer_id for exchange in self._exchanges)

    async def run(self) -> web.Response | Stream:
        """The reply, sent already if it was a stream. Only the client's leaving comes out as an exception."""
        try:
            return await self._answer(await self._request.read())
        except TimeoutError:
            late = self._late()
            self._failure = str(late)
            return self._failed(late)
        except KVFerryError as error:
            self._failure = str(error)
            return self._failed(error)
        except (asyncio.CancelledError, ConnectionError):
            self._failure = "the client left"
            self._services.metrics.disconnects.inc()
            raise
        finally:
            # nothing of a request may wait for the collector
            self._pairs.clear()
            if self._error is not None:
                without_frames(self._error)
            for exchange in self._exchanges:
                exchange.close(failure=self._failure)

    async def _answer(self, raw: bytes) -> web.Response | Stream:
        """`_failure` is "" afterwards if the answer is whole. Raises `KVFerryError`, `TimeoutError`."""
        plan = self._plan(raw)
        if plan is None:
            self._failure = "no request"
            await passage.in_its_words(self._services, self._request, raw)
        del raw
        self._asked = plan
        self._services.pool.require(local_prefill=self._services.config.allow_local_prefill)
        asks = [self._services.selection.ask(part, plan, self._request.headers) for part in plan.parts]
        verdict = await self._services.selection.admit(asks, self._client(asks[0]), self._deadline)
        self._dispatch(plan, asks, alone=verdict == "colocated")
        async with asyncio.timeout_at(self._deadline):
            answers = await self._open()
        if answers[0].watcher is None:
            async with asyncio.timeout_at(self._deadline):
                whole = await self._whole(plan, answers)
            self._failure = ""
            return whole
        if not plan.echo:
            del asks
            plan = self._forget_prompts(plan)
        response, cut_by = await self._stream(plan, answers)
        self._failure = str(cut_by) if cut_by is not None else ""
        if cut_by is not None:
            self._count(cut_by)
            self._exchanges[0].broke(cut_by)
            self._services.metrics.pd_stream_errors.labels(self._exchanges[0].urls[-1]).inc()
        return response

    def _late(self) -> LegFailed:
        """The request's deadline passed."""
        return self._exchanges[0].late()

    # -- before the legs

    def _plan(self, raw: bytes) -> Plan | None:
        """None: it is no JSON object, which an engine says in its own words."""
        try:
            body, plain = wire.loads(raw)
        except (ValueError, RecursionError):
            return None
        if not isinstance(body, dict):
            return None
        dialect = self._services.dialect
        if dialect is None:
            return openai.untouched(self._route, body, plain)
        plan = openai.read(self._route, body, plain)
        dialect.refuse(plan)
        return first_token.planned(plan) if self._services.config.first_token == "prefill" else plan

    def _client(self, ask: Ask) -> str:
        """Who waits in turn with others: a session, a key, or an address."""
        return ask.session or self._request.headers.get("Authorization", "") or self._request.remote or ""

    def _dispatch(self, plan: Plan, asks: Sequence[Ask], *, alone: bool) -> None:
        """Choose the engines, for each part its own pair. Nothing is sent yet."""
        headers = self._request.headers
        if self._span is not None:
            headers = CIMultiDict(headers)
            headers[traceparent.HEADER] = self._span.header
        if len(plan.parts) > 1 or (plan.begins and "request_id" not in plan.parts[0]):
            # the parts' replies carry one id, as one engine's would
            headers = CIMultiDict(headers)
            headers.setdefault("X-Request-Id", uuid.uuid4().hex)
        self._pairs = [
            functools.partial(self._pair, plan, part, ask, headers, alone)
            for part, ask in zip(plan.parts, asks, strict=True)
        ]
        for pair in self._pairs:
            self._exchanges.append(pair(frozenset()))
        if "X-Request-Id" in self._request.headers:
            self._reply_headers["X-Request-Id"] = self._request.headers["X-Request-Id"]

    def _pair(
        self, plan: Plan, part: Body, ask: Ask, headers: Mapping[str, str], alone: bool, avoid: frozenset[str]
    ) -> Exchange:
        """Choose the engines of one try of one part. Raises `Refusal`."""
        choice = self._services.selection.choose(plan, ask, avoid=avoid, alone=alone)
        exchange = Exchange(self._services, plan, part, headers, choice.decode, choice.prefill, choice.ask)
        self._made += 1
        exchange.note("received", t=self._received, request_id=self._request.headers.get("X-Request-Id", ""))
        return exchange

    async def _open(self) -> Sequence[Answer]:
        try:
            return await self._answers()
        finally:
            self._reply_headers["x-kvferry-transfer-id"] = self.transfer_ids

    async def _answers(self) -> Sequence[Answer]:
        if len(self._pairs) == 1:
            return [await open_part(self._services, self._exchanges, 0, self._pairs[0])]
        tasks = [
            asyncio.create_task(open_part(self._services, self._exchanges, index, pair))
            for index, pair in enumerate(self._pairs)
        ]
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
        replies = [exchange.prefill_told for exchange in self._exchanges]
        echoes = [await self._echo(plan, exchange) for exchange in self._exchanges] if plan.echo else ()
        body = merge.finish(plan, [answer.body for answer in answers], replies, echoes)
        self._services.metrics.ttft.labels("false").observe(self._since_begun())
        self._tokens = tokens_told(body)
        headers = returned(answers[0].response.headers)
        headers.update(self._reply_headers)
        return web.Response(status=200, body=body, headers=headers)

    async def _stream(self, plan: Plan, answers: Sequence[Answer]) -> tuple[Stream, KVFerryError | None]:
        sending = (self._request, self._reply_headers, self._deadline, self._first_token)
        if len(answers) > 1:
            closing = fanin.Closing()
            parts = [fanin.Part(at, plan.n, closing) for at in range(len(answers))]
            each = [self._edits(plan, one, part) for one, part in zip(self._exchanges, parts, strict=True)]
            return await fanin.relay_all(*sending, self._exchanges, answers, each, closing)
        request, headers, deadline, first_token = sending
        edit = self._edits(plan, self._exchanges[0]) if self._exchanges[0].prefill is not None else None
        return await relay(request, self._exchanges[0], answers[0], headers, deadline, first_token, edit)

    def _forget_prompts(self, plan: Plan) -> Plan:
        """The answer has begun, so nothing is asked again: a long prompt isn't kept as long as its answer takes."""
        self._pairs.clear()
        self._asked = plan = msgspec.structs.replace(plan, parts=())
        for exchange in self._exchanges:
            exchange.forget_prompt(plan)
        return plan

    def _edits(self, plan: Plan, exchange: Exchange, part: fanin.Part | None = None) -> edits.Edits:
        """Of one stream; `part`: which prompt of several it is."""

        async def prepare() -> edits.Edit | None:
            reply = await exchange.prefilled()
            begun = exchange.opening if exchange.opening is not None and not exchange.opening.last else None
            echo = await self._echo(plan, exchange) if plan.echo else None

            def edit(event: openai.Body) -> bool | None:
                changed = False
                if begun is not None:
                    changed = first_token.recount(event) | first_token.respan(event, begun)
                changed = (usage.correct(event, reply, streamed=True) if reply is not None else False) or changed
                if echo is not None:
                    changed = echo.event(event) or changed
                placed = part.event(event) if part is not None else False
                return None if placed is None else placed or changed

            return edit

        every = plan.echo or part is not None
        if exchange.opening is not None:
            return edits.Edits(first_token.MARKER, prepare, hold=True, also=first_token.SPANS)
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

    def _since_begun(self) -> float:
        return time.monotonic() - self._begun

    def _first_token(self) -> None:
        if self._ttft is not None:
            return  # prefill's went before
        self._ttft = self._since_begun()
        self._services.metrics.ttft.labels("true").observe(self._ttft)

    def _count(self, error: KVFerryError) -> None:
        self._error = error
        side = error.side if isinstance(error, LegFailed) else "router"
        self._services.metrics.errors.labels(self._route, error.code, side).inc()

    def _failed(self, error: KVFerryError) -> web.Response:
        self._count(error)
        return error_response(error, self.transfer_ids)

    def _first_by(self) -> str:
        """Whose token was the answer's first; "" where no pair made it, or none was made."""
        if self._asked is None or (self._error is not None and self._ttft is None):
            return ""
        if self._asked.begins and self._asked.alone:
            return "prefill"
        if any(one.opening is not None for one in self._exchanges):
            return "prefill"
        return "decode" if any(one.landed and one.prefill is not None for one in self._exchanges) else ""

    def log_line(self, status: int) -> None:
        """It has ended with this: counted, kept for the dashboard, logged in one line."""
        services = self._services
        services.seen.done(self._record(status), self._span, services.spawn)

    def _record(self, status: int) -> Record:
        e2e, services, asked, error = self._since_begun(), self._services, self._asked, self._error
        pace = self._exchanges[0].pace if len(self._exchanges) == 1 else None
        tokens = self._tokens if pace is None or not pace.chunks else pace.tokens()
        begun = next((one.opening for one in self._exchanges if one.opening is not None), None)
        if begun is not None and pace is not None and pace.chunks and not begun.last:
            tokens = first_token.recounted(tokens)
        tpot = pace.per_token(tokens[1]) if pace is not None and self._ttft is not None else None
        left = error is None and status == CLIENT_LEFT
        return Record(
            number=services.seen.number(),
            t=self._received,
            route=self._route,
            mode="colocated" if services.dialect is None else services.dialect.name,
            status=status,
            model=clipped(asked.model) if asked is not None else None,
            first_token=self._first_by(),
            stream=asked is not None and asked.stream,
            request_id=clipped(self._request.headers.get("X-Request-Id")),
            prompt_tokens=tokens[0],
            completion_tokens=tokens[1],
            ttft_ms=_ms(self._ttft),
            tpot_ms=_ms(tpot),
            e2e_ms=round(e2e * 1e3, 3),
            retries=self._made - len(self._exchanges),
            code=record.CLIENT_LEFT if left else error.code if error is not None else "",
            side=error.side if isinstance(error, LegFailed) else "",
            reason="" if error is None else clipped(str(error)),
            legs=[
                Leg(
                    transfer_id=one.transfer_id,
                    prefill=one.prefill.url if one.prefill is not None else "",
                    decode=one.decode.url if one.bound else "",
                    events=one.events,
                )
                for one in self._exchanges
            ],
        )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
