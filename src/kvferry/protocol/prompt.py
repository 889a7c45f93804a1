"""Which prompt a transfer is for: both engines know its token ids, and they must be the same. Pure.

KV of tokens [0, n) follows from the ids of these n tokens, so their digest is what both sides compare. D takes all
tokens of its prompt but the last (`end_token`). P has usually the same prompt; it may have one token less, where D's
ends with one that P has generated. So P keeps two digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from kvferry.protocol.messages import Register


class PromptMark(msgspec.Struct, frozen=True, kw_only=True):
    """What P knows its prompt by: how many tokens it has, and the digests of all but the last, and of all."""

    tokens: int
    but_last: str
    whole: str


def mark_prompt(token_ids: Sequence[int]) -> PromptMark:
    """Of a prompt with at least one token; some microseconds per thousand tokens."""
    packed, last = _packed(token_ids), len(msgspec.msgpack.encode(token_ids[-1]))
    so_far = hashlib.sha256(packed[:-last])
    but_last = _text(so_far.digest())
    so_far.update(packed[-last:])
    return PromptMark(tokens=len(token_ids), but_last=but_last, whole=_text(so_far.digest()))


def prompt_digest(token_ids: Sequence[int]) -> str:
    return _text(hashlib.sha256(_packed(token_ids)).digest())


def mismatch(have: PromptMark | None, wanted: Register) -> str:
    """Why a registration is not for this prompt; '' if it is, or takes nothing, or a side doesn't know its ids."""
    if have is None or not wanted.prompt or wanted.start_token == wanted.end_token:
        return ""
    known = {have.tokens - 1: have.but_last, have.tokens: have.whole}.get(wanted.end_token)
    if known == wanted.prompt:
        return ""
    if known is None:
        return f"decode side has a prompt of {wanted.end_token + 1} tokens, prefill side one of {have.tokens}"
    return f"the first {wanted.end_token} token ids differ: prefill side has {known}, decode side {wanted.prompt}"


def _packed(token_ids: Sequence[int]) -> bytes:
    """Each id in turn, in one to nine bytes that don't begin another's."""
    packed = msgspec.msgpack.encode(list(token_ids))
    header = 1 if len(token_ids) < 16 else 3 if len(token_ids) < 1 << 16 else 5
    return packed[header:]


def _text(raw: bytes) -> str:
    return raw[:12].hex()
