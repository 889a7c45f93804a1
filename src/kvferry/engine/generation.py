"""One client request while the engine works on it: its choices, and the pieces of their output that wait to go out.

Owner: the event loop. Output of a stream goes straight from the step's callback into the connection, with no task
woken per token. While the connection takes nothing, what comes is merged into one piece per choice, so that a client
that does not read costs no more memory than its whole answer; the next output after it reads again takes that along.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.base_protocol import BaseProtocol

from kvferry.engine.exposition import Metrics
from kvferry.engine.openai import Ask
from kvferry.engine.replies import DONE, Piece, Prompt, Replies, Result, Usage, encode, error_body, event
from kvferry.engine.request import Output
from kvferry.engine.stops import StopFinder
from kvferry.engine.text import Tokenizer


class Choice:
    """One request of the engine. `engine_id`: its id there."""

    __slots__ = (
        "_detokenizer",
        "_ids",
        "_include_stop",
        "_index",
        "_keep_ids",
        "_last_at",
        "_offset",
        "_parent",
        "_plain",
        "_plain_len",
        "_stop_reason",
        "_stops",
        "_texts",
        "cached",
        "engine_id",
        "finish_reason",
        "made",
        "opened",
        "prompt",
        "waiting",
    )  # fmt: skip

    def __init__(
        self, parent: Generation, index: int, engine_id: str, prompt: Prompt, tokenizer: Tokenizer, min_tokens: int
    ) -> None:
        ask = parent.ask
        self.engine_id = engine_id
        self.prompt = prompt
        self.finish_reason: str | None = None
        self.made = 0
        """Output tokens so far."""
        self.cached = 0
        self.waiting = 0
        """Output tokens that have not gone out."""
        self.opened = False
        """Its first event is made."""
        self._parent = parent
        self._index = index
        self._detokenizer = tokenizer.detokenizer(prompt.token_ids, skip_special=ask.skip_special)
        self._stops = (
            StopFinder(self._detokenizer, ask.stops, include=ask.include_stop, min_tokens=min_tokens)
            if ask.stops
            else None
        )
        self._include_stop = ask.include_stop
        self._keep_ids = ask.token_ids or ask.logprobs is not None or not ask.stream
        self._plain = parent.replies.plain(index, prompt) if ask.stream else None
        self._plain_len = sum(map(len, self._plain)) if self._plain else 0
        self._stop_reason: int | str | None = None
        self._last_at = 0.0
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._offset = 0

    def take_in(self, output: Output, at: float) -> bool:
        """`at`: monotonic seconds of the step's end. True: a stop string ended it, which the engine must be told."""
        ids, reason, parent = output.new_token_ids, output.finish_reason, self._parent
        if ids:
            if self.made:
                parent.metrics.between_tokens.observe(at - self._last_at)
            else:
                self.cached = output.num_cached_tokens
                parent.metrics.first_token.observe(at - parent.arrived)
            self._last_at = at
        if reason == "error":
            parent.metrics.finished["error"] += 1
            parent.fail(output.error or "Internal server error")
            return False
        ends_unseen = reason == "stop" and not self._include_stop
        stop = None
        if self._stops is not None:
            kept, stop = self._stops.add(ids, skip_last=ends_unseen)
            ids = ids[:kept]
            text = self._stops.take(finished=reason is not None or stop is not None)
        else:
            text = self._detokenizer.add(ids[:-1] if ends_unseen else ids)
        self.made += len(ids)
        if reason is None and stop is None:
            if self._plain is not None and not self.waiting and self.opened and parent.interval == 1 and parent.open:
                head, tail = self._plain
                encoded = encode(text)
                if parent.framed:
                    size = self._plain_len + len(encoded)
                    parent.write(b"%x\r\n%b%b%b\r\n" % (size, head, encoded, tail))
                else:
                    parent.write(b"%b%b%b" % (head, encoded, tail))
                return False
            self._hold(text, ids)
            parent.held(self)
            return False
        self._hold(text, ids)
        self.finish_reason = "stop" if stop is not None else reason
        self._stop_reason = stop if stop is not None else output.stop_token
        parent.metrics.finished[self.finish_reason or "stop"] += 1
        parent.metrics.request.observe(at - parent.arrived)
        parent.ended(self, output.kv_transfer_params if stop is None else None)
        return stop is not None

    def _hold(self, text: str, ids: Sequence[int]) -> None:
        self._texts.append(text)
        self.waiting += len(ids)
        if self._keep_ids:
            self._ids += ids

    def event(self) -> bytes:
        """Everything of this choice that waits, as events."""
        opening = b"" if self.opened else self._parent.replies.opening(self._index, self.prompt)
        piece = Piece(
            index=self._index,
            prompt=self.prompt,
            text="".join(self._texts),
            token_ids=self._ids,
            first=not self.opened,
            made=self.made,
            offset=self._offset,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )
        data, self._offset = self._parent.replies.delta(piece)
        self.opened = True
        self._texts, self._ids, self.waiting = [], [], 0
        return opening + data

    def result(self) -> Result:
        return Result(
            prompt=self.prompt,
            text="".join(self._texts),
            token_ids=self._ids,
            finish_reason=self.finish_reason or "stop",
            stop_reason=self._stop_reason,
        )


