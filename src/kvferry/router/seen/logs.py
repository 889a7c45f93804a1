"""The router's log: text for people, or a JSON object per line for programs."""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

import msgspec

from kvferry.router.seen.record import Record

TEXT = "%(asctime)s %(levelname)s %(message)s"


class TextFormatter(logging.Formatter):
    """One line, whatever a client or an engine put into its message; a traceback follows it as it is."""

    def __init__(self) -> None:
        super().__init__(TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).replace("\r", "\\r").replace("\n", "\\n")


class JsonFormatter(logging.Formatter):
    """`time` (UTC), `level`, and `message` or a request's facts."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {"time": f"{at}.{int(record.msecs):03d}Z", "level": record.levelname}
        if isinstance(record.msg, Record):
            line |= {"event": "request", **record.msg.facts()}
        else:
            line |= {"event": "message", "message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def set_up(form: str, level: str, stream: TextIO | None = None) -> None:
    """`form`: 'text' or 'json'; `level`: as logging names it, in any case. To stderr."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.setLevel(level.upper())
    root.addHandler(handler)
