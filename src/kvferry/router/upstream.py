"""The HTTP client to the engines: one pooled session, raw bytes out and in, third-party errors translated here.

Owner: the event loop. A response is closed by whoever holds it; closing one before its end closes its connection,
which is how an engine learns that nobody wants the answer.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from types import SimpleNamespace

import aiohttp
from multidict import CIMultiDict

from kvferry.errors import EngineError, PeerUnreachable
from kvferry.router.config import RouterConfig
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
    "content-type",
    "content-encoding",
    "accept-encoding",
    # the rank must be the one that the transfer names
    "x-data-parallel-rank",
}
_NOT_RETURNED = HOP_BY_HOP | {"content-length", "date", "server"}

IDLE_S = 4.0
"""An idle connection is kept this long: below uvicorn's 5 s, so that the engine is rarely the one that closes."""
IDLE_RACE_S = 0.5
"""A reused connection that breaks this soon was closed by the engine while idle; later it broke at work."""

_BROKEN = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionError)
_ALL = (aiohttp.ClientError, ConnectionError, asyncio.TimeoutError)


def _named_in_connection(headers: Mapping[str, str]) -> frozenset[str]:
    return frozenset(name.strip().lower() for name in headers.get("Connection", "").split(","))


def forwarded(headers: Mapping[str, str], config: RouterConfig) -> CIMultiDict[str]:
    """The client's headers as an engine gets them. The client's own Authorization goes before the router's key, but
    where the router checks its clients' keys itself and has one for the engines: then theirs stays here.
    """
    skip = _NOT_FORWARDED | _named_in_connection(headers)
    out = CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in skip)
    if config.api_key and (config.client_key_file or "Authorization" not in out):
        out["Authorization"] = f"Bearer {config.api_key}"
    out["Content-Type"] = "application/json"
    out["Accept-Encoding"] = "identity"
    return out


def returned(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """An engine's headers as the client gets them."""
    skip = _NOT_RETURNED | _named_in_connection(headers)
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in skip)


class Upstream:
    """Opens in `start`, closes in `close`. `tls`: for https engines; None: aiohttp's default, which checks them."""

    def __init__(self, connect_timeout_s: float, tls: ssl.SSLContext | None = None) -> None:
        self._tls: ssl.SSLContext | bool = True if tls is None else tls
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s)
        self._pooled: aiohttp.ClientSession | None = None
        self._fresh: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_mark_reused)
        # No limit here: a D leg that waits for its P leg must never keep that from a connection. `max_requests` bounds.
        self._pooled = self._session(aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S, ssl=self._tls), [trace])
        self._fresh = self._session(aiohttp.TCPConnector(limit=0, force_close=True, ssl=self._tls), [])

    def _session(self, connector: aiohttp.TCPConnector, traces: list[aiohttp.TraceConfig]) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector,
            timeout=self._timeout,
            trace_configs=traces,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
            max_field_size=64 * 1024,
            max_line_size=64 * 1024,
        )

    async def close(self) -> None:
        for session in (self._pooled, self._fresh):
            if session is not None:
                await session.close()

    async def post(
        self, side: str, base: str, route: str, body: bytes, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """The response once its head is there. Raises `LegFailed`.

        A second try is made, silently, only if a reused connection broke at once and without a response byte.
        """
        assert self._pooled is not None and self._fresh is not None
        note = SimpleNamespace(reused=False)
        begun = time.monotonic()
        try:
            return await self._pooled.post(
                base + route, data=body, headers=headers, allow_redirects=False, trace_request_ctx=note
            )
        except _BROKEN as error:
            refused = isinstance(error, aiohttp.ClientConnectorError)
            if refused or not note.reused or time.monotonic() - begun > IDLE_RACE_S:
                raise broken(side, base, error) from error
        except _ALL as error:
            raise broken(side, base, error) from error
        try:
            return await self._fresh.post(base + route, data=body, headers=headers, allow_redirects=False)
        except _ALL as error:
            raise broken(side, base, error) from error

    async def get(self, url: str, api_key: str, timeout_s: float, limit: int = MAX_ERROR_BYTES) -> tuple[int, bytes]:
        """Status and body. Raises `PeerUnreachable`."""
        assert self._pooled is not None
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._pooled.get(url, headers=headers, allow_redirects=False) as response,
            ):
                body, _ = await read_limited(response, limit)
                return response.status, body
        except _ALL as error:
            raise PeerUnreachable(f"{url}: {_said(error)}") from error


async def _mark_reused(session: object, context: SimpleNamespace, params: object) -> None:
    note = context.trace_request_ctx
    if note is not None:
        note.reused = True


async def read_limited(response: aiohttp.ClientResponse, limit: int) -> tuple[bytes, bool]:
    """At most `limit` bytes of the body, and whether it was longer."""
    parts: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_any():
        parts.append(chunk)
        size += len(chunk)
        if size > limit:
            return b"".join(parts)[:limit], True
    return b"".join(parts), False


async def read_all(side: str, base: str, response: aiohttp.ClientResponse) -> bytes:
    """The whole body. Raises `LegFailed`."""
    try:
        return await response.read()
    except _ALL as error:
        raise broken(side, base, error, "in the middle of its answer") from error


async def read_some(side: str, base: str, response: aiohttp.ClientResponse) -> bytes:
    """What has come, at once; b"" at the end. Raises `LegFailed`."""
    try:
        return await response.content.readany()
    except _ALL as error:
        raise broken(side, base, error, "in the middle of its answer") from error


async def engine_error(side: str, base: str, response: aiohttp.ClientResponse) -> LegFailed:
    """The engine's own refusal, ready to be passed on; a body above 1 MiB is cut."""
    content_type = response.headers.get("Content-Type", "application/json")
    try:
        body, cut = await read_limited(response, MAX_ERROR_BYTES)
    except _ALL as error:
        return broken(side, base, error, "in the middle of its error")
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


def broken(side: str, base: str, error: BaseException, when: str = "before it answered") -> LegFailed:
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ServerTimeoutError):
        message = f"{side} engine {base} cannot be reached: {_said(error)}"
        return LegFailed(message, side=side, peer=base, cause=PeerUnreachable(message))
    message = f"{side} engine {base} closed the connection {when}: {_said(error)}"
    return LegFailed(message, side=side, peer=base, cause=EngineError(message))


def _said(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error.strerror or str(error.os_error)
    return str(error) or type(error).__name__