class Generation:
    """`first`: something can be answered; `done`: all has been made, or `error` says why not."""

    def __init__(self, ask: Ask, replies: Replies, metrics: Metrics, arrived: float) -> None:
        loop = asyncio.get_running_loop()
        self.ask = ask
        self.replies = replies
        self.metrics = metrics
        self.arrived = arrived
        self.choices: list[Choice] = []
        self.first: asyncio.Future[None] = loop.create_future()
        self.done: asyncio.Future[None] = loop.create_future()
        self.error = ""
        self.framed = True
        self.interval = ask.interval
        self.kv_transfer_params: Mapping[str, Any] | None = None
        self._protocol: BaseProtocol | None = None
        self.transport: asyncio.Transport | None = None
        """Of the connection that output goes into, once it does."""
        self._waiting: dict[Choice, None] = {}

    # -- called by the choices

    @property
    def open(self) -> bool:
        """What is written now goes out."""
        protocol = self._protocol
        return protocol is not None and not protocol.writing_paused

    @property
    def congested(self) -> bool:
        """The client doesn't read as fast as the engine writes."""
        protocol = self._protocol
        return protocol is not None and protocol.writing_paused

    def write(self, data: bytes) -> None:
        """Only while `open`, and framed already."""
        transport = self.transport
        if transport is not None and not transport.is_closing():
            transport.write(data)

    def held(self, choice: Choice) -> None:
        self._waiting[choice] = None
        if not self.ask.stream:
            return
        if not self.first.done():
            self.first.set_result(None)
        if self.open and (choice.waiting >= self.interval or not choice.opened):
            self._send(self._pieces())

    def ended(self, choice: Choice, kv_transfer_params: Mapping[str, Any] | None) -> None:
        self._waiting[choice] = None
        if self.kv_transfer_params is None and choice.prompt is self.choices[0].prompt:
            self.kv_transfer_params = kv_transfer_params
        if all(other.finish_reason is not None for other in self.choices):
            self._finish()
        elif self.ask.stream:
            if not self.first.done():
                self.first.set_result(None)
            if self.open:
                self._send(self._pieces())

    def fail(self, error: str) -> None:
        """The whole request ends with this error; only the first one counts."""
        if not self.done.done():
            self.error = error
            self._finish()

    def _finish(self) -> None:
        for future in (self.first, self.done):
            if not future.done():
                future.set_result(None)

    # -- called by the handler

    def attach(self, request: web.Request) -> None:
        """From now on output goes straight into the request's connection. Its headers have been sent."""
        self.framed = request.version >= HttpVersion11
        self._protocol = request.protocol
        self.transport = request.transport
        if self._waiting and self.open:
            self._send(self._pieces())

    def detach(self) -> None:
        self._protocol = None

    def take(self) -> bytes:
        """What waits, as events; once all is done with the last ones of the stream."""
        pieces = self._pieces()
        if self.error:
            return pieces + event(error_body(self.error, "InternalServerError", 500)) + DONE
        return pieces + self.replies.closing(self.usage()) if self.done.done() else pieces

    def whole(self) -> bytes:
        return self.replies.whole([choice.result() for choice in self.choices], self.usage(), self.kv_transfer_params)

    def usage(self) -> Usage:
        prompts = {id(choice.prompt): choice for choice in reversed(self.choices)}
        return Usage(
            prompt_tokens=sum(len(choice.prompt.token_ids) for choice in prompts.values()),
            completion_tokens=sum(choice.made for choice in self.choices),
            cached_tokens=sum(choice.cached for choice in prompts.values()),
        )

    def _pieces(self) -> bytes:
        pieces = b"".join([choice.event() for choice in self._waiting])
        self._waiting.clear()
        return pieces

    def _send(self, data: bytes) -> None:
        if not data:
            return  # a chunk of nothing would end the answer
        self.write(b"%x\r\n%b\r\n" % (len(data), data) if self.framed else data)
