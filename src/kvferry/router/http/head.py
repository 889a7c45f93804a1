"""The head of an answer, and header bytes as text: what isn't UTF-8 comes out as it came in."""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import formatdate
from http import HTTPStatus

_REASONS = {status.value: status.phrase for status in HTTPStatus}
_date = (0, "")


def head(status: int, headers: Mapping[str, str], framing: str) -> bytes:
    global _date
    now = int(time.time())
    if _date[0] != now:
        _date = (now, formatdate(now, usegmt=True))
    lines = [f"HTTP/1.1 {status} {_REASONS.get(status, '')}"]
    lines += [f"{name}: {value}" for name, value in headers.items() if name.lower() != "content-length"]
    return ("\r\n".join([*lines, f"Date: {_date[1]}", "Server: kvferry", framing]) + "\r\n\r\n").encode(
        "utf-8", "surrogateescape"
    )


def text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
