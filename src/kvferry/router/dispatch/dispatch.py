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
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec

from kvferry.errors import KVFerryError, PeerUnreachable, TransferTimeout
from kvferry.ids import TransferId, new_transfer_id
from kvferry.router.choice.ask import Ask
from kvferry.router.dispatch import explain
from kvferry.router.dispatch.placement import Placement
from kvferry.router.dispatch.sent import STREAMED, Legs, Sent
from kvferry.router.engines.dialect import Dialect, Params
from kvferry.router.engines.faults import is_of_transfer, verdict_on
from kvferry.router.engines.pool import Engine, Role
from kvferry.router.engines.standing import Leg
from kvferry.router.http import wire
from kvferry.router.http.connection import Response
from kvferry.router.http.sse import Watcher
from kvferry.router.http.upstream import engine_error, forwarded, read_all, read_some
from kvferry.router.replies import LegFailed, Refusal
from kvferry.router.requests import first_token
from kvferry.router.requests.openai import Body, Plan, decode_body, prefill_body
from kvferry.router.requests.pace import Pace
from kvferry.router.seen.recent import clipped
from kvferry.router.seen.record import Event
from kvferry.router.services import Services
from kvferry.transfer import inquiry

log = logging.getLogger("kvferry.router")

Result = TypeVar("Result")

