"""Requests that move no KV: one engine answers them, and its answer goes to the client as it is."""

from __future__ import annotations

import json
import re
from typing import NoReturn

from aiohttp import web

from kvferry.errors import KVFerryError
from kvferry.router.engines.pool import Engine
from kvferry.router.http.server import Request
from kvferry.router.http.upstream import engine_error, forwarded, read_some, returned
from kvferry.router.replies import LegFailed, Refusal
from kvferry.router.requests import openai
from kvferry.router.requests.edits import dump
from kvferry.router.services import Services

TEXT = (
    "/tokenize",
    "/detokenize",
    "/v1/completions/render",
    "/v1/completions/derender",
    "/v1/chat/completions/render",
    "/v1/chat/completions/derender",
    "/v1/responses/render",
)
"""Text and tokens: a render worker's, where there is one."""
POST = (
    *TEXT,
    "/v1/messages/render",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v2/embed",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
)
"""Text and tokens, and what an engine computes without a token to decode. Routes that steer an engine are not here."""
GET = ("/version", "/tokenizer_info")
STORED = re.compile(r"/v1/responses/[A-Za-z0-9_-]+(/cancel)?")
"""Of a response that some decode engine stored."""


def methods_of(path: str) -> tuple[str, ...]:
    """() for a path that is not passed on."""
    if path in POST:
        return ("POST",)
    if path in GET:
        return ("GET",)
    if found := STORED.fullmatch(path):
        return ("POST",) if found.group(1) else ("GET",)
    return ()


async def one_engine(services: Services, request: web.Request) -> web.StreamResponse:
    """Raises `KVFerryError`."""
    engine = services.pool.pick("decode", None)
    return await _passed(services, request, engine, sanitised(await request.read()))


async def stored(services: Services, request: web.Request) -> web.StreamResponse:
    """Each decode engine is asked until one has the response; the last one's 404 is the answer otherwise."""
    engines = [engine for engine in services.pool.engines["decode"] if engine.ready]
    raw = await request.read()
    for engine in engines[:-1]:
        try:
            return await _passed(services, request, engine, raw, missing=LegFailed)
        except LegFailed as error:
            if error.own_status != 404:
                raise
    return await _passed(services, request, engines[-1] if engines else services.pool.pick("decode", None), raw)


async def in_its_words(services: Services, request: Request, raw: bytes) -> NoReturn:
    """An engine's refusal of a body that is no request. Raises `Refusal` where it says nothing, or takes it; also where
    it may name a peer, since an engine may read what we could not."""
    if _may_name(raw):
        raise Refusal(400, "invalid_json", "the body is not a JSON object")
    try:
        engine = services.pool.pick("decode", None)
        response = await services.upstream.pass_on(
            "decode", engine.url, "POST", request.path, raw, _headers(services, request)
        )
        try:
            if response.status < 400:
                raise Refusal(400, "invalid_json", "the body is not a JSON object")
            raise await engine_error("decode", engine.url, response)
        finally:
            response.close()
    except LegFailed as error:
        if error.from_engine:
            raise
        raise Refusal(400, "invalid_json", "the body is not a JSON object") from None


def sanitised(raw: bytes) -> bytes:
    """Without what a client must not tell an engine. Raises `Refusal` where it may be in there and can't be read."""
    if not _may_name(raw):
        return raw
    try:
        body = json.loads(raw)
        clean = openai.sanitised(body) if isinstance(body, dict) else body
        return raw if clean == body else dump(clean)
    except (ValueError, RecursionError):
        raise Refusal(400, "invalid_json", "the body is not a JSON object") from None


def _may_name(raw: bytes) -> bool:
    """A peer, to an engine: plainly, escaped, or in UTF-16 or 32, which have a zero byte in each letter of the name."""
    return b"transfer_params" in raw or b"\\u" in raw or b"\0" in raw


def _headers(services: Services, request: web.Request | Request) -> dict[str, str]:
    return dict(forwarded(request.headers, services.config))


async def _passed(
    services: Services,
    request: web.Request,
    engine: Engine,
    raw: bytes,
    missing: type[KVFerryError] | None = None,
) -> web.StreamResponse:
    """`missing`: a 404 is raised as this instead of passed on."""
    upstream = await services.upstream.pass_on(
        engine.role, engine.url, request.method, request.path_qs, raw, _headers(services, request)
    )
    try:
        if missing is not None and upstream.status == 404:
            raise await engine_error(engine.role, engine.url, upstream)
        response = web.StreamResponse(status=upstream.status, headers=returned(upstream.headers))
        if "Content-Length" in upstream.headers:
            response.content_length = int(upstream.headers["Content-Length"])
        await response.prepare(request)
        try:
            while chunk := await read_some(engine.role, engine.url, upstream):
                await response.write(chunk)
        except LegFailed:
            if request.transport is not None:
                request.transport.abort()  # an error now would be read as the rest of this answer
            raise
        await response.write_eof()
        return response
    finally:
        upstream.close()
