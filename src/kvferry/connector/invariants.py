"""What must be true of the scheduler's half between two steps: it knows nothing of requests that have ended.

Looks only; the engine's main thread. With `debug_invariants` it is called once per step; vLLM makes one more after
its last request has ended, so that an idle engine was looked at too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.errors import InvariantBroken

if TYPE_CHECKING:
    from kvferry.connector.scheduler_side import SchedulerSide


def check_scheduler_side(side: SchedulerSide, live: set[str]) -> None:
    """`live`: requests that came in and haven't ended. Raises `InvariantBroken` with all that is wrong."""
    sources, landings = side._sources, side._landings
    found = []
    for what, left in (
        ("landings", landings.keys() - live),
        ("kept blocks, beside a landing,", side._kept & landings.keys()),
        ("sources that nobody waits for", {name for name, one in sources.items() if one.finished and one.released}),
        ("sources", {name for name, one in sources.items() if not one.finished and name not in live}),
        ("transfer ids", side._transfer_ids - {one.params.transfer_id for one in sources.values()}),
    ):
        if left:
            found.append(f"{what} of ended requests are left: {sorted(left)[:5]}")
    if len(side._transfer_ids) < len(sources):
        found.append("two sources have one transfer id, or one has none")
    if found:
        raise InvariantBroken(f"{side.engine_id}, scheduler: {'; '.join(found)}")