PREFILL_TAIL_S = 10.0
"""An answer that D gave whole waits this long for P's, whose usage it carries; P ended long before, if it lives."""
LAST_WORD_S = 1.0
"""P is heard out for so long when all is over."""
GROWS_BY = 16
"""Chunks of an answer after which an engine's load is told: once per token would cost more than it says."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """D's answer. Streamed: `head` has been read of `response` and seen by `watcher`. Whole: `body`.

    `rest`: `head` is the event of P's token, `response` P's, and the answer goes on with D's, which is still to come.
    """

    response: Response
    watcher: Watcher | None = None
    head: bytes = b""
    body: bytes = b""
    rest: asyncio.Task[Answer] | None = None


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
        self._nbytes = self._ask.prompt.nbytes if self._ask.prompt is not None else None
        self._placed: dict[Role, Placement] = {}
        """Role -> where that leg is."""
        self.prefill = prefill
        self._services = services
        if prefill is not None:
            self._place(prefill, computes=True, decodes=False)
        if prefill is None or not services.config.bind_percent:
            self._place_decode()
        self.prefill_reply: Body | None = None
        self.opening: first_token.Opening | None = None
        """P's token is the answer's first."""
        self._prefill: asyncio.Task[Body] | None = None
        self._prefill_response: Response | None = None
        self._plan = plan
        self._part = part
        self._dialect = services.dialect if prefill is not None else None
        passed_on = forwarded(headers, services.config)
        if self._dialect is not None:
            passed_on.update(self._dialect.headers(self.transfer_id))
        self._legs = Legs(services, passed_on)
        self._tasks: list[asyncio.Task[Any]] = []
        self._prefill_ok = asyncio.get_running_loop().create_future()
        self.events: list[Event] = []
        self.pace = Pace(functools.partial(services.metrics.served.gaps, clipped(plan.model)))
        self._decode_judged = False
        """It failed before its first byte, which behind P's token is after the answer's."""
        self._grown = 0
        """Chunks that D's load has been told of."""
        self.landed = False
        """D made a token: it has its KV, and P holds nothing for it."""
        self._asked_at = self._prefilled_at = 0.0
        self._begun = time.monotonic()
        self._closed = False
        self._winding_up: asyncio.Task[None] | None = None

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
            self._prefill_ok.set_result(None)
            self.note("dispatched", decode=self.decode.url, mode="colocated")
            sent = self._decode_leg(None)
            answer = await self._opening(sent)
            return answer if answer is not None else await self._start(self._decode_answer(sent))
        self._services.metrics.pd_requests.labels(self._dialect.name).inc()
        told: dict[str, Any] = {"decode": self.decode.url} if self.bound else {"bind": self._services.config.bind}
        self.note("dispatched", prefill=self.prefill.url, mode=self._dialect.name, **told)
        prefill = self._prefill = self._start(self._prefill_leg(self._dialect, self.prefill))
        if not self.bound:
            await self._reached(prefill, self.prefill)
        elif not self._dialect.concurrent:
            await self._prefilled(prefill, self._dialect)
        begun = None
        if self._plan.begins and prefill.done():
            begun = first_token.opening(self._plan, self._part, prefill.result())
            if begun is not None and begun.last:
                return self._only_prefill(begun)
        if not self.bound:
            if prefill.done() and begun is None:
                pool = self._services.pool
                await pool.room.wait(lambda: pool.has_room(self._ask))
            self._place_decode()
            self.note("bound", decode=self.decode.url)
        if begun is not None and first_token.fits(self._part, self.decode.max_model_len):
            return await self._go_on(begun, self._dialect)
        if not self._dialect.concurrent:
            returned = prefill.result().get("kv_transfer_params")
            return await self._decode(self._decode_params(self._dialect, returned))
        sent = self._decode_leg(self._decode_params(self._dialect, None))
        answer = await self._opening(sent, prefill)
        if answer is None:
            return await self._first_of(prefill, self._start(self._decode_answer(sent)))
        if prefill.done() and not _silent(prefill):
            prefill.result()
        return answer

    async def _opening(self, sent: Sent, prefill: asyncio.Task[Body] | None = None) -> Answer | None:
        """D's stream if its first token came with its head, in the moment in which that was read: it waits for no task
        then. None if it didn't come so, or P failed."""
        news = self._legs.listen(sent)
        if news is None:
            return None
        if prefill is not None:
            prefill.add_done_callback(lambda task: news.tell() if task.cancelled() or task.exception() else None)
        await news
        response = self._legs.here(sent)
        if response is None:
            return None
        watcher, head = Watcher(), response.here
        watcher.feed(head)
        if watcher.first_data is None or watcher.first_is_error:
            return None
        self._legs.taken(sent, response)
        self.pace.begin(head)
        self._token_seen()
        return Answer(response=response, watcher=watcher, head=head)

    async def _go_on(self, begun: first_token.Opening, dialect: Dialect) -> Answer:
        """The answer that P has begun: its token at once, D's when they come. Of a whole one both."""
        self.opening = begun
        part = first_token.decode_part(self._part, begun.token)
        params = self._decode_params(dialect, begun.reply.get("kv_transfer_params"))
        self.note("begun")
        decode = self._decode(params, part)
        if not self._plan.stream:
            answer = await decode
            body = first_token.joined(self._part, begun, answer.body)
            return msgspec.structs.replace(answer, body=body)
        return self._stream_begun(begun, decode)

    def _only_prefill(self, begun: first_token.Opening) -> Answer:
        """D isn't asked."""
        self.opening = begun
        self.note("begun")
        if self._plan.stream:
            return self._stream_begun(begun)
        assert self._prefill_response is not None
        return Answer(response=self._prefill_response, body=wire.dumps(begun.reply, self._plan.plain))

    def _stream_begun(self, begun: first_token.Opening, rest: asyncio.Task[Answer] | None = None) -> Answer:
        assert self._prefill_response is not None
        head, watcher = first_token.events(self._part, begun), Watcher()
        self.pace.begin(head)
        watcher.feed(head)
        return Answer(response=self._prefill_response, watcher=watcher, head=head, rest=rest)

    async def _reached(self, prefill: asyncio.Task[Body], engine: Engine) -> None:
        """Until enough of the prompt is computed to choose D; P's error ends the wait."""
        enough = self._start(self._enough(prefill, engine))
        await asyncio.wait({prefill, enough}, return_when=asyncio.FIRST_COMPLETED)
        if prefill.done():
            enough.cancel()
            prefill.result()
        else:
            enough.result()

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
        """D's answer. What P says is wrong goes before what D says, also before a good answer: P is asked for more. But
        a token of D's proves that P's KV has landed: it waits for nothing, and stands if P dies without a word."""
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
        if prefill.done() and (error is not None or not _silent(prefill)):
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
                await self._own_words(self._decode(self._decode_params(dialect, None)))
            raise

    async def prefilled(self) -> Body | None:
        """`prefill_told`. D's first token proves that P's reply is made: this waits at most for its way here."""
        if self.prefill is None or self._prefill is None:
            return None
        if not self._prefill.done():
            await asyncio.wait({self._prefill}, timeout=PREFILL_TAIL_S)
        if self.prefill_reply is None:
            why = "P's leg failed" if self._prefill.done() else f"none within {PREFILL_TAIL_S:g} s"
            log.warning("%s: no reply of prefill engine %s: %s", self.transfer_id, self.prefill.url, why)
        return self.prefill_told

    @property
    def prefill_told(self) -> Body | None:
        """P's reply; an empty one if it hasn't come: what only P knows is not told then. None without P."""
        return self.prefill_reply if self.prefill_reply is not None or self.prefill is None else {}

    async def prompt_text(self) -> str:
        """The prompt as the engine shows it. Token ids are asked of D. Raises `LegFailed`."""
        prompt = self._part.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return prompt
        body = {"model": self._part["model"]} if "model" in self._part else {}
        raw = wire.dumps(body | {"tokens": prompt}, self._plan.plain)
        response = await self._legs.ask(self.decode, "/detokenize", raw)
        if response.status != 200:
            raise await engine_error("decode", self.decode.url, response)
        text = (_object(await read_all("decode", self.decode.url, response)) or {}).get("prompt")
        return text if isinstance(text, str) else ""

    def forget_prompt(self, plan: Plan) -> None:
        """`plan`: without it. Only once `open` has returned."""
        self._plan, self._part, self._choose = plan, {}, _chosen
        self._ask = msgspec.structs.replace(self._ask, prompt=None)

    def close(self, *, failure: str = "") -> None:
        """`failure` "" where the answer went out whole. A second time does nothing."""
        if self._closed:
            return
        self._closed = True
        if self.prefill is not None and self._dialect is not None:
            self._services.metrics.pd_duration.labels(self._dialect.name).observe(time.monotonic() - self._begun)
        if not failure and self.landed and self._prefill is not None and not self._prefill.done():
            self._placed["prefill"].prefilled()
            self._placed["decode"].release()
            self._legs.close("decode")
            self._winding_up = self._services.spawn(self._hear_out(self._prefill))
        else:
            self._end(failure)
        if failure:
            self.note("failed", reason=failure)
        else:
            self.note("last_token")

    async def _hear_out(self, prefill: asyncio.Task[Body]) -> None:
        """D's answer was faster than the word of P, which has handed all over: it is to be learned from."""
        try:
            await asyncio.wait({prefill}, timeout=LAST_WORD_S)
        finally:
            self._end("")

    def _end(self, failure: str) -> None:
        for placed in self._placed.values():
            placed.release()
        self._legs.close()
        for task in self._tasks:
            task.cancel()
        unwanted = failure or (first_token.ENDED if self.opening is not None else "")  # a stop string may end it there
        let_go = unwanted if not self.landed and self._dialect and self._dialect.side_channel else ""
        if let_go or not all(task.done() for task in self._tasks):
            self._winding_up = self._services.spawn(self._wind_up(let_go))
        else:
            self._forget_tasks()

    async def _wind_up(self, let_go: str) -> None:
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if let_go and self.prefill is not None:
                where = self._placed["prefill"].number
                outcome = await explain.abandon(self.prefill, self.transfer_id, let_go, where)
                self._services.metrics.abandons.labels(outcome).inc()
        finally:
            self._forget_tasks()

    def _forget_tasks(self) -> None:
        """They are done. Their exceptions know this exchange by their frames."""
        for task in self._tasks:
            if not task.cancelled():
                task.exception()  # else it is told of as one that nobody looked at
        self._tasks.clear()
        self._prefill = None

    async def let_go(self, limit_s: float) -> None:
        """After `close`: until P has been told, or so long; then the telling goes on beside."""
        if self._winding_up is not None:
            await asyncio.wait({self._winding_up}, timeout=limit_s)

    def broke(self, error: KVFerryError) -> None:
        """The answer was cut by this after its first byte, which is D's failure, or the deadline's."""
        if error.code != TransferTimeout.code and not self._decode_judged:
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
        limit = self._services.config.request_timeout_s
        if self._prefill_ok.done() and not self.bound:
            message = f"no decode engine had room within the request deadline of {limit:g} s"
            return LegFailed(message, side="decode", peer="", cause=TransferTimeout(message))
        waiting = self.prefill if self.prefill is not None and not self._prefill_ok.done() else self.decode
        if not (self.landed or self._closed or (self.opening is not None and self.opening.last)):
            self._leg(waiting.role).settle("failed")
        message = f"{waiting.role} engine {waiting.url} did not finish within the request deadline of {limit:g} s"
        return LegFailed(message, side=waiting.role, peer=waiting.url, cause=TransferTimeout(message))

    # -- the legs

    def _prefill_leg(self, dialect: Dialect, engine: Engine) -> Coroutine[Any, Any, Body]:
        """Sent; the rest is to be awaited."""
        self._services.metrics.pd_prefill_requests.labels(engine.url).inc()
        begun = time.monotonic()
        make = first_token.prefill_body if self._plan.begins else prefill_body
        body = make(self._plan, self._part, dialect.prefill(self.transfer_id, self._plan))
        return self._prefill_answer(dialect, self._legs.send(self._plan, self._placed["prefill"], body), begun)

    async def _prefill_answer(self, dialect: Dialect, sent: Sent, begun: float) -> Body:
        metrics, engine = self._services.metrics, sent.engine
        try:
            response = await self._legs.answer(sent)
            self._prefill_response = response
            raw = await read_all("prefill", engine.url, response)
            reply = _object(raw)
            if reply is None:
                message = f"prefill engine {engine.url} answered 200 without a JSON object"
                raise LegFailed(message, side="prefill", peer=engine.url)
            returned = reply.get("kv_transfer_params")
            lacks = dialect.lacks(self.transfer_id, returned if isinstance(returned, dict) else None)
            if lacks:
                what = "aborted the request" if _aborted(reply) else f"lacks {lacks}"
                message = f"prefill engine {engine.url} {what}"
                raise LegFailed(message, side="prefill", peer=engine.url)
        except LegFailed as error:
            metrics.pd_prefill_errors.labels(engine.url, error.code).inc()
            self._judge(error)
            raise
        self._learn(reply, time.monotonic() - begun)
        metrics.pd_prefill_duration.labels(dialect.name).observe(self._prefilled_at - begun)
        self.note("prefill_done")
        self.prefill_reply = reply
        self._prefill_ok.set_result(None)
        return reply

    def _decode_leg(self, params: Params | None, part: Body | None = None) -> Sent:
        """`part`: in place of the client's own."""
        self._asked_at = time.monotonic()
        self._services.metrics.pd_decode_requests.labels(self.decode.url).inc()
        body = decode_body(self._plan, part or self._part, params)
        return self._legs.send(self._plan, self._placed["decode"], body)

    def _decode(self, params: Params, part: Body | None = None) -> asyncio.Task[Answer]:
        """Asked of D, whose answer need not be met in the moment in which it comes."""
        return self._start(self._decode_answer(self._decode_leg(params, part)))

    async def _decode_answer(self, sent: Sent) -> Answer:
        engine, metrics = self.decode, self._services.metrics
        try:
            response = await self._legs.answer(sent)
            if response.content_type != STREAMED:
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
            self._decode_judged = True
            raise error from None

    async def _stream_head(self, response: Response) -> Answer:
        """Up to the first data, or to the first bytes of any kind if P has answered."""
        url = self.decode.url
        watcher, head = Watcher(), b""
        while watcher.first_data is None and not (head and self._prefill_ok.done()):
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
        try:
            await asyncio.wait({read, self._prefill_ok}, return_when=asyncio.FIRST_COMPLETED)
            return read.result() if read.done() else None
        finally:
            read.cancel()
            await asyncio.gather(read, return_exceptions=True)

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
        if self._nbytes is not None and isinstance(count, int):
            costs.told(self._nbytes, count)

    def saw(self, watcher: Watcher, read: bytes, chunks: Sequence[bytes] = ()) -> bool:
        """What is relayed, and the chunks that it came in, each about one token. True if the first was among them."""
        self.pace.mark(*chunks or (read,))
        if self.pace.chunks - self._grown >= GROWS_BY:
            self._placed["decode"].grow(self.pace.chunks - self._grown)
            self._grown = self.pace.chunks
        if watcher.feed(read):
            self._token_seen()
            return True
        return False

    def _decode_params(self, dialect: Dialect, returned: Params | None) -> Params:
        return dialect.decode(self.transfer_id, self._plan, self._placed["prefill"].source(), returned)

    def _start(self, leg: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        task = asyncio.create_task(leg)
        self._tasks.append(task)
        return task


def _refused(error: BaseException | None) -> bool:
    """The engine's own word on the request."""
    return isinstance(error, LegFailed) and 400 <= error.own_status < 500


def _silent(leg: asyncio.Task[Any]) -> bool:
    """It failed without a word: what the engine did before is not undone by that."""
    error = leg.exception()
    return isinstance(error, LegFailed) and error.silent


def _chosen() -> NoReturn:
    raise AssertionError("D was chosen before the answer began")


def _aborted(reply: Body) -> bool:
    choices = reply.get("choices")
    choices = choices if isinstance(choices, list) else []
    return any(isinstance(one, dict) and one.get("finish_reason") == "abort" for one in choices)


def _object(raw: bytes) -> Body | None:
    try:
        body, _ = wire.loads(raw)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None
