"""The launcher's few HTTP calls, with the standard library: it must start fast and need no event loop."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

from kvferry.errors import EngineError

# Loopback is never reached through a proxy that the environment names.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def healthy(url: str, timeout_s: float = 2.0) -> bool:
    """Whether `GET url/health` answers 200."""
    try:
        with _OPENER.open(f"{url}/health", timeout=timeout_s) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def open_json(url: str, body: dict[str, Any] | None = None, timeout_s: float = 60.0) -> Any:
    """GET, or POST `body`; returns the open response. EngineError with the answer's text where it is no success."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    try:
        return _OPENER.open(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace").strip()[:500]
        raise EngineError(f"{url} answered {error.code}: {text}") from None
    except OSError as error:
        raise EngineError(f"{url} did not answer: {error}") from None


def get_json(url: str, timeout_s: float = 10.0) -> Any:
    with open_json(url, timeout_s=timeout_s) as answer:
        return json.load(answer)


def post_json(url: str, body: dict[str, Any], timeout_s: float = 60.0) -> Any:
    with open_json(url, body, timeout_s) as answer:
        return json.load(answer)
