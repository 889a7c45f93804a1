"""Optional ASGI middleware for vLLM's API server: `--middleware kvferry.connector.middleware.CheckTransferParams`.

Without it a request with unusable `kv_transfer_params` fails inside the engine, and its client learns no more than
'Internal server error'. With it the client gets a 400 that names the field, and the engine never sees the request.
Only requests that mention the field are parsed here. It also tells a render tier the engine's settings (told.py).
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from kvferry.connector.params import parse
from kvferry.connector.told import Told
from kvferry.errors import ConfigError
from kvferry.render.settings import PATH as SETTINGS

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class CheckTransferParams:
    def __init__(self, app: App) -> None:
        self.app = app
        self.told = Told()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "GET" and scope["path"] == SETTINGS:
            return await reply(send, 200, await self.told.body(scope["app"].state))
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        messages: list[Message] = []
        while not messages or (messages[-1]["type"] == "http.request" and messages[-1].get("more_body")):
            messages.append(await receive())
        body = b"".join(message.get("body", b"") for message in messages)
        error = check(body) if b'"kv_transfer_params"' in body else None
        if error is not None:
            return await refuse(send, error)

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        return await self.app(scope, replay, send)


def check(body: bytes) -> ConfigError | None:
    """What is wrong with the body's `kv_transfer_params`, if anything. Bodies that are no JSON object are vLLM's."""
    try:
        request = json.loads(body)
    except ValueError:
        return None
    if not isinstance(request, dict):
        return None
    try:
        parse(request.get("kv_transfer_params"))
    except ConfigError as error:
        return error
    return None


async def refuse(send: Send, error: ConfigError) -> None:
    payload = {"message": str(error), "type": "BadRequestError", "param": "kv_transfer_params", "code": 400}
    await reply(send, 400, json.dumps({"error": payload}).encode())


async def reply(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
