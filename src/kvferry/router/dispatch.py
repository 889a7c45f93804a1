"""One transfer: a prefill leg and a decode leg under one fresh id, until D's answer may go to the client.

D is chosen with P, or (`--bind`) when P has computed enough of the prompt; until then it is not asked.

Owner: the event loop; an `Exchange` belongs to one request handler. `open` returns when D's first token (or whole
answer) is there and P has not failed; it raises the one error that the client is to see. `close` must follow, always:
it closes what is still open - which aborts that leg in its engine - and tells P to let go of what nobody fetched.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import aiohttp
import msgspec

from kvferry.errors import KVFerryError, PeerUnreachable, TransferTimeout
from kvferry.ids import TransferId, new_transfer_id
from kvferry.router import explain
from kvferry.router.dialect import Dialect, Params, Source
from kvferry.router.faults import is_of_transfer, verdict_on
from kvferry.router.openai import Body, Plan, decode_body, prefill_body
from kvferry.router.pool import Engine, Role
from kvferry.router.replies import LegFailed
from kvferry.router.services import Services
from kvferry.router.sse import Watcher
from kvferry.router.upstream import engine_error, forwarded, read_all, read_some
from kvferry.transfer import inquiry

log = logging.getLogger("kvferry.router")

Result = TypeVar("Result")

PREFILL_TAIL_S = 10.0
"""An answer that D gave whole waits this long for P's, whose usage it carries; P ended long before, if it lives."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """D's answer. Streamed: `head` has been read of `response` and seen by `watcher`. Whole: `body`."""

    response: aiohttp.ClientResponse
    watcher: Watcher | None = None
    head: bytes = b""
    body: bytes = b""


class Exchange:
    """`choose`: picks D, raises `Refusal`. `prefill` None: D alone."""

    def __init__(
        self,
        services: Services,
        plan: Plan,
        part: Body,
        headers: Mapping[str, str],
        choose: Callable[[], Engine],
        prefill: Engine | None,
    ) -> None:
        self.transfer_id: TransferId = new_transfer_id()
        self._choose, self._decode = choose, None if prefill and services.config.bind_percent else choose()
        self.prefill = prefill
        self.prefill_reply: Body | None = None
        self._services = services
        self._plan = plan
        self._part = part
        self._dialect = services.dialect if prefill is not None else None
        self._headers = forwarded(headers, services.config.api_key)
        if self._dialect is not None:
            self._headers.update(self._dialect.headers(self.transfer_id))
        self._tasks: list[asyncio.Task[Any]] = []
        self._responses: list[aiohttp.ClientResponse] = []
        self._prefill_ok = asyncio.Event()
        self.landed = False
        """D made a token: it has its KV, and P holds nothing for it."""
        self._asked_at = self._prefilled_at = 0.0
        self._begun = time.monotonic()
        self._closed = False
        self._let_go = asyncio.Event()
        self._legs = {engine.role: engine.begin() for engine in self._engines()}

    @property
    def bound(self) -> bool:
        """D is chosen."""
        return self._decode is not None

    @property
    def decode(self) -> Engine:
        assert self._decode is not None, "not bound yet"
        return self._decode

    @property
    def urls(self) -> list[str]:
        return [engine.url for engine in self._engines()]

    def _engines(self) -> list[Engine]:
        return [engine for engine in (self.prefill, self._decode) if engine is not None]

    def note(self, event: str, **facts: Any) -> None:
        self._services.story.note(self.transfer_id, event, **facts)

    # -- the life of an exchange

    async def open(self) -> Answer:
        """Raises `LegFailed`, or `Refusal` if no D can be chosen."""
        if self.prefill is None or self._dialect is None:
            self._prefill_ok.set()
            self.note("dispatched", decode=self.decode.url, mode="colocated")
            return await self._start(self._decode_leg(None))
        self._services.metrics.pd_requests.labels(self._dialect.name).inc()
        told = {"decode": self.decode.url} if self.bound else {"bind": self._services.config.bind}
        self.note("dispatched", prefill=self.prefill.url, mode=self._dialect.name, **told)
        prefill = self._start(self._prefill_leg(self._dialect, self.prefill))
        if not self.bound:
            await self._bind(prefill, self.prefill)
        if not self._dialect.concurrent:
            returned = (await prefill).get("kv_transfer_params")
            return await self._start(self._decode_leg(self._decode_params(self._dialect, self.prefill, returned)))
        decode = self._start(self._decode_leg(self._decode_params(self._dialect, self.prefill, None)))
        return await self._first_of(prefill, decode)

    async def _bind(self, prefill: asyncio.Task[Body], engine: Engine) -> None:
        """Choose D when enough of the prompt is computed; P's error ends the wait. Raises `Refusal` without a D."""
        enough = self._start(self._enough(prefill, engine))
        await asyncio.wait({prefill, enough}, return_when=asyncio.FIRST_COMPLETED)
        if prefill.done():
            enough.cancel()
            prefill.result()
        else:
            enough.result()
        self._decode = self._choose()
        self._legs["decode"] = self._decode.begin()
        self.note("bound", decode=self._decode.url)

    async def _enough(self, prefill: asyncio.Task[Body], engine: Engine) -> None:
        """Until P has computed so much of the prompt, or, where it can't tell, has answered."""
        spec, percent = engine.spec, self._services.config.bind_percent
        if percent < 100:
            try:
                reached = await inquiry.watch(spec.side_host, spec.side_port, self.transfer_id, percent, key=engine.key)
                if not reached.ended:
                    return
            except PeerUnreachable as error:
                log.warning("%s waits for all of its prefill: %s", self.transfer_id, error)
        await asyncio.wait({prefill})

    async def _first_of(self, prefill: asyncio.Task[Body], decode: asyncio.Task[Answer]) -> Answer:
        """D's answer; P's error goes before D's. A token of D's proves that P's KV has landed: it waits for nothing."""
        await asyncio.wait({prefill, decode}, return_when=asyncio.FIRST_COMPLETED)
        if not decode.done():
            prefill.result()
            return await decode
        error = decode.exception()
        if error is None:
            hold = PREFILL_TAIL_S if decode.result().watcher is None else 0.0
        else:
            hold = (
                0.0 if isinstance(error, LegFailed) and 400 <= error.own_status < 500 else self._services.config.hold_s
            )
        await asyncio.wait({prefill}, timeout=hold)
        if prefill.done():
            prefill.result()
        return decode.result()

    def close(self, *, failure: str = "") -> None:
        """`failure` "" where the answer went out whole. A second time does nothing."""
        if self._closed:
            return
        self._closed = True
        for engine in self._engines():
            engine.end(self._legs[engine.role])
        for response in self._responses:
            response.close()
        for task in self._tasks:
            task.cancel()
        if self.prefill is not None and self._dialect is not None:
            self._services.metrics.pd_duration.labels(self._dialect.name).observe(time.monotonic() - self._begun)
        let_go = failure if failure and not self.landed and self._dialect and self._dialect.side_channel else ""
        self._services.spawn(self._wind_up(let_go))
        if failure:
            self.note("failed", reason=failure)
        else:
            self.note("last_token")

    async def _wind_up(self, let_go: str) -> None:
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if let_go and self.prefill is not None:
                outcome = await explain.abandon(self.prefill, self.transfer_id, let_go)
                self._services.metrics.abandons.labels(outcome).inc()
        finally:
            self._let_go.set()

    async def let_go(self, limit_s: float) -> None:
        """After `close`: until P has been told, or so long."""
        try:
            async with asyncio.timeout(limit_s):
                await self._let_go.wait()
        except TimeoutError:
            pass  # P does not answer; the telling goes on beside

    def broke(self, error: KVFerryError) -> None:
        """The answer was cut by this after its first byte, which is D's failure, or the deadline's."""
        if error.code != TransferTimeout.code:
            self._legs["decode"].settle("failed")

    def _judge(self, error: LegFailed) -> None:
        """Whose failure it was."""
        self._legs[engine_role(error.side)].settle(verdict_on(error))
        if is_of_transfer(error) and self.prefill is not None:
            self._legs["prefill"].settle(verdict_on(error))

    def late(self) -> LegFailed:
        """The request's deadline passed."""
        unready = self.prefill is not None and not (self._prefill_ok.is_set() and self.bound)
        waiting = self.prefill if self.prefill is not None and unready else self.decode
        limit = self._services.config.request_timeout_s
        if not (self.landed or self._closed):
            self._legs[waiting.role].settle("failed")
        message = f"{waiting.role} engine {waiting.url} did not finish within the request deadline of {limit:g} s"
        return LegFailed(message, side=waiting.role, peer=waiting.url, cause=TransferTimeout(message))

    # -- the legs

    async def _prefill_leg(self, dialect: Dialect, engine: Engine) -> Body:
        metrics = self._services.metrics
        metrics.pd_prefill_requests.labels(engine.url).inc()
        begun = time.monotonic()
        body = prefill_body(self._plan, self._part, dialect.prefill(self.transfer_id, self._plan))
        try:
            response = await self._post(engine, body)
            raw = await read_all("prefill", engine.url, response)
            reply = _object(raw)
            if reply is None:
                message = f"prefill engine {engine.url} answered 200 without a JSON object"
                raise LegFailed(message, side="prefill", peer=engine.url)
            returned = reply.get("kv_transfer_params")
            lacks = dialect.lacks(self.transfer_id, returned if isinstance(returned, dict) else None)
            if lacks:
                message = f"prefill engine {engine.url} lacks {lacks}"
                raise LegFailed(message, side="prefill", peer=engine.url)
        except LegFailed as error:
            metrics.pd_prefill_errors.labels(engine.url, error.code).inc()
            self._judge(error)
            raise
        self._prefilled_at = time.monotonic()
        self._legs["prefill"].settle("worked", self._prefilled_at - begun)
        metrics.pd_prefill_duration.labels(dialect.name).observe(self._prefilled_at - begun)
        self.note("prefill_done")
        self.prefill_reply = reply
        self._prefill_ok.set()
        return reply

    async def _decode_leg(self, params: Params | None) -> Answer:
        engine, metrics = self.decode, self._services.metrics
        self._asked_at = time.monotonic()
        metrics.pd_decode_requests.labels(engine.url).inc()
        try:
            response = await self._post(engine, decode_body(self._part, params))
            if not response.content_type.startswith("text/event-stream"):
                body = await read_all("decode", engine.url, response)
                if not body:
                    raise LegFailed(
                        f"decode engine {engine.url} answered 200 with nothing in it", side="decode", peer=engine.url
                    )
                self._token_seen()
                return Answer(response=response, body=body)
            return await self._stream_head(response)
        except LegFailed as error:
            if self._dialect is not None and self._dialect.side_channel and error.own_status >= 500:
                error = await explain.why(engine, self.prefill, self.transfer_id, error)
            metrics.pd_decode_errors.labels(engine.url, error.code).inc()
            self._judge(error)
            raise error from None

    async def _stream_head(self, response: aiohttp.ClientResponse) -> Answer:
        """Up to the first data, or to the first bytes of any kind if P has answered."""
        url = self.decode.url
        watcher, head = Watcher(), b""
        while watcher.first_data is None and not (head and self._prefill_ok.is_set()):
            chunk = await (self._more_or_prefill(response) if head else read_some("decode", url, response))
            if chunk is None:
                break
            if not chunk:
                raise LegFailed(f"decode engine {url} ended its stream before the first event", side="decode", peer=url)
            head += chunk
            watcher.feed(chunk)
        if watcher.first_is_error:
            raise explain.error_event(url, watcher.first_data or b"")
        if watcher.first_data is not None:
            self._token_seen()
        return Answer(response=response, watcher=watcher, head=head)

    async def _more_or_prefill(self, response: aiohttp.ClientResponse) -> bytes | None:
        """D's next bytes; None if P's good answer came before them."""
        read = asyncio.create_task(read_some("decode", self.decode.url, response))
        answered = asyncio.create_task(self._prefill_ok.wait())
        try:
            await asyncio.wait({read, answered}, return_when=asyncio.FIRST_COMPLETED)
            return read.result() if read.done() else None
        finally:
            read.cancel()
            answered.cancel()
            await asyncio.gather(read, answered, return_exceptions=True)

    def _token_seen(self) -> None:
        if not self.landed:
            self.landed = True
            since = max(self._asked_at, self._prefilled_at)
            self._legs["decode"].settle("worked", time.monotonic() - since if self._plan.stream else None)
            self.note("first_token")

    def saw(self, watcher: Watcher, chunk: bytes) -> bool:
        """Feed what is relayed; True if this was the first token."""
        if watcher.feed(chunk):
            self._token_seen()
            return True
        return False

    async def _post(self, engine: Engine, body: Body) -> aiohttp.ClientResponse:
        """A 200, its body unread. Raises `LegFailed`."""
        raw = json.dumps(body, separators=(",", ":")).encode()
        try:
            response = await self._services.upstream.post(engine.role, engine.url, self._plan.route, raw, self._headers)
        except LegFailed as error:
            if error.code == PeerUnreachable.code:
                self._services.pool.suspect(engine, error.message)
            else:
                self._services.pool.refresh(engine)
            raise
        self._responses.append(response)
        if response.status != 200:
            raise await engine_error(engine.role, engine.url, response)
        return response

    def _decode_params(self, dialect: Dialect, engine: Engine, returned: Params | None) -> Params:
        return dialect.decode(self.transfer_id, self._plan, Source(engine.spec, engine.description), returned)

    def _start(self, leg: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        task = asyncio.create_task(leg)
        self._tasks.append(task)
        return task


def engine_role(side: str) -> Role:
    return "prefill" if side == "prefill" else "decode"


def _object(raw: bytes) -> Body | None:
    try:
        body = json.loads(raw)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None
