"""What must be true of an engine's blocks between two steps, and what of its connector once it has no request. Looks
only, on the engine thread; with `--debug-invariants` the loop calls it whenever it has nothing to do."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvferry.engine.scheduler import Scheduler
from kvferry.errors import InvariantBroken

if TYPE_CHECKING:
    from kvferry.connector.scheduler_side import SchedulerSide


def check_engine(scheduler: Scheduler) -> None:
    """Raises `InvariantBroken` with all that is wrong."""
    found = _blocks(scheduler)
    if not scheduler.has_work() and scheduler.connector is not None:
        found += _connector(scheduler.connector)
    if found:
        raise InvariantBroken("; ".join(found[:10]))


def _blocks(scheduler: Scheduler) -> list[str]:
    """Each block is either free, or held as often as requests, past and present, name it."""
    held: Counter[int] = Counter()
    for request in scheduler._by_id.values():
        held.update(request.block_ids)
    for blocks in (*scheduler._kept.values(), *scheduler._sending.values()):
        held.update(blocks)
    pool, found = scheduler.pool, []
    for block in range(pool.num_blocks):
        if pool._holders[block] != held[block]:
            found.append(f"block {block} has {held[block]} requests and {pool._holders[block]} holders")
        elif (block in pool._free) != (not held[block]):
            found.append(f"block {block} is {'lost' if not held[block] else 'free and held'}")
    return found


def _connector(side: SchedulerSide) -> list[str]:
    kept = (
        ("sources", side._sources),
        ("landings", side._landings),
        ("transfer ids", side._transfer_ids),
        ("kept requests", side._kept),
    )
    return [f"the connector has {what} of ended requests: {sorted(left)[:5]}" for what, left in kept if left]
