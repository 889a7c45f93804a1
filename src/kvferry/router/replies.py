"""How a failure reaches the client: OpenAI's error shape, with the side, the peer and the transfer beside it."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from kvferry.errors import EngineError, KVFerryError

MAX_ERROR_BYTES = 1024 * 1024
_CUT_TEXT_BYTES = 64 * 1024


class Refusal(KVFerryError):
    """The router itself turns a request down, before any engine is asked."""

    def __init__(self, status: int, code: str, message: str, *, param: str | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.http_status = status
        self.code = code
        self.param = param
        self.headers: dict[str, str] = {}


class LegFailed(EngineError):
    """One leg ended without its answer. With `status` and `body`: the engine's own error, to be passed on as it is.
    `verdict`: how the transfer ended, in the words of D's side channel; "" where it wasn't asked or had none.
    `resent`: a kept connection broke under it, and then no other could be made. `silent`: the engine was reached and
    its connection ended, so that nothing is known of what it did."""

    resent = silent = False

    def __init__(
        self,
        message: str,
        *,
        side: str,
        peer: str,
        hint: str = "",
        status: int = 0,
        body: bytes = b"",
        content_type: str = "application/json",
        cause: KVFerryError | None = None,
        verdict: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.side = side
        self.peer = peer
        self.own_status = status
        self.body = body
        self.content_type = content_type
        self.verdict = verdict
        if cause is not None:
            self.http_status = cause.http_status
            self.code = cause.code
        if status:
            self.http_status = status

    @property
    def from_engine(self) -> bool:
        return self.own_status > 0


def without_frames(error: KVFerryError) -> None:
    """Forget where it was raised. What keeps an error keeps those frames and all that they hold, itself too."""
    one: BaseException | None = error
    while one is not None:
        one.__traceback__ = None
        one = one.__cause__ or one.__context__


_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    403: "invalid_request_error",
    404: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    501: "not_implemented_error",
    503: "service_unavailable",
    504: "timeout_error",
}


def error_facts(error: KVFerryError, transfer_id: str = "") -> dict[str, Any]:
    """The body of a typed error."""
    facts: dict[str, Any] = {
        "message": str(error),
        "type": _TYPES.get(error.http_status, "api_error"),
        "param": getattr(error, "param", None),
        "code": error.code,
    }
    if isinstance(error, LegFailed):
        facts |= {"side": error.side, "peer": error.peer}
    if transfer_id:
        facts["transfer_id"] = transfer_id
    return {"error": facts}


def error_response(error: KVFerryError, transfer_id: str = "") -> web.Response:
    headers = {"x-kvferry-transfer-id": transfer_id} if transfer_id else {}
    if isinstance(error, LegFailed) and error.from_engine:
        headers["Content-Type"] = error.content_type
        return web.Response(status=error.own_status, body=error.body, headers=headers)
    if isinstance(error, Refusal):
        headers.update(error.headers)
    if error.http_status in (429, 503):
        headers["Retry-After"] = str(getattr(error, "retry_after_s", 1))
        headers["x-kvferry-reason"] = error.code
    body = json.dumps(error_facts(error, transfer_id)).encode()
    return web.Response(status=error.http_status, body=body, content_type="application/json", headers=headers)


def error_event(error: KVFerryError, transfer_id: str) -> bytes:
    """The last event of a stream that failed."""
    return b"data: " + json.dumps(error_facts(error, transfer_id)).encode() + b"\n\n"


def recounted(body: bytes, sent: int, asked: int) -> bytes:
    """vLLM's validation messages count the fields of the body: `sent` by us, `asked` by the client."""
    return body.replace(b"<dict of %d items>" % sent, b"<dict of %d items>" % asked) if sent != asked else body


def cut_body(head: bytes, peer: str) -> bytes:
    """A valid JSON body in place of an engine's error that was too long; says so and keeps its beginning."""
    text = head[:_CUT_TEXT_BYTES].decode("utf-8", "replace")
    facts = {
        "message": f"{text}... (cut: the error body of {peer} is longer than {MAX_ERROR_BYTES} bytes)",
        "type": "api_error",
        "param": None,
        "code": "error_body_cut",
    }
    return json.dumps({"error": facts}).encode()
