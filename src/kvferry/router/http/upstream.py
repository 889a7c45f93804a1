"""Requests to the engines: which headers go there and come back, what a broken connection means.

Owner: the event loop. A response is closed by whoever holds it; closing one before its end closes its connection,
which is how an engine learns that nobody wants the answer.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
import time
from collections.abc import Callable, Mapping

import msgspec
from multidict import CIMultiDict

from kvferry.errors import EngineError, PeerUnreachable
from kvferry.router.config import RouterConfig
from kvferry.router.http.connection import Broken, Response, Sink
from kvferry.router.http.connections import Connections, Unreachable
from kvferry.router.replies import MAX_ERROR_BYTES, LegFailed, cut_body

HOP_BY_HOP = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-connection",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
_NOT_FORWARDED = HOP_BY_HOP | {
    "host",
    "expect",
    # said anew for the body that is really sent
    "content-length",
    "content-encoding",
    "accept-encoding",
    # the rank must be the one that the transfer names
    "x-data-parallel-rank",
}
_NOT_RETURNED = HOP_BY_HOP | {"content-length", "date", "server"}

MOST_ANSWER_BYTES = 256 * 1024 * 1024
"""Of an answer that isn't streamed: a million tokens with 20 logprobs each are about as much."""
IDLE_RACE_S = 0.5
"""A kept connection that breaks this soon was closed by the engine while idle; later it broke at work."""


def _without(headers: Mapping[str, str], skip: frozenset[str]) -> CIMultiDict[str]:
    """Nor those that `Connection` names."""
    named = headers.get("Connection")
    if named:
        skip = skip.union(name.strip().lower() for name in named.split(","))
    return CIMultiDict([(name, value) for name, value in headers.items() if name.lower() not in skip])


def forwarded(headers: Mapping[str, str], config: RouterConfig) -> CIMultiDict[str]:
    """The client's headers as an engine gets them. The client's own Authorization goes before the router's key, but
    where the router checks its clients' keys itself and has one for the engines: then theirs stays here.
    """
    out = _without(headers, _NOT_FORWARDED)
    if config.api_key and (config.client_key_file or "Authorization" not in out):
        out["Authorization"] = f"Bearer {config.api_key}"
    out["Accept-Encoding"] = "identity"
    return out


