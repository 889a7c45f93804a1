"""D's streams -> a render session. While one request of the session is out, what comes waits, each chunk its own.

What waits is bounded: beyond that D's sockets aren't read. A client that reads slowly thus holds the engines back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType

from kvferry.errors import EngineError
from kvferry.router.dispatch.dispatch import Answer, Exchange
from kvferry.router.dispatch.relay import ended, rest_of
from kvferry.router.engines.pool import Engine
from kvferry.router.http.upstream import pipe
from kvferry.router.render.answers import SIDE, Said, facts
from kvferry.router.render.chunks import Chunks
from kvferry.router.render.session import Session
from kvferry.router.replies import LegFailed
from kvferry.router.requests.openai import Plan

MOST_WAITING = 128 * 1024
"""Bytes of chunks: some hundred tokens, which a worker turns into text in some ten milliseconds."""


def _block(prefill: Engine | None) -> int:
    about = prefill.description if prefill is not None else None
    return about.block_size if prefill is not None and about is not None and prefill.ranks[0].caches else 0


class Feed:
    """`async with`: while it is open the streams are read. `next` until what it says is done."""

    def __init__(self, plan: Plan, session: Session, exchanges: Sequence[Exchange], answers: Sequence[Answer]) -> None:
        self._plan, self._session = plan, session
        self._legs = [
            (exchange, answer, Chunks(at, plan.n, exchange.urls[-1]))
            for at, (exchange, answer) in enumerate(zip(exchanges, answers, strict=True))
        ]
        self._waiting: list[bytes] = []
        self._size = 0
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._room.set()
        self._failure: LegFailed | None = None
        self._pumps: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Feed:
        self._pumps = [asyncio.create_task(self._pump(*leg)) for leg in self._legs]
        for pump in self._pumps:
            pump.add_done_callback(self._ended)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        self._pumps.clear()  # their exceptions know this by their frames

    @property
    def told(self) -> LegFailed | None:
        """The error with which a stream ended, told to the session as it came."""
        return next((chunks.error for _, _, chunks in self._legs if chunks.error is not None), None)

    async def next(self) -> Said:
        """What the next chunks give. Raises `LegFailed` of a stream that broke, once what came before it was said; and
        as `Session.feed`."""
        while not self._waiting:
            if self._failure is not None:
                raise self._failure
            if all(pump.done() for pump in self._pumps):
                where = self._session.worker
                message = f"render worker {where} has made no end of an answer whose tokens it has all of"
                raise LegFailed(message, side=SIDE, peer=where, cause=EngineError(message))
            self._news.clear()
            await self._news.wait()
        entries, self._waiting, self._size = self._waiting, [], 0
        self._room.set()
        said = await self._session.feed(entries)
        for request, choice in said.stopped:
            self._stop(request, choice)
        return said

    def _stop(self, request: int, choice: int) -> None:
        if request >= len(self._legs):
            return
        exchange, _, chunks = self._legs[request]
        chunks.stop(choice)
        if chunks.over:
            self._pumps[request].cancel()
            exchange.close()  # which ends it in its engine

    async def _pump(self, exchange: Exchange, answer: Answer, chunks: Chunks) -> None:
        scores = self._plan.prompt_logprobs is not None
        reply = await exchange.prefilled()
        if scores and exchange.prefill is not None and not reply:
            url = exchange.prefill.url
            raise LegFailed(f"prefill engine {url} did not tell the prompt's logprobs", side="prefill", peer=url)
        chunks.tell(facts(reply, scores=scores, block=_block(exchange.prefill)))
        url = exchange.urls[-1]
        if answer.watcher is None:
            self._add(chunks.whole(answer.body, alone=exchange.prefill is None))
            return
        self._add(chunks.take(answer.head))
        if answer.rest is not None:
            answer = await rest_of(answer.rest, url)
            exchange.pace.mark(answer.head)
            self._add(chunks.take(answer.head))
        watcher = answer.watcher
        assert watcher is not None
        failed: LegFailed | None = None

        def sink(pieces: list[bytes]) -> bool:
            nonlocal failed
            read = b"".join(pieces)
            exchange.saw(watcher, read, pieces)
            try:
                self._add(chunks.take(read))
            except LegFailed as error:
                failed = error
                return False
            return self._room.is_set()

        while await pipe("decode", url, answer.response, sink):
            if failed is not None:
                raise failed
            await self._room.wait()
        if failed is None:
            failed = ended(exchange, answer)
        if failed is not None:
            raise failed

    def _add(self, entries: list[bytes]) -> None:
        if entries:
            self._waiting += entries
            self._size += sum(map(len, entries))
            if self._size > MOST_WAITING:
                self._room.clear()
            self._news.set()

    def _ended(self, pump: asyncio.Task[None]) -> None:
        if not pump.cancelled() and isinstance(error := pump.exception(), LegFailed):
            self._failure = self._failure or error
        self._news.set()
