"""Ends a transfer by its id, whichever router began it: every rank of every engine is told."""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec

from kvferry.errors import PeerUnreachable
from kvferry.ids import TransferId
from kvferry.router.engines.pool import Engine, Pool
from kvferry.router.replies import Refusal
from kvferry.transfer import inquiry

Outcome = Literal["released", "unknown", "unreachable"]


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank said: it held something for the transfer, or not, or it could not be asked."""

    url: str
    role: str
    rank: int
    outcome: Outcome
    reason: str = ""


async def cancel(pool: Pool, transfer_id: TransferId, reason: str) -> list[Told]:
    """Also where a rank holds nothing yet: whoever comes for this transfer later is refused. A request that decodes has
    no transfer any more and goes on. Raises `Refusal` where the engines have no side channel."""
    if not pool.has_side_channel:
        raise Refusal(409, "no_side_channel", "these engines have no side channel to be told on", hint="--connector")
    return list(await asyncio.gather(*(_tell(one, rank, transfer_id, reason) for one, rank in _ranks(pool.all()))))


def _ranks(engines: list[Engine]) -> list[tuple[Engine, int]]:
    return [
        (engine, rank)
        for engine in engines
        for rank in range(engine.description.tp_size if engine.description is not None else engine.spec.tp or 1)
    ]


async def _tell(engine: Engine, rank: int, transfer_id: TransferId, reason: str) -> Told:
    spec = engine.spec
    try:
        known = await inquiry.abandon(spec.side_host, spec.side_port + rank, transfer_id, reason, key=engine.key)
    except PeerUnreachable as error:
        return Told(url=engine.url, role=engine.role, rank=rank, outcome="unreachable", reason=str(error))
    return Told(url=engine.url, role=engine.role, rank=rank, outcome="released" if known else "unknown")