def returned(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """An engine's headers as the client gets them."""
    return _without(headers, _NOT_RETURNED)


class Answer(msgspec.Struct, frozen=True):
    """Of a GET."""

    status: int
    body: bytes


class Asked:
    """One request to an engine. `answer` once, or `drop`."""

    def __init__(
        self, connections: Connections, side: str, base: str, route: str, body: bytes, headers: Mapping[str, str]
    ) -> None:
        self._side, self._base = side, base
        self._begun = time.monotonic()
        self._again = functools.partial(connections.request, "POST", base, route, headers, body, fresh=True)
        self._asking = connections.ask("POST", base, route, headers, body)

    async def answer(self) -> Response:
        """Once its head is there. Raises `LegFailed`.

        A second try is made, silently, only if a kept connection broke at once and without a byte of an answer.
        """
        resent = False
        try:
            try:
                return await self._asking.answer()
            except Broken as error:
                _, kept, touched = error.args
                if not kept or touched or time.monotonic() - self._begun > IDLE_RACE_S:
                    raise
                resent = True
                return await self._again()
        except (Unreachable, Broken) as error:
            failed = broken(self._side, self._base, error)
            failed.resent = resent
            failed.silent = failed.silent or resent
            raise failed from error

    def listen(self, heard: Callable[[], None]) -> bool:
        """`heard` is called in the moment in which the answer's head comes, or none will. False where it can't be."""
        return self._asking.listen(heard)

    @property
    def here(self) -> Response | None:
        """The answer, if its head has come."""
        return self._asking.here

    def take(self) -> None:
        """The answer that is `here`; `answer` is not to be called then."""
        self._asking.take()

    def drop(self) -> None:
        """Nobody will wait for the answer."""
        self._asking.drop()


class Upstream:
    """Made on the event loop, closed in `close`. `tls`: for https engines; None: the system's trust."""

    def __init__(self, connect_timeout_s: float, tls: ssl.SSLContext | None = None) -> None:
        # No limit here: a D leg that waits for its P leg must never keep that from a connection. `max_requests` bounds.
        self._connections = Connections(connect_timeout_s, tls)

    def close(self) -> None:
        self._connections.close()

    async def post(self, side: str, base: str, route: str, body: bytes, headers: Mapping[str, str]) -> Response:
        """The answer once its head is there. Raises `LegFailed`."""
        return await self.ask(side, base, route, body, headers).answer()

    def ask(self, side: str, base: str, route: str, body: bytes, headers: Mapping[str, str]) -> Asked:
        """Sent at once, where a connection was kept."""
        return Asked(self._connections, side, base, route, body, headers)

    async def pass_on(
        self, side: str, base: str, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> Response:
        """A request of any kind, sent once; the response once its head is there. Raises `LegFailed`."""
        try:
            response = await self._connections.request(method, base, path, headers, body, fresh=True)
        except (Unreachable, Broken) as error:
            raise broken(side, base, error) from error
        return response

    async def get(self, base: str, route: str, api_key: str, timeout_s: float, limit: int = MAX_ERROR_BYTES) -> Answer:
        """Raises `PeerUnreachable`."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._connections.request("GET", base, route, headers, fresh=True)
                body, _ = await response.read(limit)
                response.close()
                return Answer(response.status, body)
        except (Unreachable, Broken) as error:
            raise PeerUnreachable(f"{base}{route}: {error.args[0]}") from error
        except TimeoutError:
            raise PeerUnreachable(f"{base}{route}: no answer within {timeout_s:g} s") from None


async def read_all(side: str, base: str, response: Response) -> bytes:
    """The whole body. Raises `LegFailed`, also where it is above `MOST_ANSWER_BYTES`."""
    try:
        body, more = await response.read(MOST_ANSWER_BYTES)
    except Broken as error:
        raise broken(side, base, error, "in the middle of its answer") from error
    if more:
        response.close()
        message = f"{_named(side, base)} answered with more than {MOST_ANSWER_BYTES} bytes"
        raise LegFailed(message, side=side, peer=base, cause=EngineError(message))
    return body


async def read_some(side: str, base: str, response: Response) -> bytes:
    """What has come, at once; b"" at the end. Raises `LegFailed`."""
    try:
        return await response.some()
    except Broken as error:
        raise broken(side, base, error, "in the middle of its answer") from error


async def pipe(side: str, base: str, response: Response, sink: Sink) -> bool:
    """See `Response.pipe`. Raises `LegFailed`."""
    try:
        return await response.pipe(sink)
    except Broken as error:
        raise broken(side, base, error, "in the middle of its answer") from error


async def engine_error(side: str, base: str, response: Response) -> LegFailed:
    """The engine's own refusal, ready to be passed on; a body above 1 MiB is cut."""
    content_type = response.headers.get("Content-Type", "application/json")
    try:
        body, cut = await response.read(MAX_ERROR_BYTES)
    except Broken as error:
        failed = broken(side, base, error, "in the middle of its error")
        failed.silent = False
        return failed
    finally:
        response.close()
    if response.status < 400:
        return LegFailed(f"{side} engine {base} answered {response.status}", side=side, peer=base)
    if cut:
        body, content_type = cut_body(body, base), "application/json"
    return LegFailed(
        f"{side} engine {base} answered {response.status}",
        side=side,
        peer=base,
        status=response.status,
        body=body,
        content_type=content_type,
    )


def _named(side: str, base: str) -> str:
    return f"{side} {'worker' if side == 'render' else 'engine'} {base}"


def broken(side: str, base: str, error: Unreachable | Broken, when: str = "before it answered") -> LegFailed:
    said = error.args[0]
    if isinstance(error, Unreachable):
        message = f"{_named(side, base)} cannot be reached: {said}"
        return LegFailed(message, side=side, peer=base, cause=PeerUnreachable(message))
    message = f"{_named(side, base)} closed the connection {when}: {said}"
    failed = LegFailed(message, side=side, peer=base, cause=EngineError(message))
    failed.silent = True
    return failed
