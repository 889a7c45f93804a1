"""D's answer -> the client: bytes as they came, at the pace of the slower side; a break ends in one error event.

A piece goes to the client's socket in the callback that read it from D's. Only where the client is slower than D does a
task wait between the two; D's socket isn't read meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from kvferry.errors import KVFerryError
from kvferry.router.dispatch import Answer, Exchange
from kvferry.router.replies import LegFailed, error_event
from kvferry.router.upstream import pipe, read_some, returned

LAST_WORDS_S = 5.0
"""A client that does not even take the error event within this long is given up."""
SLOW_BYTES = 64 * 1024
"""What may wait for the client before D is no longer read."""


async def relay(
    request: web.Request,
    exchange: Exchange,
    answer: Answer,
    headers: dict[str, str],
    deadline: float | None,
    first_token: Callable[[], None],
) -> tuple[web.StreamResponse, KVFerryError | None]:
    """What was sent, and the failure that cut it, if one did. Raises `ConnectionError` if the client is gone."""
    watcher = answer.watcher
    assert watcher is not None
    response = web.StreamResponse(status=200, headers=returned(answer.response.headers))
    response.headers.update(headers)
    await response.prepare(request)
    failure: KVFerryError | None = None
    url, source = exchange.decode.url, answer.response
    out = _Out(request, response)

    def sink(piece: bytes) -> bool:
        out.write(piece)
        if exchange.saw(watcher, piece):
            first_token()
        return not out.full

    try:
        async with asyncio.timeout_at(deadline):
            await response.write(answer.head)
            if watcher.first_data is not None:
                first_token()
            while await pipe("decode", url, source, sink):
                while out.full and (piece := await read_some("decode", url, source)):
                    seen = exchange.saw(watcher, piece)
                    await response.write(piece)
                    if seen:
                        first_token()
        if not watcher.done and not source.framed:
            failure = LegFailed(
                f"decode engine {url} closed its stream before the end",
                side="decode",
                peer=url,
            )
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


class _Out:
    """Writes to the client without a task switch, framed as `response` was announced."""

    def __init__(self, request: web.Request, response: web.StreamResponse) -> None:
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client left")
        self._transport: asyncio.WriteTransport = transport
        self._chunked = response.headers.get("Transfer-Encoding", "").lower() == "chunked"

    @property
    def full(self) -> bool:
        return self._transport.get_write_buffer_size() > SLOW_BYTES

    def write(self, piece: bytes) -> None:
        """To a client that left it goes nowhere; its handler is being cancelled."""
        if not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self._chunked else piece)
