"""D's answer -> the client: bytes as they came, at the pace of the slower side; a break ends in one error event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from kvferry.errors import KVFerryError
from kvferry.router.dispatch import Answer, Exchange
from kvferry.router.edits import Edits
from kvferry.router.replies import LegFailed, error_event
from kvferry.router.upstream import read_some, returned

LAST_WORDS_S = 5.0
"""A client that does not even take the error event within this long is given up."""


async def relay(
    request: web.Request,
    exchange: Exchange,
    answer: Answer,
    headers: dict[str, str],
    deadline: float | None,
    first_token: Callable[[], None],
    edits: Edits | None = None,
) -> tuple[web.StreamResponse, KVFerryError | None]:
    """What was sent, and the failure that cut it, if one did. Raises `ConnectionError` if the client is gone."""
    watcher = answer.watcher
    assert watcher is not None
    response = web.StreamResponse(status=200, headers=returned(answer.response.headers))
    response.headers.update(headers)
    await response.prepare(request)
    failure: KVFerryError | None = None
    try:
        async with asyncio.timeout_at(deadline):
            head = answer.head if edits is None or edits.plain(answer.head) else await edits.take(answer.head)
            if head:
                await response.write(head)
            if watcher.first_data is not None:
                first_token()
            while chunk := await read_some("decode", exchange.decode.url, answer.response):
                seen = exchange.saw(watcher, chunk)
                if edits is not None and not edits.plain(chunk):
                    chunk = await edits.take(chunk)
                if chunk:
                    await response.write(chunk)
                if seen:
                    first_token()
        if edits is not None and (rest := edits.rest()):
            await response.write(rest)
        failure = ended(exchange, answer)
    except LegFailed as error:
        failure = error
    except TimeoutError:
        failure = exchange.late()
    if failure is not None:
        event = error_event(failure, exchange.transfer_id)
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await response.write(event if watcher.between_events else b"\n\n" + event)
        except TimeoutError:
            raise ConnectionResetError("the client takes nothing") from None
    await response.write_eof()
    return response, failure


def ended(exchange: Exchange, answer: Answer) -> LegFailed | None:
    """What is wrong with the end of a stream that was read to it."""
    if (answer.watcher is not None and answer.watcher.done) or _framed(answer):
        return None
    message = f"decode engine {exchange.decode.url} closed its stream before the end"
    return LegFailed(message, side="decode", peer=exchange.decode.url)


def _framed(answer: Answer) -> bool:
    """The end of the body was told by its framing, so a missing part would have been an error."""
    headers = answer.response.headers
    return "Content-Length" in headers or "chunked" in headers.get("Transfer-Encoding", "").lower()
