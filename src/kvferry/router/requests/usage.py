"""Whose number is whose: D counts tokens that it received as cached, so what is said of the prompt's cache is P's."""

from __future__ import annotations

from typing import Any

from kvferry.router.requests.openai import Body

MARKER = b'"cached_tokens"'
"""In every event that tells of the cache; a text that says so has its quotes escaped."""
_DETAILS = ("prompt_tokens_details", "input_tokens_details")


def correct(body: Body, prefill: Body, *, streamed: bool = False) -> bool:
    """P's details of the prompt in place of D's. `body`: a reply or an event; True if it changed."""
    inner = body.get("response")
    if isinstance(inner, dict):
        return _correct(inner, prefill, streamed)
    return _correct(body, prefill, streamed)


def _correct(body: Body, prefill: Body, streamed: bool) -> bool:
    usage, ours = body.get("usage"), prefill.get("usage")
    if not isinstance(usage, dict):
        return False
    name = next((name for name in _DETAILS if name in usage), None)
    said = next((ours[name] for name in _DETAILS if isinstance(ours, dict) and isinstance(ours.get(name), dict)), None)
    theirs = usage.get(name) if name is not None else None
    if streamed and not isinstance(theirs, dict):
        return False  # of the counts in mid-stream only the tokens are told
    if said is None:
        if not isinstance(theirs, dict) or name is None:
            return False
        if streamed:
            del usage[name]
        else:
            usage[name] = None
        return True
    merged = _merged(theirs if isinstance(theirs, dict) else {}, said, streamed)
    if merged == theirs:
        return False
    usage[name or _DETAILS[0]] = merged
    return True


def _merged(theirs: dict[str, Any], said: dict[str, Any], streamed: bool) -> dict[str, Any]:
    """D's keys in D's order with P's values; then what only P has. A stream leaves out what is null."""
    turns = theirs.get("input_tokens_per_turn")
    if isinstance(turns, list) and len(turns) > 1:
        return theirs  # D asked tools and went on: what it cached after its first turn is its own
    merged = {key: said.get(key, value) for key, value in theirs.items()}
    merged |= {key: value for key, value in said.items() if key not in theirs and value is not None}
    return {key: value for key, value in merged.items() if value is not None} if streamed else merged
