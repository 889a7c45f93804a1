"""The header `traceparent` (W3C Trace Context, version 00). Pure.

With tracing off it goes to both legs as it came, like any header. With tracing on the legs get the router's span in it,
under the client's trace, or under a new one where the client sent none that is valid.
"""

from __future__ import annotations

import re

import msgspec

HEADER = "traceparent"
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class TraceParent(msgspec.Struct, frozen=True):
    """`trace_id`, `span_id`: not 0."""

    trace_id: int
    span_id: int
    sampled: bool

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.sampled:02x}"


def parse(text: str | None) -> TraceParent | None:
    """None for what is absent or not valid: the specification has it ignored."""
    match = _FORM.fullmatch(text.strip()) if text else None
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    return TraceParent(trace_id, span_id, bool(int(match[4], 16) & 1)) if trace_id and span_id else None
