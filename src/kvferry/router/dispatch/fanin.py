"""Several prompts in one stream: one transfer each, events in the order in which they come, one end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvferry.errors import KVFerryError
from kvferry.router.dispatch.dispatch import Answer, Exchange
from kvferry.router.dispatch.relay import LAST_WORDS_S, ended
from kvferry.router.http.server import Request
from kvferry.router.http.stream import Stream
from kvferry.router.http.upstream import read_some, returned
from kvferry.router.replies import LegFailed, error_event
from kvferry.router.requests.edits import DONE, Edits, dump
from kvferry.router.requests.merge import total
from kvferry.router.requests.openai import Body


class Closing:
    """What the parts' last events say together. `first`: the events of one request carry one time of creation."""

    def __init__(self) -> None:
        self.created: object = None
        self._last: list[Body] = []

    def keep(self, event: Body) -> None:
        self._last.append(event)

    def event(self) -> bytes:
        """The counts of all prompts, if the parts gave theirs."""
        if not self._last:
            return b""
        said = self._last[0] | {"usage": total([event.get("usage") for event in self._last])}
        if self.created is not None:
            said["created"] = self.created
        return b"data: " + dump(said) + b"\n\n"


class Part:
    """One of the prompts: its choices are numbered behind those of the prompts before it, `n` each."""

    def __init__(self, at: int, n: int, closing: Closing) -> None:
        self._first = at * n
        self._closing = closing

    def event(self, event: Body) -> bool | None:
        choices = event.get("choices")
        if choices and not (isinstance(choices, list) and all(isinstance(one, dict) for one in choices)):
            return False  # no answer to a completion; the client sees what the engine said
        if not choices:
            if "error" in event:
                return False
            self._closing.keep(event)
            return None
        if self._closing.created is None:
            self._closing.created = event.get("created")
        created = self._closing.created
        changed = self._first > 0 or event.get("created") != created
        if changed:
            for choice in choices:
                index = choice.get("index", 0)
                choice["index"] = (index if isinstance(index, int) else 0) + self._first
            if created is not None:
                event["created"] = created
        return changed


async def relay_all(
    request: Request,
    headers: dict[str, str],
    deadline: float | None,
    first_token: Callable[[], None],
    exchanges: Sequence[Exchange],
    answers: Sequence[Answer],
    edits: Sequence[Edits],
    closing: Closing,
) -> tuple[Stream, KVFerryError | None]:
    """As `relay.relay`. The first part that breaks ends the others; who reads slowly slows all of them."""
    kept = returned(answers[0].response.headers)
    kept.update(headers)
    stream = request.stream(kept)
    first_token()

    async def pump(exchange: Exchange, answer: Answer, edit: Edits) -> None:
        watcher, chunk = answer.watcher, answer.head
        assert watcher is not None
        while chunk:
            stream.write(await edit.take(chunk))
            await stream.drained()
            chunk = await read_some("decode", exchange.decode.url, answer.response)
            exchange.saw(watcher, chunk)
        stream.write(edit.rest())
        if (failure := ended(exchange, answer)) is not None:
            raise failure

    pumps = [asyncio.create_task(pump(*one)) for one in zip(exchanges, answers, edits, strict=True)]
    failure: KVFerryError | None = None
    try:
        async with asyncio.timeout_at(deadline):
            await asyncio.gather(*pumps)
    except LegFailed as error:
        failure = error
    except TimeoutError:
        failure = exchanges[0].late()
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
    ids = ",".join(exchange.transfer_id for exchange in exchanges)
    end = error_event(failure, ids) if failure is not None else closing.event() + DONE + b"\n\n"
    stream.write(end)
    try:
        async with asyncio.timeout(LAST_WORDS_S):
            await stream.drained()
    except TimeoutError:
        raise ConnectionResetError("the client takes nothing") from None
    stream.end()
    return stream, failure
