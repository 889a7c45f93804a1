"""The prompt of one request as the router sees it: how long it is about, and keys of its beginnings. Pure.

A key stands for all of the prompt up to the end of one block, so two prompts share as many leading keys as they share
whole blocks. Token ids are taken as they are. Text, which the router doesn't tokenize, is cut by bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

BYTES_PER_TOKEN = 4
"""Of text, until engines have said better: `Prompt.tokens` is for comparing loads, not for billing."""
BLOCK_TOKENS = 64
"""Finer keys cost more, and would hardly change a choice."""
TOKEN_BYTES = 8
PART_TOKENS = 512
"""An image or other part that is no text: engines differ, and the router can't know."""


class Prompt:
    """Of one part of a request. Made on the event loop; keys are computed when they are asked for, and kept.

    `exact`: the body has token ids, so that `tokens` is the true number. `nbytes`: of text. `parts`: tokens of what is
    no text. `plain`: the same ids have the same KV (no cache salt).
    """

    def __init__(self, body: dict[str, Any]) -> None:
        salt = body.get("cache_salt")
        self.root = hash((body.get("model"), salt if isinstance(salt, str) else None))
        self.plain = not salt
        self._raw, self.exact, more = _raw_of(body)
        self.nbytes = 0 if self.exact else len(self._raw)
        width = TOKEN_BYTES if self.exact else BYTES_PER_TOKEN
        self.parts = more
        self.tokens = -(-len(self._raw) // width) + more
        self._width = width
        self._keys: dict[tuple[int, int], list[int]] = {}

    def block_keys(self, block_tokens: int = BLOCK_TOKENS, root: int | None = None) -> Sequence[int]:
        """One for each whole block of so many tokens; `root` stands for what is before the first one."""
        begin = self.root if root is None else root
        found = self._keys.get((block_tokens, begin))
        if found is None:
            found = self._keys[block_tokens, begin] = list(chain(begin, self._raw, block_tokens * self._width))
        return found


def chain(root: int, raw: bytes, size: int) -> Iterable[int]:
    """A key for each whole `size` bytes of `raw`, which follows from all before it. Of this process only."""
    key = root
    for end in range(size, len(raw) + 1, size):
        key = hash((key, raw[end - size : end]))
        yield key


def raw_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as `Prompt` has them. Raises `TypeError`, `OverflowError` for what are no ids."""
    return array("q", token_ids).tobytes()


def _raw_of(body: dict[str, Any]) -> tuple[bytes, bool, int]:
    """The prompt's bytes, whether they are token ids, and how many tokens parts have that are not in them. Of a body
    that is no request: nothing, the engines will say so."""
    if isinstance(body.get("messages"), list):
        return _chat(body)
    prompt = body.get("token_ids", body.get("prompt", body.get("input")))
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list | str):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "surrogatepass"), False, 0
    if isinstance(prompt, list) and prompt:
        try:
            return raw_ids(prompt), True, 0
        except (TypeError, OverflowError):
            pass
        return _chat({"messages": prompt})
    return b"", False, 0


def _chat(body: dict[str, Any]) -> tuple[bytes, bool, int]:
    out: list[bytes] = []
    tokens = 0
    if body.get("tools"):
        out.append(_plain(body["tools"]))
    for message in body["messages"]:
        if not isinstance(message, dict):
            continue
        out.append(b"\n<" + str(message.get("role", "")).encode("utf-8", "surrogatepass") + b">")
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                out.append(text.encode("utf-8", "surrogatepass"))
            elif part is not None:
                out.append(hash(_plain(part)).to_bytes(8, "big", signed=True))
                tokens += PART_TOKENS
        if message.get("tool_calls"):
            out.append(_plain(message["tool_calls"]))
    return b"".join(out), False, tokens


def _plain(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (msgspec.EncodeError, UnicodeEncodeError, RecursionError):
        return repr(value).encode("utf-8", "surrogatepass")
