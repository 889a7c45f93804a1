"""One transfer: a prefill leg and a decode leg under one fresh id, until D's answer may go to the client.

D is chosen with P, or (`--bind`) when P has computed enough of the prompt; until then it is not asked.

Owner: the event loop; an `Exchange` belongs to one request handler. `open` returns when D's first token (or whole
answer) is there and P has not failed; it raises the one error that the client is to see. `close` must follow, always:
it closes what is still open - which aborts that leg in its engine - and tells P to let go of what nobody fetched.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec

from kvferry.errors import KVFerryError, PeerUnreachable, TransferTimeout
from kvferry.ids import TransferId, new_transfer_id
from kvferry.router import explain, wire
from kvferry.router.ask import Ask
from kvferry.router.connection import Response
from kvferry.router.dialect import Dialect, Params
from kvferry.router.faults import is_of_transfer, verdict_on
from kvferry.router.openai import Body, Plan, decode_body, prefill_body
from kvferry.router.pace import Pace
from kvferry.router.placement import Placement
from kvferry.router.pool import Engine, Role
from kvferry.router.recent import clipped
from kvferry.router.record import Event
from kvferry.router.replies import LegFailed, Refusal, recounted
from kvferry.router.services import Services
from kvferry.router.sse import Watcher
from kvferry.router.standing import Leg
from kvferry.router.upstream import engine_error, forwarded, read_all, read_some
from kvferry.transfer import inquiry

log = logging.getLogger("kvferry.router")

Result = TypeVar("Result")

PREFILL_TAIL_S = 10.0
"""An answer that D gave whole waits this long for P's, whose usage it carries; P ended long before, if it lives."""


GROWS_BY = 16
"""Chunks of an answer after which an engine's load is told: once per token would cost more than it says."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """D's answer. Streamed: `head` has been read of `response` and seen by `watcher`. Whole: `body`."""

    response: Response
    watcher: Watcher | None = None
    head: bytes = b""
    body: bytes = b""


