"""The few pieces of ASGI that the session routes need."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from kvferry.render.wire import Headers, Refused

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON = (b"content-type", b"application/json")


async def read_body(scope: Scope, receive: Receive, most: int) -> bytes:
    """Raises `Refused` for more than `most` bytes, as soon as that is known, and when the client has gone."""
    said = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    if said.isdigit() and int(said) > most:
        raise too_large(most)
    parts: list[bytes] = []
    total = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise client_gone()
        part = message.get("body", b"")
        total += len(part)
        if total > most:
            raise too_large(most)
        parts.append(part)
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def client_gone() -> Refused:
    """For the metrics: nobody reads it."""
    return Refused(400, "client_gone", "the client has left")


def too_large(most: int) -> Refused:
    return Refused(413, "request_too_large", f"body: larger than {most} bytes (--max-body-bytes)")


async def answer(send: Send, status: int, headers: Headers, body: bytes) -> None:
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def refuse(send: Send, refused: Refused) -> None:
    headers = [JSON]
    if refused.retry_after is not None:
        headers.append((b"retry-after", str(refused.retry_after).encode()))
    await answer(send, refused.status, headers, refused.body())
