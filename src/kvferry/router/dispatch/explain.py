"""What the engines' side channels have to say of one transfer: why it failed on D, and that P may let it go."""

from __future__ import annotations

import asyncio
import json
import logging

from kvferry.errors import (
    CompatError,
    ConfigError,
    EngineError,
    FabricError,
    KeyRefused,
    KVFerryError,
    KvMismatch,
    PeerUnreachable,
    PromptMismatch,
    TransferError,
    TransferRefused,
    TransferTimeout,
)
from kvferry.ids import TransferId
from kvferry.protocol.messages import Verdict
from kvferry.router.engines.pool import Engine
from kvferry.router.replies import LegFailed
from kvferry.transfer import inquiry

log = logging.getLogger("kvferry.router")

TIMEOUT_S = 1.0
_CONSEQUENCES = frozenset({"cancelled", "abandoned"})
_BY_CODE: dict[str, type[KVFerryError]] = {
    kind.code: kind
    for kind in (
        CompatError,
        ConfigError,
        EngineError,
        FabricError,
        KeyRefused,
        KvMismatch,
        PeerUnreachable,
        PromptMismatch,
        TransferError,
        TransferRefused,
        TransferTimeout,
    )
}


def cause_of(code: str) -> type[KVFerryError]:
    """The error that a client gets for a transfer that ended with `code` on D."""
    return _BY_CODE.get(code, TransferError)


async def why(
    decode: Engine, prefill: Engine | None, transfer_id: TransferId, error: LegFailed, dp_rank: int = 0
) -> LegFailed:
    """`error` (D's own) with the transfer's reason in it, where a rank of D says that the transfer failed."""
    verdict = await _failed(decode, transfer_id, dp_rank)
    if verdict is None:
        return error
    source = f" from prefill engine {prefill.url}" if prefill is not None else ""
    message = f"decode engine {decode.url} did not get its KV{source}: {verdict.reason}"
    cause = cause_of(verdict.code)(message)
    return LegFailed(message, side="decode", peer=decode.url, cause=cause, verdict=verdict.code)


async def _failed(decode: Engine, transfer_id: TransferId, dp_rank: int) -> Verdict | None:
    """What the first rank says that knows why it failed; all are asked at once. That it was cancelled is what a rank
    knows of another's failure, so such a word counts only if no rank has a better one."""
    about, host, port = decode.description, decode.spec.side_host, decode.side_port(dp_rank)
    ranks = range(about.tp_size if about is not None else 1)
    asked = [
        asyncio.ensure_future(inquiry.why(host, port + rank, transfer_id, TIMEOUT_S, decode.key)) for rank in ranks
    ]
    cancelled = None
    try:
        for answer in asyncio.as_completed(asked):
            try:
                verdict = await answer
            except PeerUnreachable as unreachable:
                log.warning("no verdict on %s from %s: %s", transfer_id, decode.url, unreachable)
                continue
            if verdict.state == "failed" and verdict.code not in _CONSEQUENCES:
                return verdict
            if verdict.state == "failed":
                cancelled = verdict
        return cancelled
    finally:
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def abandon(prefill: Engine, transfer_id: TransferId, reason: str, dp_rank: int = 0) -> str:
    """Tell every rank of P (of that data-parallel rank); 'released', 'unknown' (it held nothing) or 'unreachable'."""
    spec, about = prefill.spec, prefill.description
    ranks = range(about.tp_size if about is not None else 1)
    where, key = (spec.side_host, prefill.side_port(dp_rank)), prefill.key
    tellings = [inquiry.abandon(where[0], where[1] + rank, transfer_id, reason, key=key) for rank in ranks]
    told = await asyncio.gather(*tellings, return_exceptions=True)
    for answer in told:
        if isinstance(answer, PeerUnreachable):
            log.warning("%s could not be abandoned at %s: %s", transfer_id, prefill.url, answer)
            return "unreachable"
        if isinstance(answer, BaseException):
            raise answer
    return "released" if any(told) else "unknown"


def error_event(peer: str, payload: bytes) -> LegFailed:
    """D's stream began with an error event: the status that it names, and its body."""
    try:
        facts = json.loads(payload)["error"]
        code = facts.get("code") if isinstance(facts, dict) else None
    except (ValueError, KeyError, TypeError):
        code = None
    status = code if isinstance(code, int) and 400 <= code <= 599 else 502
    return LegFailed(
        f"decode engine {peer} answered with an error event", side="decode", peer=peer, status=status, body=payload
    )
