"""D's answer -> the client: bytes as they came, at the pace of the slower side; a break ends in one error event.

A piece goes to the client's socket in the callback that read it from D's. Only where the client is slower than D does a
task wait between the two; D's socket isn't read meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvferry.errors import KVFerryError
from kvferry.router.dispatch import Answer, Exchange
from kvferry.router.edits import Edits
from kvferry.router.replies import LegFailed, error_event
from kvferry.router.server import Request
from kvferry.router.stream import Stream
from kvferry.router.upstream import pipe, returned

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
    watcher = answer.watcher
    assert watcher is not None
    kept = returned(answer.response.headers)
    kept.update(headers)
    out = request.stream(kept)
    failure: KVFerryError | None = None
    url, source = exchange.decode.url, answer.response

    held: list[bytes] = []

    def sink(piece: bytes) -> bool:
        if exchange.saw(watcher, piece):
            first_token()
        if edits is None or edits.plain(piece):
            out.write(piece)
        else:
            held.append(piece)
        return not (held or out.full)

    try:
        async with asyncio.timeout_at(deadline):
            out.write(answer.head if edits is None or edits.plain(answer.head) else await edits.take(answer.head))
            if watcher.first_data is not None:
                first_token()
            while await pipe("decode", url, source, sink):
                for piece in held:
                    assert edits is not None
                    out.write(await edits.take(piece))
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


def ended(exchange: Exchange, answer: Answer) -> LegFailed | None:
    """What is wrong with the end of a stream that was read to it."""
    if (answer.watcher is not None and answer.watcher.done) or answer.response.framed:
        return None
    message = f"decode engine {exchange.decode.url} closed its stream before the end"
    return LegFailed(message, side="decode", peer=exchange.decode.url)
