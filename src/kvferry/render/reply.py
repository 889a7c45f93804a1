"""What vLLM's handler has said: status, headers and bytes that wait for the router's next question."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from kvferry.render.wire import CREATED, Headers, Refused

END = b"\n\n"


class Reply:
    """`said`: so many SSE events are made and not said again. `created`: the time that events carry instead of now."""

    def __init__(self, said: int, created: int | None) -> None:
        self.status: int | None = None
        self.headers: Headers = []
        self.events = 0
        self.created = created
        self._said = said
        self._stamp = created
        self._out: list[bytes] = []
        self._streamed = False
        self._told = False

    @property
    def content_type(self) -> bytes:
        return next((value for name, value in self.headers if name.lower() == b"content-type"), b"")

    def take(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = list(message.get("headers", ()))
            self._streamed = self.content_type.startswith(b"text/event-stream")
        elif message["type"] == "http.response.body" and message.get("body"):
            self._add(message["body"])

    def _add(self, body: bytes) -> None:
        if self._stamp is not None:
            body = CREATED.sub(rb'"\1":\g<2>%d' % self._stamp, body)
        elif self.created is None and (found := CREATED.search(body)) is not None:
            self.created = int(found[3])
        if self._streamed:
            events = body.count(END)
            if self.events < self._said:
                # Those that were said end with the separator of the last of them.
                body = body.split(END, min(events, self._said - self.events))[-1] if events else b""
            self.events += events
        if body:
            self._out.append(body)

    def fail(self) -> None:
        """The handler died before its reply began."""
        refused = Refused(500, "InternalServerError", "the frontend failed")
        self.status = refused.status
        self.headers = [(b"content-type", b"application/json")]
        self._out = [refused.body()]

    def drain(self) -> bytes:
        body, self._out = b"".join(self._out), []
        return body

    def first(self) -> Headers:
        """What the router tells its client before the first byte; once."""
        if self._told or self.status is None:
            return []
        self._told = True
        headers = [
            (b"x-kvferry-status", str(self.status).encode()),
            (b"x-kvferry-content-type", self.content_type),
        ]
        if self.created is not None:
            headers.append((b"x-kvferry-created", str(self.created).encode()))
        return headers
