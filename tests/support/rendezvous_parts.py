"""P's machine in the unit tests: a registration, the machine, what it says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvferry.protocol.instructions import Note
from kvferry.protocol.messages import Failed, Register
from kvferry.protocol.rendezvous import Rendezvous

BLOCKS = (4, 5, 6)


def reg(
    reg_id: Any = 1,
    tid: Any = "t",
    mode: Any = "push",
    start: int = 0,
    end: int = 40,
    blocks: tuple[int, ...] = (7, 8, 9),
    legs: int = 1,
    credit: int = 16,
) -> Register:
    return Register(
        reg_id=reg_id,
        transfer_id=tid,
        mode=mode,
        start_token=start,
        end_token=end,
        block_ids=blocks,
        legs=legs,
        credit=credit,
    )


def acts(instructions: Iterable[Any]) -> list[Any]:
    """All but the notes."""
    return [one for one in instructions if not isinstance(one, Note)]


def machine() -> Rendezvous:
    return Rendezvous(lease_s=2.0, unseen_s=2.0)


def failed(reg_id: Any, code: str, reason: str) -> Failed:
    return Failed(reg_id=reg_id, code=code, reason=reason)


def gone(p: Rendezvous) -> bool:
    """It holds nothing."""
    return p.open_count() == 0 and p.next_due() is None and not p._by_leg