class Exchange:
    """`choose`: picks D, raises `Refusal`. `prefill` None: D alone. `ask`: what the engines' loads grow by."""

    def __init__(
        self,
        services: Services,
        plan: Plan,
        part: Body,
        headers: Mapping[str, str],
        choose: Callable[[], Engine],
        prefill: Engine | None,
        ask: Ask | None = None,
    ) -> None:
        self.transfer_id: TransferId = new_transfer_id()
        self._ask, self._choose = ask or Ask(), choose
        self._placed: dict[Role, Placement] = {}
        """Role -> where that leg is."""
        self.prefill = prefill
        self._services = services
        if prefill is not None:
            self._place(prefill, computes=True, decodes=False)
        if prefill is None or not services.config.bind_percent:
            self._place_decode()
        self.prefill_reply: Body | None = None
        self._plan = plan
        self._part = part
        self._dialect = services.dialect if prefill is not None else None
        self._headers = forwarded(headers, services.config)
        if self._dialect is not None:
            self._headers.update(self._dialect.headers(self.transfer_id))
        self._tasks: list[asyncio.Task[Any]] = []
        self._responses: list[Response] = []
        self._prefill_ok = asyncio.Event()
        self.events: list[Event] = []
        self.pace = Pace(functools.partial(services.metrics.served.gaps, clipped(plan.model)))
        self.landed = False
        """D made a token: it has its KV, and P holds nothing for it."""
        self._asked_at = self._prefilled_at = 0.0
        self._begun = time.monotonic()
        self._closed = False
        self._let_go = asyncio.Event()

    @property
    def bound(self) -> bool:
        """D is chosen."""
        return "decode" in self._placed

    @property
    def decode(self) -> Engine:
        assert self.bound, "not bound yet"
        return self._placed["decode"].engine

    @property
    def urls(self) -> list[str]:
        return [placed.url for placed in self._placed.values()]

    def _place(self, engine: Engine, *, computes: bool, decodes: bool) -> None:
        placed = Placement(engine, self._ask, computes=computes, decodes=decodes, freed=self._services.pool.freed)
        self._placed["decode" if decodes else "prefill"] = placed

    def _place_decode(self) -> None:
        """Raises `Refusal`; what was placed before is given up then."""
        try:
            self._place(self._choose(), computes=self.prefill is None, decodes=True)
        except Refusal:
            for placed in self._placed.values():
                placed.release()
            raise

    def note(self, event: str, *, t: float | None = None, **facts: Any) -> None:
        """`t`: wall-clock seconds, now if absent."""
        at = time.time() if t is None else t
        self.events.append(Event(event, "router", at))
        self._services.story.note(self.transfer_id, event, t=at, **facts)

    # -- the life of an exchange

    async def open(self) -> Answer:
        """Raises `LegFailed`, or `Refusal` if no D can be chosen."""
        if self.prefill is None or self._dialect is None:
            self._prefill_ok.set()
            self.note("dispatched", decode=self.decode.url, mode="colocated")
            return await self._start(self._decode_leg(None))
        self._services.metrics.pd_requests.labels(self._dialect.name).inc()
        told: dict[str, Any] = {"decode": self.decode.url} if self.bound else {"bind": self._services.config.bind}
        self.note("dispatched", prefill=self.prefill.url, mode=self._dialect.name, **told)
        prefill = self._start(self._prefill_leg(self._dialect, self.prefill))
        if not self.bound:
            await self._bind(prefill, self.prefill)
        if not self._dialect.concurrent:
            returned = (await self._prefilled(prefill, self._dialect)).get("kv_transfer_params")
            return await self._start(self._decode_leg(self._decode_params(self._dialect, returned)))
        decode = self._start(self._decode_leg(self._decode_params(self._dialect, None)))
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
        self._place_decode()
        self.note("bound", decode=self.decode.url)

    async def _enough(self, prefill: asyncio.Task[Body], engine: Engine) -> None:
        """Until P has computed so much of the prompt, or, where it can't tell, has answered."""
        where, percent = self._placed["prefill"], self._services.config.bind_percent
        if percent < 100:
            try:
                host, port = engine.spec.side_host, where.side_port
                reached = await inquiry.watch(host, port, self.transfer_id, percent, key=engine.key)
                if not reached.ended:
                    return
            except PeerUnreachable as error:
                log.warning("%s waits for all of its prefill: %s", self.transfer_id, error)
        await asyncio.wait({prefill})

    async def _first_of(self, prefill: asyncio.Task[Body], decode: asyncio.Task[Answer]) -> Answer:
        """D's answer; P's error goes before D's. A token of D's proves that P's KV has landed: it waits for nothing."""
        await asyncio.wait({prefill, decode}, return_when=asyncio.FIRST_COMPLETED)
        if not decode.done():
            if _refused(prefill.exception()):
                await self._own_words(decode)
            prefill.result()
            return await decode
        error = decode.exception()
        if _refused(error):
            return decode.result()
        if error is None:
            hold = PREFILL_TAIL_S if decode.result().watcher is None else 0.0
        else:
            hold = self._services.config.hold_s
        await asyncio.wait({prefill}, timeout=hold)
        if prefill.done():
            prefill.result()
        return decode.result()

    async def _own_words(self, decode: asyncio.Task[Answer]) -> None:
        """Raises D's refusal if one comes soon. It is to the client's own request, which P's is a variant of: the
        message may name a limit that P's leg doesn't have."""
        await asyncio.wait({decode}, timeout=self._services.config.hold_s)
        if decode.done() and _refused(decode.exception()):
            decode.result()

    async def _prefilled(self, prefill: asyncio.Task[Body], dialect: Dialect) -> Body:
        """P's reply, where D comes after it."""
        try:
            return await prefill
        except LegFailed as error:
            if _refused(error) and dialect.side_channel and self.bound:
                await self._own_words(self._start(self._decode_leg(self._decode_params(dialect, None))))
            raise

    async def prefilled(self) -> Body | None:
        """P's reply. D's first token proves that it is made, so that this waits at most for its way here; None if it
        doesn't come, or there is none."""
        if self.prefill is None:
            return None
        try:
            async with asyncio.timeout(PREFILL_TAIL_S):
                await self._prefill_ok.wait()
        except TimeoutError:
            log.warning("%s: no reply of prefill engine %s in time", self.transfer_id, self.prefill.url)
        return self.prefill_reply

    async def prompt_text(self) -> str:
        """The prompt as the engine shows it. Token ids are asked of D. Raises `LegFailed`."""
        prompt = self._part.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return prompt
        body = {"model": self._part["model"]} if "model" in self._part else {}
        raw = wire.dumps(body | {"tokens": prompt}, self._plan.plain)
        response = await self._services.upstream.post("decode", self.decode.url, "/detokenize", raw, self._headers)
        self._responses.append(response)
        if response.status != 200:
            raise await engine_error("decode", self.decode.url, response)
        text = (_object(await read_all("decode", self.decode.url, response)) or {}).get("prompt")
        return text if isinstance(text, str) else ""

    def close(self, *, failure: str = "") -> None:
        """`failure` "" where the answer went out whole. A second time does nothing."""
        if self._closed:
            return
        self._closed = True
        for placed in self._placed.values():
            placed.release()
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
                where = self._placed["prefill"].number
                outcome = await explain.abandon(self.prefill, self.transfer_id, let_go, where)
                self._services.metrics.abandons.labels(outcome).inc()
        finally:
            self._tasks.clear()  # their exceptions know this exchange by their frames
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
            self._placed["decode"].leg.settle("failed")

    def _leg(self, side: str) -> Leg:
        return self._placed["prefill" if side == "prefill" and self.prefill is not None else "decode"].leg

    def _judge(self, error: LegFailed) -> None:
        """Whose failure it was."""
        self._leg(error.side).settle(verdict_on(error))
        if is_of_transfer(error) and self.prefill is not None:
            self._leg("prefill").settle(verdict_on(error))

    def late(self) -> LegFailed:
        """The request's deadline passed."""
        unready = self.prefill is not None and not (self._prefill_ok.is_set() and self.bound)
        waiting = self.prefill if self.prefill is not None and unready else self.decode
        limit = self._services.config.request_timeout_s
        if not (self.landed or self._closed):
            self._leg(waiting.role).settle("failed")
        message = f"{waiting.role} engine {waiting.url} did not finish within the request deadline of {limit:g} s"
        return LegFailed(message, side=waiting.role, peer=waiting.url, cause=TransferTimeout(message))

    # -- the legs

    async def _prefill_leg(self, dialect: Dialect, engine: Engine) -> Body:
        metrics = self._services.metrics
        metrics.pd_prefill_requests.labels(engine.url).inc()
        begun = time.monotonic()
        body = prefill_body(self._plan, self._part, dialect.prefill(self.transfer_id, self._plan))
        try:
            response = await self._post(self._placed["prefill"], body)
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
        self._learn(reply, time.monotonic() - begun)
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
            response = await self._post(self._placed["decode"], decode_body(self._plan, self._part, params))
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
                where = self._placed["decode"].number
                error = await explain.why(engine, self.prefill, self.transfer_id, error, where)
            metrics.pd_decode_errors.labels(engine.url, error.code).inc()
            self._judge(error)
            raise error from None

    async def _stream_head(self, response: Response) -> Answer:
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
            self.pace.begin(head)
            self._token_seen()
        return Answer(response=response, watcher=watcher, head=head)

    async def _more_or_prefill(self, response: Response) -> bytes | None:
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
            self._leg("decode").settle("worked", time.monotonic() - since if self._plan.stream else None)
            self.note("first_token")
            placed, costs = self._placed["decode"], self._services.selection.costs
            placed.prefilled()
            if self._plan.stream and self.prefill is not None:
                late = time.monotonic() - self._prefilled_at if self._prefilled_at else 0.0
                costs.overhead.add(placed.uncached, late)

    def _learn(self, reply: Body, took_s: float) -> None:
        """P has answered: it is free of this prompt, and has shown what one costs."""
        self._leg("prefill").settle("worked", took_s)
        placed, costs = self._placed["prefill"], self._services.selection.costs
        costs.prefill.add(placed.work, took_s)
        self._prefilled_at = time.monotonic()
        placed.prefilled()
        usage = reply.get("usage")
        count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if self._ask.prompt is not None and isinstance(count, int):
            costs.told(self._ask.prompt.nbytes, count)

    def saw(self, watcher: Watcher, chunk: bytes) -> bool:
        """Feed what is relayed, about one token; True if this was the first one."""
        self.pace.mark(chunk)
        if self.pace.chunks % GROWS_BY == 0:
            self._placed["decode"].grow(GROWS_BY)
        if watcher.feed(chunk):
            self._token_seen()
            return True
        return False

    async def _post(self, placed: Placement, body: Body) -> Response:
        """A 200, its body unread. Raises `LegFailed`."""
        engine, headers = placed.engine, placed.headers(self._headers)
        raw = wire.dumps(body, self._plan.plain)
        try:
            response = await self._services.upstream.post(engine.role, engine.url, self._plan.route, raw, headers)
        except LegFailed as error:
            if error.code == PeerUnreachable.code:
                self._services.pool.suspect(engine, error.message)
            else:
                self._services.pool.refresh(engine)
            raise
        self._responses.append(response)
        if response.status != 200:
            refused = await engine_error(engine.role, engine.url, response)
            refused.body = recounted(refused.body, len(body), self._plan.fields)
            raise refused
        return response

    def _decode_params(self, dialect: Dialect, returned: Params | None) -> Params:
        return dialect.decode(self.transfer_id, self._plan, self._placed["prefill"].source(), returned)

    def _start(self, leg: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        task = asyncio.create_task(leg)
        self._tasks.append(task)
        return task


def _refused(error: BaseException | None) -> bool:
    """The engine's own word on the request."""
    return isinstance(error, LegFailed) and 400 <= error.own_status < 500


def _object(raw: bytes) -> Body | None:
    try:
        body, _ = wire.loads(raw)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None
