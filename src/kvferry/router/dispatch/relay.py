"""D's answer -> the client: bytes as they came, at the pace of the slower side; a break ends in one error event.

What has come from D's socket goes to the client's in its turn, in one write. Only where the client is slower than D
does a task wait between the two; D's socket isn't read meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvferry.errors import KVFerryError
from kvferry.router.dispatch.dispatch import Answer, Exchange
from kvferry.router.http.server import Request
from kvferry.router.http.sse import Watcher
from kvferry.router.http.stream import Stream
from kvferry.router.http.upstream import pipe, returned
from kvferry.router.replies import LegFailed, error_event
from kvferry.router.requests.edits import Edits
from kvferry.router.requests.first_token import EVENT_STREAM

LAST_WORDS_S = 5.0
"""A client that does not even take the error event within this long is given up."""


async def relay(
    request: Request,
    exchange: Exchange,
    answer: Answer,
    headers: dict[str, str],
    deadline: float | None,
    first_token: Callable[[], None],
    edits: Edits | None = None,
) -> tuple[Stream, KVFerryError | None]:
    """What was sent, and the failure that cut it, if one did. Raises `ConnectionError` if the client is gone."""
    kept = returned(answer.response.headers)
    kept.update(headers)
    if exchange.opening is not None:
        kept["Content-Type"] = EVENT_STREAM  # P's own answer is whole
    out = request.stream(kept)
    failure: KVFerryError | None = None
    url, watcher = exchange.urls[-1], _watcher(answer)

    held: list[bytes] = []

    def sink(pieces: list[bytes]) -> bool:
        read = b"".join(pieces)
        if exchange.saw(watcher, read, pieces):
            first_token()
        if edits is None or edits.plain(read):
            out.write(read)
        else:
            held.append(read)
        return not (held or out.full)

    try:
        async with asyncio.timeout_at(deadline):
            if answer.rest is not None:
                out.write(answer.head)
                first_token()
                answer = await rest_of(answer.rest, url)
                watcher = _watcher(answer)
                exchange.pace.mark(answer.head)
            out.write(answer.head if edits is None or edits.plain(answer.head) else await edits.take(answer.head))
            if watcher.first_data is not None:
                first_token()
            while await pipe("decode", url, answer.response, sink):
                for read in held:
                    assert edits is not None
                    out.write(await edits.take(read))
                held.clear()
                await out.drained()
        if edits is not None:
            out.write(edits.rest())
        failure = ended(exchange, answer)
    except LegFailed as error:
        failure = error
    except TimeoutError:
        failure = exchange.late()
    if failure is not None:
        event = error_event(failure, exchange.transfer_id)
        try:
            out.write(event if watcher.between_events else b"\n\n" + event)
            async with asyncio.timeout(LAST_WORDS_S):
                await out.drained()
        except TimeoutError:
            raise ConnectionResetError("the client takes nothing") from None
    out.end()
    return out, failure


def _watcher(answer: Answer) -> Watcher:
    assert answer.watcher is not None
    return answer.watcher


async def rest_of(decode: asyncio.Task[Answer], url: str) -> Answer:
    """D's stream behind P's token. Raises `LegFailed`."""
    answer = await decode
    if answer.watcher is None:
        raise LegFailed(f"decode engine {url} answered a stream as a whole", side="decode", peer=url)
    return answer


def ended(exchange: Exchange, answer: Answer) -> LegFailed | None:
    """What is wrong with the end of a stream that was read to it."""
    if (answer.watcher is not None and answer.watcher.done) or answer.response.framed:
        return None
    message = f"decode engine {exchange.decode.url} closed its stream before the end"
    return LegFailed(message, side="decode", peer=exchange.decode.url)
